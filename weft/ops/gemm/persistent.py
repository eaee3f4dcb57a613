"""The host side of the persistent GEMM kernels: checks of operands, agreement of the ranks, workspaces and constants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from weft.kernels.operands import can_describe, operand, row_stride
from weft.kernels.tile_schedule import MAX_PARTS, Tiles, whole_places
from weft.ops.gemm.config import GemmConfig
from weft.ops.registration import FLOATS, check_is_tensor

if TYPE_CHECKING:
    from weft.runtime.team import Team

# Elements of the smallest output tile: how many tiles, each with its signal, a buffer can hold.
SMALLEST_TILE = 16 * 16


def check_operands(op: str, a: torch.Tensor, b: torch.Tensor, device: torch.device | None, name: str = "a") -> None:
    """ValueError unless a[., K] and b[N, K] are matrices of one supported dtype on ``device`` (None: on a's)."""
    try:
        fits = a.dtype in FLOATS and a.dtype == b.dtype and a.device == b.device and a.device == (device or a.device)
        fits = fits and a.dim() == 2 == b.dim() and 0 not in a.shape and 0 not in b.shape and a.shape[1] == b.shape[1]
    except (AttributeError, TypeError):
        fits = False
    if not fits:
        _refuse_operands(op, a, b, device, name)


def _refuse_operands(op: str, a: torch.Tensor, b: torch.Tensor, device: torch.device | None, name: str) -> None:
    for label, x in ((name, a), ("b", b)):
        check_is_tensor(op, label, x)
        if x.dim() != 2 or 0 in x.shape:
            raise ValueError(
                f"{op}: {label} has shape {tuple(x.shape)}; pass a matrix with at least one row and column"
            )
        if x.device != (device := device or x.device):
            raise ValueError(f"{op}: {label} is on {x.device}, not on {device}; move it with {label}.to('{device}')")
    if a.dtype != b.dtype or a.dtype not in FLOATS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ValueError(f"{op}: {name}.dtype={a.dtype} and b.dtype={b.dtype} must be the same one of {allowed}")
    raise ValueError(
        f"{op}: {name} has K={a.shape[1]} columns and b has {b.shape[1]}; b is [N, K], a row for each output column"
    )


def check_design(op: str, config: GemmConfig, *designs: str) -> None:
    if config.design not in designs:
        raise ValueError(f"{op}: design={config.design!r} is not one of {', '.join(map(repr, designs))}")


def for_one_rank(config: GemmConfig | None) -> GemmConfig | None:
    """A fused op's config as ``matmul`` takes it: on one rank the pipelined design is cuBLAS's GEMM."""
    return replace(config, design="library") if config is not None and config.design == "segments" else config


def agree(op: str, team: Team, given: dict[str, Any]) -> None:
    """``given``, values by their names, is the same on all ranks, or a ValueError on all of them: with other tiles, or by
    another design, they would wait for each other for ever.

    The ranks meet once for each set of values; one that comes with new ones alone is told by the meeting.
    """
    seen = team.workspace("gemm agreed", set)
    key = op, *given.values()
    if key in seen:
        return
    everyone = team.exchange({"op": op, **given})
    different = [
        f"{name} is {', '.join(f'{value} on rank {rank}' for rank, value in enumerate(values))}"
        for name in ("op", *given)
        if len(set(values := [of_rank.get(name) for of_rank in everyone])) > 1
    ]
    if different:
        raise ValueError(f"{op}: {'; '.join(different)}; pass the same on all ranks")
    seen.add(key)


def operands(a: torch.Tensor, b: torch.Tensor, config: GemmConfig) -> tuple[tuple, bool]:
    """(a, a_stride, b, b_stride) as a kernel is given them, and whether they are descriptors."""
    descriptors = can_describe(a, b)
    one = operand(a, config.block_m, config.block_k, descriptors), row_stride(a)
    return (*one, operand(b, config.block_n, config.block_k, descriptors), row_stride(b)), descriptors


def programs(team: Team, tiles: Tiles, config: GemmConfig) -> int:
    """Programs of a fused kernel: all are resident, one an SM, as each takes most of its shared memory."""
    most = min(team.caps.sms, team.max_programs(config.num_warps))
    return min(most, tiles.count * (MAX_PARTS.value if config.split else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Where split tiles are put together, and the finished tile that each program is sending away."""

    scratch: torch.Tensor
    tickets: torch.Tensor
    outbox: torch.Tensor


def parts_for(team: Team, config: GemmConfig, dtype: torch.dtype) -> Parts:
    """The team's ``Parts`` for tiles of this size, all zero between kernels of its stream."""
    tile = config.block_m * config.block_n

    def make() -> Parts:
        sms = team.caps.sms
        return Parts(
            scratch=team.local((sms, tile), torch.float32),
            tickets=team.local((sms,), torch.int32),
            outbox=team.local((sms, tile), dtype),
        )

    return team.workspace(("gemm parts", tile, dtype), make)


def whole_for(tiles: Tiles, programs: int, config: GemmConfig, least: int = 0) -> int:
    """Number of output tiles of a kernel of ``programs`` programs that are not split along K."""
    return whole_places(tiles.count, programs, least) if config.split else tiles.count


def constants(config: GemmConfig, descriptors: bool, arch: str) -> dict[str, Any]:
    """The keyword arguments of every GEMM kernel that come from its config, on a GPU of ``arch``."""
    block_k, num_warps = config.block_k, config.num_warps
    if not descriptors:
        # Single elements are loaded through registers, which the accumulator fills: a thin slice, over more threads.
        # The tile itself stays: a peer's operands may be aligned otherwise, and both must cut the output alike.
        block_k, num_warps = 16, max(num_warps, min(config.block_m * config.block_n // 2048, 8))
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": block_k,
        "DESCRIPTORS": descriptors,
        # Rows of a split tile that are put together at a time: few registers, so that all their loads are in flight.
        "ROWS": min(config.block_m, max(1, 4096 // config.block_n)),
        "PIECE": min(config.piece, config.block_m * config.block_n),
        "num_warps": num_warps,
        "num_stages": config.num_stages,
        # One program an SM: ptxas need not spill for room for more, as it does with small tiles where not told.
        **({"maxnreg": 255} if arch.startswith("sm_") else {}),
    }
