"""Command ``weft predict OP``. weft.cli registers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from weft.arguments import quoted
from weft.console import WORLD_SIZE, numbers, one_line_errors

if TYPE_CHECKING:
    from weft.predict.costs import Costs


def _complete(incomplete: str) -> list[str]:
    return [word for word in _ops() if word.startswith(incomplete)]


class _Predicted(NamedTuple):
    """Sizes of an op as the flag has them, an example, and the time."""

    sizes: tuple[str, ...]
    example: tuple[int, ...]
    time: Callable[[Costs, Sequence[int], int], float]


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
            lambda costs, s, w: ops.ag_gemm(costs, s[0], whole("N", s[1], w), s[2], w),
        ),
        "gemm-rs": _Predicted(
            ("M", "N", "K"), (8192, 5120, 25600),
            lambda costs, s, w: ops.gemm_rs(costs, s[0], s[1], whole("K", s[2], w), w),
        ),
        "all-reduce": _Predicted(("bytes",), (1 << 20,), lambda costs, s, w: ops.all_reduce(costs, s[0], w)),
        "moe": _Predicted(
            ("tokens", "hidden", "inner", "experts", "top"), (8192, 2048, 768, 128, 8),
            lambda costs, s, w: ops.moe(costs, *s, w),
        ),
    }  # fmt: skip


def predict(
    op: Annotated[str, typer.Argument(help="ag-gemm, gemm-rs, all-reduce or moe", autocompletion=_complete)],
    world_size: Annotated[str, typer.Option(*WORLD_SIZE, help="2 or 8,16,32")] = "2,4,8,16,32,64",
    shape: Annotated[str | None, typer.Option(help="Sizes of all ranks together, as in 8192x51200x5120")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of a usage error")] = False,
) -> None:
    """Predict an op's time on H200s by its tile schedule.

    docs/performance/prediction.md has the errors of the model.
    """
    with one_line_errors(traceback):
        known = _ops()
        if op not in known:
            raise ValueError(f"op={quoted(op)} has no model; pass one of {', '.join(known)}")
        found = known[op]
        sizes = found.example if shape is None else _sizes(shape, found.sizes)
        typer.echo(
            f"{op} {', '.join(f'{n}={s}' for n, s in zip(found.sizes, sizes, strict=True))}, bf16, predicted on H200s"
        )
        from weft.predict.costs import read

        costs = read()
        for count in numbers("world-size", world_size):
            us = found.time(costs, sizes, count)
            typer.echo(f"W = {count:<4} {us:10.1f} us")


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
