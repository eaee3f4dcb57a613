"""Command ``weft predict OP``. weft.cli registers it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from weft.arguments import did_you_mean, quoted
from weft.bench.names import alias_of
from weft.console import WORLD_SIZE, numbers, one_line_errors

if TYPE_CHECKING:
    from weft.predict.ops import Time

# Without loading the models, which takes seconds.
OPS = (
    "ag-gemm", "gemm-rs", "all-reduce", "moe", "ag-moe", "moe-rs", "moe-dispatch", "moe-combine", "sharded-decode-attention",
)  # fmt: skip
# Constants of a GPU that are printed, with their units.
SHOWN = {
    "flops": ("TFLOP/s", 1e-6), "memory": ("GB/s", 1e-3), "launch": ("us", 1), "hop": ("us", 1), "stores": ("GB/s", 1e-3),
    "link": ("GB/s", 1e-3), "copy": ("us", 1),
}  # fmt: skip


def _complete(incomplete: str) -> list[str]:
    return [word for word in OPS if word.startswith(incomplete)]


class _Sizes(NamedTuple):
    """Sizes of an op of all ranks together, an example, and the shape of one rank by world size."""

    names: tuple[str, ...]
    example: tuple[int, ...]
    shape: Callable[[Sequence[int], int], tuple[int, ...]]


def _share(name: str, size: int, world_size: int) -> int:
    if size % world_size:
        raise ValueError(
            f"{name}={size} is not divisible by world_size={world_size}; pass another --world-size, or --shapes with the sizes "
            f"of all ranks together"
        )
    return size // world_size


def _experts(sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    tokens, hidden, inner, experts, top = sizes
    return -(-tokens // world_size), top, experts, max(1, experts // world_size), hidden, inner, 0


_ROWS = _Sizes(
    ("tokens", "hidden", "experts", "top"), (8192, 2048, 128, 8),
    lambda s, w: _experts((s[0], s[1], s[1], s[2], s[3]), w),
)  # fmt: skip
_EXPERTS = _Sizes(("tokens", "hidden", "inner", "experts", "top"), (8192, 2048, 768, 128, 8), _experts)
KNOWN = {
    "ag-gemm": _Sizes(("M", "N", "K"), (8192, 51200, 5120), lambda s, w: (s[0], _share("N", s[1], w), s[2])),
    "gemm-rs": _Sizes(("M", "N", "K"), (8192, 5120, 25600), lambda s, w: (s[0], s[1], _share("K", s[2], w))),
    "all-reduce": _Sizes(("bytes",), (1 << 20,), lambda s, w: tuple(s)),
    "moe": _EXPERTS, "ag-moe": _EXPERTS, "moe-rs": _EXPERTS, "moe-dispatch": _ROWS, "moe-combine": _ROWS,
    "sharded-decode-attention": _Sizes(
        ("batch", "q_heads", "kv_heads", "head_dim", "context"), (1, 64, 8, 128, 1 << 20),
        lambda s, w: (s[0], w * _share("q_heads", s[1], w), *s[2:]),
    ),
}  # fmt: skip


def predict(
    op: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(OPS[:-1])} or {OPS[-1]}",
            autocompletion=_complete,
        ),
    ],
    world_size: Annotated[
        str, typer.Option(*WORLD_SIZE, help="Numbers of ranks, such as 2 or 8,16,32")
    ] = "2,4,8,16,32,64",
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            help="Shapes, as to weft bench: qwen3-32b/down:8192; 8192,5120,3200, of one rank; 64KiB,1MiB. Or sizes of all "
            "ranks together, with x between them: 8192x5120x25600. Several with commas, or repeated"
        ),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(hidden=True, help="The former name of --shapes")] = None,
    gpu: Annotated[str, typer.Option(help="GPU to predict for: h200, h100, a100, b200 or mi300x")] = "h200",
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of a usage error")] = False,
) -> None:
    """Predict an op's time on more GPUs by the cost functions that plans choose by.

    docs/performance/prediction.md has the errors of the model.
    """
    with one_line_errors(traceback):
        op = alias_of(op)
        if op not in OPS:
            raise ValueError(f"op={quoted(op)} has no model; pass one of {', '.join(OPS)}{did_you_mean(op, OPS)}")
        counts = numbers("world-size", world_size)
        from weft.costs.gpu import FOLDER, named

        shipped = sorted(file.stem for file in FOLDER.glob("*.json"))
        if gpu.lower() not in shipped:
            raise ValueError(f"--gpu {quoted(gpu)} has no constants; pass one of {', '.join(shipped)}")
        name = named(gpu.lower()).gpu
        for title, times in _cases(op, [*(shapes or ()), *(shape or ())], counts, gpu.lower()):
            typer.echo(f"{op} {title}, bf16, predicted on {name}s")
            for count, time in times.items():
                typer.echo(f"W = {count:<4} {time.us:10.1f} us{_designs(time)}")
        for line in _basis(op, gpu.lower()):
            typer.echo(line)


def _designs(time: Time) -> str:
    """Designs of a time, the fastest first; "" where there is one."""
    ordered = sorted(time.by_design, key=lambda name: time.by_design[name])
    return "".join(f", {name} {time.by_design[name]:.1f}" if at else f"  {name}" for at, name in enumerate(ordered)) * (
        len(ordered) > 1
    )


def _cases(op: str, words: Sequence[str], counts: Sequence[int], gpu: str) -> Iterator[tuple[str, dict[int, Time]]]:
    """Yield each problem as text, with its time by world size."""
    known, of_ranks = KNOWN[op], []
    for word in words:
        if re.fullmatch(r"\s*\d+\s*x.*", word.lower()):
            for part in word.split(","):
                yield _of_all_ranks(op, _sizes(part, known), counts, gpu)
        else:
            of_ranks.append(word)
    if of_ranks:
        yield from _of_each_rank(op, of_ranks, counts, gpu)
    if not words:
        yield _of_all_ranks(op, known.example, counts, gpu)


def _of_all_ranks(op: str, sizes: Sequence[int], counts: Sequence[int], gpu: str) -> tuple[str, dict[int, Time]]:
    from weft.predict.ops import of_shape

    known = KNOWN[op]
    title = ", ".join(f"{name}={size}" for name, size in zip(known.names, sizes, strict=True))
    times = {count: of_shape(op, known.shape(sizes, count), count, gpu) for count in counts}
    return f"{title} of all ranks together", times


def _of_each_rank(
    op: str, words: Sequence[str], counts: Sequence[int], gpu: str
) -> Iterator[tuple[str, dict[int, Time]]]:
    """Yield the problems that `weft bench` reads in these words; a set has other sizes at each world size."""
    from weft.bench.ops.shapes import parse_shapes
    from weft.predict.ops import of_shape

    times: dict[str, dict[int, Time]] = {}
    for count in counts:
        for shape in parse_shapes("ag-moe" if op == "moe" else op, words, count):
            times.setdefault(shape.label, {})[count] = of_shape(op, shape.size, count, gpu)
    for label, by_count in times.items():
        yield f"{label} as in weft bench", by_count


def _basis(op: str, gpu: str) -> Iterator[str]:
    """Lines on the constants that were measured and assumed, and on the errors."""
    from weft.bench.names import OPS as NAMES
    from weft.costs.gpu import named
    from weft.costs.predicted import errors
    from weft.predict.ops import RAIL, RAIL_LINK

    of = named(gpu)
    values = ", ".join(f"{name} {getattr(of, name) * scale:.4g} {unit}" for name, (unit, scale) in SHOWN.items())
    yield f"{'measured' if of.measured else 'sheet'}:  {values} (weft/costs/gpus/{gpu}.json)"
    yield f"assumed:   rail {RAIL:.4g} us, rail_link {RAIL_LINK / 1e3:.4g} GB/s (beyond 8 GPUs)"
    known = errors().get(NAMES.get(op, op), {})
    for world, (rows, seen, unseen, largest) in known.items():
        yield (
            f"error:     {seen:.1%} in the mean of {rows} committed rows at W = {world}, {unseen:.1%} of the ones that the fit "
            f"has not seen, {largest:+.0%} at most"
        )
    if not set(known) - {"1"}:
        yield "error:     not known over ranks, for which no row is committed"


def _sizes(text: str, known: _Sizes) -> tuple[int, ...]:
    """Sizes of all ranks together. ValueError unless there is a positive one for each name."""
    parts = text.strip().lower().split("x")
    if len(parts) != len(known.names) or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(
            f"--shapes {quoted(text)} is not {'x'.join(known.names)}; pass positive numbers, as in "
            f"{'x'.join(map(str, known.example))}"
        )
    if math.prod(map(int, parts)) >= 1 << 60:
        raise ValueError(f"--shapes {quoted(text)} is larger than any machine; pass the sizes of a problem")
    return tuple(map(int, parts))
