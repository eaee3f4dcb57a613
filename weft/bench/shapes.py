"""Ops by name, and named sets of shapes.

A shape of a collective is (bytes,): of the input of all-reduce, reduce-scatter and all-to-all, of the output of
all-gather. A shape of all-reduce-rms-norm is (M, H): rows and columns. A shape of a GEMM op is (M, N, K): M rows of the whole
GEMM, N and K of one rank's. Shapes of LEVELS are in weft.bench.levels.steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from weft.arguments import shortened

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
NORMED = "all-reduce-rms-norm"
GEMMS = ("gemm", "ag-gemm", "gemm-rs", "gemm-ar")
ROWS_SHARDED = ("ag-gemm", "gemm-rs")
OPS = (*COLLECTIVES, *GEMMS)
LEVELS = ("mlp", "attn", "model", "generate")
ALL = (*COLLECTIVES, NORMED, *GEMMS, *LEVELS)
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DECODE_ROWS = (1, 2, 4, 7, 8, 16, 32, 64, 128)
SIZES = tuple(1024 * 4**power for power in range(10))  # 1 KiB .. 256 MiB
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes that determine a transformer's projections."""

    hidden: int
    query: int  # heads * head_dim
    key_value: int  # KV heads * head_dim
    intermediate: int


MODELS = {
    "qwen3-32b": Model(hidden=5120, query=8192, key_value=1024, intermediate=25600),
    "llama3-70b": Model(hidden=8192, query=8192, key_value=1024, intermediate=28672),
}
# yifuwang/symm-mem-recipes, the table of its fused all-gather-matmul: N and K of one rank of eight.
RECIPES = {"8b": (1792, 4096), "70b": (3584, 8192), "105b": (6656, 16384)}
RECIPE_ROWS = (4096, 8192, 16384)

COLUMN_PARALLEL, ROW_PARALLEL = ("qkv", "gate-up"), ("o", "down")
PROJECTIONS = {
    "gemm": (*COLUMN_PARALLEL, *ROW_PARALLEL),
    "ag-gemm": COLUMN_PARALLEL,
    "gemm-rs": ROW_PARALLEL,
    "gemm-ar": ROW_PARALLEL,
}
# A simulated tile costs milliseconds regardless of its size.
TINY_SIZES = (1 * KIB, 12 * KIB)
# Limits for simulated ranks: at eight times as much `weft tune --quick` at W=2 takes minutes (x86).
SIMULATED_BYTES, SIMULATED_ROWS, SIMULATED_SIDE = 128 * KIB, 64, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    size: tuple[int, ...]
    label: str


def dimensions(op: str) -> int:
    """Number of dimensions of a shape of the op."""
    return 1 if op in COLLECTIVES else 2 if op == NORMED else 3


def is_collective(op: str) -> bool:
    """True for an op that moves data and computes almost nothing, rated by its bytes on the wire."""
    return op in (*COLLECTIVES, NORMED)


def sets_for(op: str) -> tuple[str, ...]:
    return ("sizes",) if op in COLLECTIVES else tuple(MODELS) if op == NORMED else (*MODELS, "symm-mem-recipes")


def parse_shapes(
    op: str, words: Sequence[str], world_size: int, *, dtype: str = "bf16", tiny: bool = False
) -> tuple[Shape, ...]:
    """Shapes that ``words`` name, in order, without duplicates; the op's first set without words.

    word   SET, SET/PROJECTION, SET:M,M,… or M,N,K of a GEMM op; SET, SET:M,M,… or M,H of all-reduce-rms-norm; "sizes" or
           BYTES,BYTES,… (64KiB, 1MiB) of a collective; or several of them separated by commas
    dtype  bounds the rows of all-reduce-rms-norm; Plan refuses an unknown one
    tiny   for simulated ranks: named sets become a few small shapes, and large shapes are refused

    ValueError for unreadable words and for shapes that the op refuses.
    """
    check_op(op, (NORMED,))
    read = _collective if op in COLLECTIVES else _normed if op == NORMED else _gemm
    found: dict[tuple[int, ...], Shape] = {}
    for word in [one for several in words for one in words_apart(several)] or sets_for(op)[:1]:
        for shape in read(op, word, world_size, tiny):
            if op == NORMED:
                _check_width(op, word, shape.size, dtype)
            if tiny:
                _check_simulable(op, word, shape.size, world_size)
            found.setdefault(shape.size, shape)
    return tuple(found.values())


def stand_ins(op: str, words: Sequence[str], world_size: int, dtype: str = "bf16") -> tuple[str, ...]:
    """A line for each named set among ``words`` with the small shapes that simulated ranks run instead."""
    lines = []
    for word in [one for several in words for one in words_apart(several)]:
        if not word[:1].isdigit():
            shapes = parse_shapes(op, [word], world_size, dtype=dtype, tiny=True)
            labels = ", ".join(
                "x".join(map(str, shape.size)) if len(shape.size) > 1 else shape.label for shape in shapes
            )
            lines.append(
                f"--shapes {shortened(word)}: simulated ranks run {labels} instead, since a tile takes them milliseconds; "
                f"its own shapes take a machine with GPUs"
            )
    return tuple(lines)


def words_apart(text: str) -> list[str]:
    """Words of a list. A number belongs to the numbers before it, or to the rows of a set."""
    found: list[str] = []
    for part in text.split(","):
        word = found[-1] if found else ""
        if word and not part.strip()[:1].isalpha() and (":" in word or not word[:1].isalpha()):
            found[-1] = f"{word},{part.strip()}"
        else:
            found.append(part.strip())
    return found


def check_op(op: str, others: Sequence[str] = ()) -> None:
    """Raise ValueError unless ``op`` is one of OPS or of ``others``."""
    if op not in (*OPS, *others):
        raise ValueError(f"op {op!r} is unknown; choose one of {', '.join((*OPS, *others))}")


def size_label(nbytes: int) -> str:
    """Size as text: 64 KiB, 1 MiB, 1000 B."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes % unit == 0 and nbytes:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def _check_simulable(op: str, word: str, size: tuple[int, ...], world_size: int) -> None:
    """Raise ValueError, with a smaller shape, for a shape that takes simulated ranks minutes."""
    if op in GEMMS:
        if max(size) <= SIMULATED_SIDE:
            return
        m, n, k = (min(side, SIMULATED_SIDE) for side in size)
        limit = f"{SIMULATED_SIDE} in each of M, N and K"
        smaller = f"{m // world_size * world_size if op in ROWS_SHARDED else m},{n},{k}"
    elif op == NORMED:
        rows = min(SIMULATED_ROWS, SIMULATED_BYTES // 2 // size[1])
        if size[0] <= rows:
            return
        limit = f"{SIMULATED_ROWS} rows and {SIMULATED_BYTES // 2:,} elements"
        smaller = f"{rows},{size[1]}"
    else:
        if size[0] <= SIMULATED_BYTES:
            return
        limit = size_label(SIMULATED_BYTES)
        smaller = str(SIMULATED_BYTES // (16 * world_size) * 16 * world_size)
    raise ValueError(f"--shapes {word}: simulated ranks take at most {limit}; take {smaller}, or a machine with GPUs")


def _collective(op: str, word: str, world_size: int, tiny: bool) -> list[Shape]:
    if word.lower() == "sizes":
        # Every rank's part is aligned to 16 bytes, so that any algorithm may be tried.
        step = 16 * world_size
        sizes = [size // step * step for size in (TINY_SIZES if tiny else SIZES) if size >= step]
    else:
        sizes = [_bytes(op, part) for part in word.split(",")]
    for size in sizes:
        if size % (4 * world_size):
            raise ValueError(
                f"--shapes {word}: {size} bytes do not divide into {world_size} parts of whole elements; "
                f"take {-(-size // (4 * world_size)) * 4 * world_size}"
            )
    return [Shape(size=(size,), label=size_label(size)) for size in sizes]


def _bytes(op: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(b|kib|mib|gib)?", text.strip().lower())
    if not match or int(match[1]) == 0:
        raise ValueError(f"--shapes {text!r} is neither a set of {op} (sizes) nor bytes (4096, 64KiB, 1MiB)")
    return int(match[1]) * {None: 1, "b": 1, "kib": KIB, "mib": MIB, "gib": 1 << 30}[match[2]]


def _normed(op: str, word: str, world_size: int, tiny: bool) -> list[Shape]:
    name, _, rows = word.lower().partition(":")
    if re.fullmatch(r"[1-9]\d*,[1-9]\d*", word):
        sizes = [tuple(map(int, word.split(",")))]
    elif name not in sets_for(op) or not re.fullmatch(r"([1-9]\d*(,[1-9]\d*)*)?", rows):
        raise ValueError(f"--shapes {word!r} is neither a set ({', '.join(sets_for(op))}) nor M,H, rows and columns")
    elif tiny:
        sizes = [(3, 32)]
    else:
        sizes = [(m, MODELS[name].hidden) for m in (map(int, rows.split(",")) if rows else DECODE_ROWS)]
    return [Shape(size=size, label=f"{size[0]}x{size[1]}") for size in sizes]


def _check_width(op: str, word: str, size: tuple[int, ...], dtype: str) -> None:
    """Raise ValueError, with the nearest valid row size, for rows without a kernel."""
    rows, width = size
    itemsize = ITEMSIZE.get(dtype, 2)
    step, most = 16 // itemsize, 64 * KIB // itemsize
    if width % step or width > most:
        raise ValueError(
            f"--shapes {word}: {op} takes rows of 16 bytes or a multiple, at most 64 KiB, and {width} elements of {dtype} "
            f"have {width * itemsize} bytes; take {rows},{min(-(-width // step) * step, most)}"
        )


def _gemm(op: str, word: str, world_size: int, tiny: bool) -> list[Shape]:
    if re.fullmatch(r"\d+(,\d+)*", word):
        size = tuple(map(int, word.split(",")))
        if len(size) != 3 or 0 in size:
            raise ValueError(f"--shapes {word} is not M,N,K: three positive numbers, as in 4096,12800,5120")
        _check_rows(op, word, size[:1], world_size)
        return [Shape(size=size, label="x".join(map(str, size)))]
    match = re.fullmatch(r"([a-z0-9-]+)(?:/([a-z0-9-]+))?(?::([\d,]+))?", word.lower())
    name, part, rows = match.groups() if match else (word, None, None)
    if name not in sets_for(op):
        raise ValueError(f"--shapes {word!r} is neither a set ({', '.join(sets_for(op))}) nor M,N,K")
    parts = _parts(op, name, 1 if tiny else world_size)
    if part is not None and part not in parts:
        raise ValueError(f"--shapes {word!r}: {name} has no part {part!r} for {op}; it has {', '.join(parts)}")
    chosen = [part] if part else list(parts)
    if rows and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", rows):
        raise ValueError(f"--shapes {word}: {rows} are not rows M,M,…: positive numbers, as in {name}:1024,2048")
    listed = tuple(map(int, rows.split(","))) if rows else ()
    _check_rows(op, word, listed, world_size)
    if tiny:
        return [Shape(size=(16 * world_size, 48, 32), label=f"tiny {part}") for part in chosen[:1]]
    if not listed:
        every = RECIPE_ROWS if name == "symm-mem-recipes" else ROWS
        listed = tuple(m for m in every if op not in ROWS_SHARDED or m % world_size == 0)
    if not listed:
        raise ValueError(
            f"--shapes {word}: no rows of {name} divide by world_size={world_size}; name some, as in {name}:{128 * world_size}"
        )
    return [Shape(size=(m, *parts[part]), label=f"{name} {part} M={m}") for part in chosen for m in listed]


def _check_rows(op: str, word: str, rows: Sequence[int], world_size: int) -> None:
    """Raise ValueError for rows that cannot be split equally over the ranks."""
    for m in rows:
        if op in ROWS_SHARDED and m % world_size:
            raise ValueError(
                f"--shapes {word}: {op} needs M={m} divisible by world_size={world_size}; "
                f"take {-(-m // world_size) * world_size}"
            )


def _parts(op: str, name: str, world_size: int) -> dict[str, tuple[int, int]]:
    """Part of the set -> (N, K) of one rank's GEMM."""
    if name == "symm-mem-recipes":
        # N and K swapped if the ranks split K.
        return {part: (k, n) if op in ("gemm-rs", "gemm-ar") else (n, k) for part, (n, k) in RECIPES.items()}
    model = MODELS[name]
    if any(size % world_size for size in (model.query, model.key_value, model.intermediate)):
        raise ValueError(
            f"--world-size {world_size}: {name} has query={model.query}, key_value={model.key_value} and "
            f"intermediate={model.intermediate}, which do not divide into equal shares; take 1, 2, 4 or 8, or --shapes M,N,K"
        )
    everything = {
        "qkv": ((model.query + 2 * model.key_value) // world_size, model.hidden),
        "gate-up": (2 * model.intermediate // world_size, model.hidden),
        "o": (model.hidden, model.query // world_size),
        "down": (model.hidden, model.intermediate // world_size),
    }
    return {part: everything[part] for part in PROJECTIONS[op]}
