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
    from weft.predict.costs import Costs


# Without loading the models, which takes seconds.
OPS = (
    "ag-gemm", "gemm-rs", "all-reduce", "moe", "ag-moe", "moe-rs", "moe-dispatch", "moe-combine", "sharded-decode-attention",
)  # fmt: skip
# Costs of a copy engine, and the memory's bandwidth, measured apart.
ENGINE = ("copy", "flag", "link", "memory")


def _complete(incomplete: str) -> list[str]:
    return [word for word in OPS if word.startswith(incomplete)]


class _Predicted(NamedTuple):
    """Sizes of an op as the flag has them, an example, the time, and the costs that it depends on.

    groups    of costs.FITTED
    measured  costs that were measured apart
    """

    sizes: tuple[str, ...]
    example: tuple[int, ...]
    time: Callable[[Costs, Sequence[int], int], float]
    groups: tuple[str, ...]
    measured: tuple[str, ...]


def _ops() -> dict[str, _Predicted]:
    from weft.predict import ops

    def whole(name: str, size: int, world_size: int) -> int:
        if size % world_size:
            raise ValueError(
                f"{name}={size} is not divisible by world_size={world_size}; pass the size of all ranks together"
            )
        return size // world_size

    return {
        "ag-gemm": _Predicted(
            ("M", "N", "K"), (8192, 51200, 5120),
            lambda costs, s, w: ops.ag_gemm(costs, s[0], whole("N", s[1], w), s[2], w), ("gemm", "overlap"), ENGINE,
        ),
        "gemm-rs": _Predicted(
            ("M", "N", "K"), (8192, 5120, 25600),
            lambda costs, s, w: ops.gemm_rs(costs, s[0], s[1], whole("K", s[2], w), w), ("gemm", "overlap"), ENGINE,
        ),
        "all-reduce": _Predicted(
            ("bytes",), (1 << 20,), lambda costs, s, w: ops.all_reduce(costs, s[0], w), ("overlap", "all-reduce"),
            ("hop", *ENGINE[:3]),
        ),
        **{
            name: _Predicted(
                ("tokens", "hidden", "inner", "experts", "top"), (8192, 2048, 768, 128, 8),
                lambda costs, s, w, time=time: time(costs, *s, w), ("gemm", "overlap", "grouped"), ENGINE,
            )
            for name, time in (("moe", ops.moe), ("ag-moe", ops.ag_moe), ("moe-rs", ops.moe_rs))
        },
        **{
            name: _Predicted(
                ("tokens", "hidden", "experts", "top"), (8192, 2048, 128, 8),
                lambda costs, s, w, time=time: time(costs, *s, w), groups, ("hop",),
            )
            for name, time, groups in (
                ("moe-dispatch", ops.moe_dispatch, ("all-reduce",)),
                ("moe-combine", ops.moe_combine, ("overlap", "all-reduce")),
            )
        },
        "sharded-decode-attention": _Predicted(
            ("batch", "q_heads", "kv_heads", "head_dim", "context"), (1, 64, 8, 128, 1 << 20),
            lambda costs, s, w: ops.decode_attention(costs, s[0], w * whole("q_heads", s[1], w), *s[2:], w),
            ("all-reduce", "decode"), ("hop",),
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
    world_size: Annotated[str, typer.Option(*WORLD_SIZE, help="2 or 8,16,32")] = "2,4,8,16,32,64",
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            help="As to weft bench: qwen3-32b/down:8192; 8192,5120,3200, of one rank; 64KiB,1MiB. Or sizes of all ranks "
            "together, with x between them: 8192x5120x25600. Several with commas, or repeated"
        ),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(hidden=True, help="The former name of --shapes")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of a usage error")] = False,
) -> None:
    """Predict an op's time on H200s by its tile schedule, with the costs that it assumes.

    docs/performance/prediction.md has the errors of the model.
    """
    with one_line_errors(traceback):
        op = alias_of(op)
        if op not in OPS:
            raise ValueError(f"op={quoted(op)} has no model; pass one of {', '.join(OPS)}{did_you_mean(op, OPS)}")
        known = _ops()
        from weft.predict.costs import read

        costs, model, counts = read(), known[op], numbers("world-size", world_size)
        for title, times in _cases(op, model, [*(shapes or ()), *(shape or ())], costs, counts):
            typer.echo(f"{op} {title}, bf16, predicted on H200s")
            for count, us in times.items():
                typer.echo(f"W = {count:<4} {us:10.1f} us")
        for line in _basis(op, model, costs):
            typer.echo(line)


def _cases(
    op: str, model: _Predicted, words: Sequence[str], costs: Costs, counts: Sequence[int]
) -> Iterator[tuple[str, dict[int, float]]]:
    """Yield each problem as text, with its time by world size."""
    of_ranks: list[str] = []
    for word in words:
        if re.fullmatch(r"\s*\d+\s*x.*", word.lower()):
            for part in word.split(","):
                yield _of_all_ranks(model, _sizes(part, model), costs, counts)
        else:
            of_ranks.append(word)
    if of_ranks:
        yield from _of_each_rank(op, of_ranks, costs, counts)
    if not words:
        yield _of_all_ranks(model, model.example, costs, counts)


def _of_all_ranks(
    model: _Predicted, sizes: Sequence[int], costs: Costs, counts: Sequence[int]
) -> tuple[str, dict[int, float]]:
    title = ", ".join(f"{name}={size}" for name, size in zip(model.sizes, sizes, strict=True))
    return f"{title} of all ranks together", {count: model.time(costs, sizes, count) for count in counts}


def _of_each_rank(
    op: str, words: Sequence[str], costs: Costs, counts: Sequence[int]
) -> Iterator[tuple[str, dict[int, float]]]:
    """Yield the problems that `weft bench` reads in these words; a set has other sizes at each world size."""
    from weft.bench.ops.shapes import parse_shapes
    from weft.predict.ops import of_shape

    times: dict[str, dict[int, float]] = {}
    for count in counts:
        for shape in parse_shapes("ag-moe" if op == "moe" else op, words, count):
            times.setdefault(shape.label, {})[count] = of_shape(costs, op, shape.size, count)
    for label, by_count in times.items():
        yield f"{label} as in weft bench", by_count


def _basis(op: str, model: _Predicted, costs: Costs) -> Iterator[str]:
    """Lines on the costs that were fitted, measured apart and assumed, and on the errors."""
    from weft.predict.costs import ASSUMED, FITTED, errors, shown

    def listed(names: Sequence[str]) -> str:
        return ", ".join(shown(costs, name) for name in names)

    yield f"fitted:    {listed([name for group in model.groups for name in FITTED[group]])}"
    yield f"measured:  {listed(model.measured)}"
    yield f"assumed:   {listed(ASSUMED)} (beyond 8 GPUs)"
    known = errors().get(op, {})
    for world, (rows, mean, largest) in known.items():
        yield f"error:     {mean:.1%} in the mean of {rows} committed rows at W = {world}, {largest:+.0%} at most"
    if not set(known) - {"1"}:
        yield "error:     not known over ranks, for which no row is committed"


def _sizes(text: str, model: _Predicted) -> tuple[int, ...]:
    """Sizes of all ranks together. ValueError unless there is a positive one for each name."""
    parts = text.strip().lower().split("x")
    if len(parts) != len(model.sizes) or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(
            f"--shapes {quoted(text)} is not {'x'.join(model.sizes)}; pass positive numbers, as in "
            f"{'x'.join(map(str, model.example))}"
        )
    if math.prod(map(int, parts)) >= 1 << 60:
        raise ValueError(f"--shapes {quoted(text)} is larger than any machine; pass the sizes of a problem")
    return tuple(map(int, parts))
