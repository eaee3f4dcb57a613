"""Ops by name, and named sets of shapes.

A shape has the form that its op names (``Op.form``): "bytes", (bytes,) of the input of all-reduce, reduce-scatter and
all-to-all, of the output of all-gather; "rows", (M, H): rows and columns; "gemm", (M, N, K): M rows of the whole GEMM, N and K
of one rank's; "attention", (pairs, tokens, head_dim): pairs of a sequence and a KV head, tokens of each; "prefill":
``PrefillShape``; "moe": ``MoeShape``; "sharded": ``ShardedShape``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

import weft.ops  # noqa: F401  registers the ops
from weft.arguments import shortened
from weft.bench.harness.workload import DTYPES, Shape, listed_shapes, words_apart
from weft.bench.names import unknown_op
from weft.bench.ops.attention_shapes import LONG, check_sharded, read_sharded, simulable_sharded
from weft.bench.ops.moe_shapes import MIXTURES, check_choices, read_moe, simulable_moe
from weft.bench.ops.prefill_shapes import PROMPTED, check_heads_shared, read_prefill, simulable_prefill
from weft.ops.attention.qk_norm_rope import HEAD_DIMS
from weft.ops.gemm.gemm_op import GemmOp
from weft.ops.op import Op, find_op, registered

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DECODE_ROWS = (1, 2, 4, 7, 8, 16, 32, 64, 128)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIM = 128  # of MODELS
SIZES = tuple(1024 * 4**power for power in range(10))  # 1 KiB .. 256 MiB
KIB, MIB = 1 << 10, 1 << 20


class Model(NamedTuple):
    """Sizes that determine a transformer's projections."""

    hidden: int
    query: int  # heads * head_dim
    key_value: int  # KV heads * head_dim
    intermediate: int


MODELS = {
    "qwen3-32b": Model(5120, 8192, 1024, 25600),
    "llama3-70b": Model(8192, 8192, 1024, 28672),
}
# yifuwang/symm-mem-recipes, the table of its fused all-gather-matmul: N and K of one rank of eight.
RECIPES = {"8b": (1792, 4096), "70b": (3584, 8192), "105b": (6656, 16384)}
RECIPE_ROWS = (4096, 8192, 16384)

# A simulated tile costs milliseconds regardless of its size.
TINY_SIZES = (1 * KIB, 12 * KIB)
# Limits for simulated ranks: at eight times as much `weft tune --quick` at W=2 takes minutes (x86).
SIMULATED_BYTES, SIMULATED_ROWS, SIMULATED_SIDE = 128 * KIB, 64, 512
SIMULATED_TOKENS = 256


def op_of(name: str) -> Op:
    """The op of this name or alias, or of a variant (``VARIED``). ValueError unless it has shapes."""
    try:
        op = find_op(name.partition("+")[0])
    except ValueError:
        op = None
    if op is None or not op.form:
        raise unknown_op(name, OPS)
    return op


def computes(op: Op) -> bool:
    """True for an op that is rated by what each rank computes, False by its bytes on the wire."""
    return op.form in ("gemm", "prefill", "sharded") or not op.collective or has_flops(op)


def has_flops(op: Op) -> bool:
    """True for an op with a GEMM."""
    return type(op).flops is not Op.flops


def parse_shapes(
    op: str, words: Sequence[str], world_size: int, *, dtype: str = "bf16", tiny: bool = False
) -> tuple[Shape, ...]:
    """Shapes that ``words`` name, in order, without duplicates; the op's first set without words.

    word   SET, SET/PROJECTION, SET:M,M,… or M,N,K of a GEMM op; SET, SET:M,M,… or M,H of all-reduce-rms-norm; "sizes" or
           BYTES,BYTES,… (64KiB, 1MiB) of a collective; SET, SET:T,T,… or T,QUERY_HEADS,KV_HEADS,HEAD_DIM of sharded
           prompts; SET, SET/zipf, SET/recorded, SET:T,T,… or T,K,EXPERTS,HELD,HIDDEN,FEATURES of a mixture of experts; or
           several words separated by commas
    dtype  may bound a shape; the workload refuses an unknown one
    tiny   for simulated ranks: named sets become a few small shapes, and large shapes are refused

    ValueError for unreadable words and for shapes that the op refuses.
    """
    made = op_of(op)
    form = FORMS[made.form]
    by_size: dict[tuple[int, ...], Shape] = {}
    for word in [one for several in words for one in words_apart(several)] or form.sets[:1]:
        for shape in form.read(made, word, world_size, tiny):
            form.check(made, word, shape.size, dtype)
            if tiny:
                _check_simulable(word, shape.size, *form.simulable(made, shape.size, world_size))
            by_size.setdefault(shape.size, shape)
    return tuple(by_size.values())


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
                f"the named shapes take a machine with GPUs"
            )
    return tuple(lines)


def size_label(nbytes: int) -> str:
    """Size as text: 64 KiB, 1 MiB, 1000 B."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes % unit == 0 and nbytes:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def _check_simulable(word: str, size: tuple[int, ...], limit: str, smaller: tuple[int, ...]) -> None:
    """Raise ValueError, with a smaller shape, for a shape that takes simulated ranks minutes."""
    if any(asked > most for asked, most in zip(size, smaller, strict=True)):
        raise ValueError(
            f"--shapes {word}: simulated ranks take at most {limit}; take {','.join(map(str, smaller))}, or a machine with GPUs"
        )


def _no_check(op: Op, word: str, size: tuple[int, ...], dtype: str) -> None:
    """Any dtype goes with a shape of this form."""


# --- bytes -------------------------------------------------------------------------------------------------------------


def _read_bytes(op: Op, word: str, world_size: int, tiny: bool) -> list[Shape]:
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


def _bytes(op: Op, text: str) -> int:
    # KB and K are KiB, as to nccl-tests; labels say so.
    match = re.fullmatch(r"(\d+)\s*(?:([kmg])(?:i?b)?|b)?", text.strip().lower())
    if not match or int(match[1]) == 0:
        raise ValueError(f"--shapes {text!r} is neither a set of {op.alias} (sizes) nor bytes (4096, 64KiB, 1MiB)")
    return int(match[1]) * {None: 1, "k": KIB, "m": MIB, "g": 1 << 30}[match[2]]


def _simulable_bytes(op: Op, size: tuple[int, ...], world_size: int) -> tuple[str, tuple[int, ...]]:
    step = 16 * world_size
    return size_label(SIMULATED_BYTES), size if size[0] <= SIMULATED_BYTES else (SIMULATED_BYTES // step * step,)


# --- rows --------------------------------------------------------------------------------------------------------------


def _read_rows(op: Op, word: str, world_size: int, tiny: bool) -> list[Shape]:
    def named(name: str, rows: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(m, MODELS[name].hidden) for m in rows or DECODE_ROWS]

    return listed_shapes(word, 2, MODELS, "M,H, rows and columns", (3, 32) if tiny else (), named)


def _check_width(op: Op, word: str, size: tuple[int, ...], dtype: str) -> None:
    """Raise ValueError, with the nearest valid row size, for rows without a kernel."""
    rows, width = size
    itemsize = DTYPES.get(dtype, torch.bfloat16).itemsize
    step, most = 16 // itemsize, 64 * KIB // itemsize
    if width % step or width > most:
        raise ValueError(
            f"--shapes {word}: {op.alias} takes rows of 16 bytes or a multiple, at most 64 KiB, and {width} elements of "
            f"{dtype} have {width * itemsize} bytes; take {rows},{min(-(-width // step) * step, most)}"
        )


def _simulable_rows(op: Op, size: tuple[int, ...], world_size: int) -> tuple[str, tuple[int, ...]]:
    rows = min(SIMULATED_ROWS, SIMULATED_BYTES // 2 // size[1])
    return f"{SIMULATED_ROWS} rows and {SIMULATED_BYTES // 2:,} elements", (min(size[0], rows), size[1])


# --- GEMMs -------------------------------------------------------------------------------------------------------------


def _read_gemm(op: Op, word: str, world_size: int, tiny: bool) -> list[Shape]:
    if re.fullmatch(r"\d+(,\d+)*", word):
        size = tuple(map(int, word.split(",")))
        if len(size) != 3 or 0 in size:
            raise ValueError(f"--shapes {word} is not M,N,K: three positive numbers, as in 4096,12800,5120")
        _check_rows(op, word, size[:1], world_size)
        return [Shape(size=size, label="x".join(map(str, size)))]
    match = re.fullmatch(r"([a-z0-9-]+)(?:/([a-z0-9-]+))?(?::([\d,]+))?", word.lower())
    name, part, rows = match.groups() if match else (word, None, None)
    if name not in GEMM_SETS:
        raise ValueError(f"--shapes {word!r} is neither a set ({', '.join(GEMM_SETS)}) nor M,N,K")
    parts = _parts(op, name, 1 if tiny else world_size)
    if part is not None and part not in parts:
        raise ValueError(f"--shapes {word!r}: {name} has no part {part!r} for {op.alias}; it has {', '.join(parts)}")
    chosen = [part] if part else list(parts)
    listed = _rows_of_set(op, word, name, rows, world_size)
    if tiny:
        return [Shape(size=(16 * world_size, 48, 32), label=f"tiny {part}") for part in chosen[:1]]
    if not listed:
        raise ValueError(
            f"--shapes {word}: no rows of {name} divide by world_size={world_size}; name some, as in {name}:{128 * world_size}"
        )
    return [Shape(size=(m, *parts[part]), label=f"{name} {part} M={m}") for part in chosen for m in listed]


def _rows_of_set(op: Op, word: str, name: str, rows: str | None, world_size: int) -> list[int]:
    """``rows`` as numbers; without them all of the set that can be split over the ranks."""
    if not rows:
        every = RECIPE_ROWS if name == "symm-mem-recipes" else ROWS
        return [m for m in every if not _rows_sharded(op) or m % world_size == 0]
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", rows):
        raise ValueError(f"--shapes {word}: {rows} are not rows M,M,…: positive numbers, as in {name}:1024,2048")
    listed = [int(m) for m in rows.split(",")]
    _check_rows(op, word, listed, world_size)
    return listed


def _check_rows(op: Op, word: str, rows: Sequence[int], world_size: int) -> None:
    """Raise ValueError for rows that cannot be split equally over the ranks."""
    for m in rows:
        if _rows_sharded(op) and m % world_size:
            raise ValueError(
                f"--shapes {word}: {op.alias} needs M={m} divisible by world_size={world_size}; "
                f"take {-(-m // world_size) * world_size}"
            )


def _parts(op: Op, name: str, world_size: int) -> dict[str, tuple[int, int]]:
    """Part of the set -> (N, K) of one rank's GEMM."""
    gemm = cast(GemmOp, op)
    if name == "symm-mem-recipes":
        # N and K swapped if the ranks split K.
        return {part: (k, n) if gemm.sums else (n, k) for part, (n, k) in RECIPES.items()}
    model = MODELS[name]
    if any(size % world_size for size in (model.query, model.key_value, model.intermediate)):
        raise ValueError(
            f"--world-size {world_size}: {name} has query={model.query}, key_value={model.key_value} and "
            f"intermediate={model.intermediate}, which do not divide into equal shares; take 1, 2, 4 or 8, or --shapes M,N,K"
        )
    return parts_of(gemm, model, world_size)


def parts_of(gemm: GemmOp, model: Model, world_size: int) -> dict[str, tuple[int, int]]:
    """Projection that ``gemm`` computes -> (N, K) of one rank's GEMM in a model."""
    everything = {
        "qkv": ((model.query + 2 * model.key_value) // world_size, model.hidden),
        # Of a gated GEMM N counts the results.
        "gate-up": ((1 if gemm.gated else 2) * model.intermediate // world_size, model.hidden),
        "o": (model.hidden, model.query // world_size),
        "down": (model.hidden, model.intermediate // world_size),
    }
    return {part: everything[part] for part in gemm.projections}


def _rows_sharded(op: Op) -> bool:
    return cast(GemmOp, op).rows_sharded


def _simulable_gemm(op: Op, size: tuple[int, ...], world_size: int) -> tuple[str, tuple[int, ...]]:
    m, n, k = (min(side, SIMULATED_SIDE) for side in size)
    if _rows_sharded(op):
        m = m // world_size * world_size
    return f"{SIMULATED_SIDE} in each of M, N and K", (m, n, k)


# --- attention ---------------------------------------------------------------------------------------------------------


def _read_attention(op: Op, word: str, world_size: int, tiny: bool) -> list[Shape]:
    def named(name: str, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        heads = MODELS[name].key_value // HEAD_DIM
        if heads % world_size:
            raise ValueError(f"--world-size {world_size}: {name} has {heads} KV heads; take 1, 2, 4 or 8")
        return [(heads // world_size, count, HEAD_DIM) for count in tokens or CONTEXTS]

    return listed_shapes(word, 3, MODELS, "PAIRS,TOKENS,HEAD_DIM", (2, 20, 32) if tiny else (), named)


def _check_heads(op: Op, word: str, size: tuple[int, ...], dtype: str) -> None:
    """Raise ValueError for a head_dim without a kernel."""
    if size[2] not in HEAD_DIMS:
        raise ValueError(f"--shapes {word}: head_dim={size[2]} is not one of {', '.join(map(str, HEAD_DIMS))}")


def _simulable_attention(op: Op, size: tuple[int, ...], world_size: int) -> tuple[str, tuple[int, ...]]:
    pairs = max(1, SIMULATED_TOKENS // size[1])
    return f"{SIMULATED_TOKENS} tokens in all", (min(size[0], pairs), min(size[1], SIMULATED_TOKENS), size[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form of shapes.

    dimensions  of a shape; axis: what they are, for pictures
    sets        named ones
    read        (op, word, world_size, tiny) -> the shapes that a word names
    check       (op, word, size, dtype): ValueError for a size that the op refuses
    simulable   (op, size, world_size) -> the limit of simulated ranks in words, and the size or a smaller one within it
    """

    dimensions: int
    axis: str
    sets: tuple[str, ...]
    read: Callable[[Op, str, int, bool], list[Shape]]
    check: Callable[[Op, str, tuple[int, ...], str], None]
    simulable: Callable[[Op, tuple[int, ...], int], tuple[str, tuple[int, ...]]]


GEMM_SETS = (*MODELS, "symm-mem-recipes")
FORMS = {
    "bytes": Form(
        dimensions=1, axis="size of the whole tensor of a rank", sets=("sizes",),
        read=_read_bytes, check=_no_check, simulable=_simulable_bytes,
    ),
    "rows": Form(
        dimensions=2, axis="rows x columns", sets=tuple(MODELS),
        read=_read_rows, check=_check_width, simulable=_simulable_rows,
    ),
    "gemm": Form(
        dimensions=3, axis="rows M of the whole GEMM", sets=GEMM_SETS,
        read=_read_gemm, check=_no_check, simulable=_simulable_gemm,
    ),
    "attention": Form(
        dimensions=3, axis="KV heads of all sequences x tokens x head_dim", sets=tuple(MODELS),
        read=_read_attention, check=_check_heads, simulable=_simulable_attention,
    ),
    "sharded": Form(
        dimensions=6, axis="sequences x query heads x KV heads x head_dim x context", sets=tuple(LONG),
        read=read_sharded, check=check_sharded, simulable=simulable_sharded,
    ),
    "prefill": Form(
        dimensions=4, axis="tokens x query heads x KV heads x head_dim", sets=tuple(PROMPTED),
        read=read_prefill, check=check_heads_shared, simulable=simulable_prefill,
    ),
    "moe": Form(
        dimensions=7, axis="tokens T of a rank", sets=tuple(MIXTURES),
        read=read_moe, check=check_choices, simulable=simulable_moe,
    ),
}  # fmt: skip
OPS = tuple(op.alias for form in FORMS for op in registered() if op.form == form)
