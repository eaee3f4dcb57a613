"""Command ``weft predict OP``. weft.cli registers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from weft.arguments import did_you_mean, quoted
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
    shape: Annotated[str | None, typer.Option(help="Sizes of all ranks together, as in 8192x51200x5120")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of a usage error")] = False,
) -> None:
    """Predict an op's time on H200s by its tile schedule, with the costs that it assumes.

    docs/performance/prediction.md has the errors of the model.
    """
    with one_line_errors(traceback):
        if op not in OPS:
            raise ValueError(f"op={quoted(op)} has no model; pass one of {', '.join(OPS)}{did_you_mean(op, OPS)}")
        found = _ops()[op]
        sizes = found.example if shape is None else _sizes(shape, found.sizes)
        typer.echo(
            f"{op} {', '.join(f'{n}={s}' for n, s in zip(found.sizes, sizes, strict=True))}, bf16, predicted on H200s"
        )
        from weft.predict.costs import read

        costs = read()
        for count in numbers("world-size", world_size):
            us = found.time(costs, sizes, count)
            typer.echo(f"W = {count:<4} {us:10.1f} us")
        for line in _basis(op, found, costs):
            typer.echo(line)


def _basis(op: str, found: _Predicted, costs: Costs) -> Iterator[str]:
    """Lines on the costs that were fitted, measured apart and assumed, and on the errors."""
    from weft.predict.costs import ASSUMED, FITTED, errors

    def listed(names: Sequence[str]) -> str:
        return ", ".join(f"{name} {getattr(costs, name):g}" for name in names)

    yield f"fitted:    {listed([name for group in found.groups for name in FITTED[group]])}"
    yield f"measured:  {listed(found.measured)}"
    yield f"assumed:   {listed(ASSUMED)} (beyond 8 GPUs)"
    known = errors().get(op, {})
    for world, (rows, mean, largest) in known.items():
        yield f"error:     {mean:.1%} in the mean of {rows} committed rows at W = {world}, {largest:+.0%} at most"
    if not set(known) - {"1"}:
        yield "error:     not known over ranks, for which no row is committed"


def _sizes(text: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """Sizes of ``--shape``. ValueError unless there is a positive one for each name."""
    parts = text.lower().split("x")
    if len(parts) != len(names) or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(
            f"--shape {quoted(text)} is not {'x'.join(names)}; pass positive numbers, as in 8192x51200x5120"
        )
    if math.prod(map(int, parts)) >= 1 << 60:
        raise ValueError(f"--shape {quoted(text)} is larger than any machine; pass the sizes of a problem")
    return tuple(map(int, parts))
