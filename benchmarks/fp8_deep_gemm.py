"""Grouped GEMMs of DeepGEMM (``sgl-deep-gemm`` or ``deep_gemm``) on the operands of `benchmarks.fp8_grouped`.

Rows lie as its kernels want them before the clock starts: expert by expert, and either each expert's rows on a multiple of its
alignment ("contiguous") or in a block of equal size for each expert ("masked"). Its times hold the GEMM alone: neither
gathering, nor SiLU and product, nor the quantization of the result is in them, which weft's kernels do too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

try:
    import deep_gemm
except ImportError:
    deep_gemm = None

from weft.kernels.fp8 import Fp8
from weft.ops.moe.routing import Schedule
from weft.runtime.arithmetic import cdiv

# Largest distance from the dequantized product, relative to an element's size plus the deviation of all.
MOST_ERROR = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Rows of a routing, as a grouped GEMM of DeepGEMM takes them, with the experts' weights.

    place   rows of ``rows`` that hold a pair, expert by expert
    counts  pairs of each expert
    groups  contiguous: each row's expert, -1 for padding; masked: pairs of each expert
    """

    rows: torch.Tensor
    scales: torch.Tensor
    out: torch.Tensor
    place: torch.Tensor
    counts: list[int]
    groups: torch.Tensor
    weight: Fp8
    masked: bool

    def run(self) -> torch.Tensor:
        pairs = (self.rows, self.scales), (self.weight.data, self.weight.scales)
        if self.masked:
            expected = max(1, round(sum(self.counts) / max(1, sum(map(bool, self.counts)))))
            deep_gemm.fp8_m_grouped_gemm_nt_masked(*pairs, self.out, self.groups, expected)
        else:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*pairs, self.out, self.groups)
        return self.out

    def error(self) -> float:
        """Largest distance of the result from the product of dequantized operands."""
        out = self.run().flatten(0, -2)[self.place].float()
        given, begin, worst, expected = self.rows.flatten(0, -2)[self.place].float(), 0, 0.0, []
        scales = self.scales.flatten(0, -2)[self.place].repeat_interleave(128, 1)
        for expert, count in enumerate(self.counts):
            if count:
                rows = (given * scales)[begin : begin + count]
                expected.append(rows @ self.weight.data[expert].float().mul(wide(self.weight.scales[expert])).t())
            begin += count
        product = torch.cat(expected)
        worst = ((out - product).abs() / (product.abs() + product.std())).max().item()
        return round(worst, 4)


def wide(scales: torch.Tensor) -> torch.Tensor:
    """Scales of blocks of 128 x 128, one for each element."""
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


def by_column(scales: torch.Tensor) -> torch.Tensor:
    """A copy whose rows of one column lie next to each other."""
    return scales.transpose(-1, -2).contiguous().transpose(-1, -2)


def groups_of(rows: Fp8, weight: Fp8, schedule: Schedule, tokens: bool, masked: bool) -> Groups:
    """tokens: ``rows`` has one of each token; otherwise one of each pair."""
    counts = schedule.counts.tolist()
    pairs = torch.cat([schedule.pairs[expert, :count] for expert, count in enumerate(counts)]).long()
    source = pairs // schedule.choices if tokens else pairs
    held, N, K = weight.data.shape
    device = rows.data.device
    step = deep_gemm.get_mk_alignment_for_contiguous_layout()
    if masked:
        # Whole tiles: a tile is stored with the rows that it has beyond its expert's.
        most = cdiv(max(counts), step) * step
        starts, total, shape = [expert * most for expert in range(held)], held * most, (held, most)
        groups = schedule.counts.int()
    else:
        padded = [cdiv(count, step) * step for count in counts]
        starts = [sum(padded[:expert]) for expert in range(held)]
        total, shape = sum(padded), (sum(padded),)
        groups = torch.full((total,), -1, dtype=torch.int32, device=device)
    place = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]).to(
        device
    )
    if not masked:
        of_pair = torch.repeat_interleave(torch.arange(held, device=device), torch.tensor(counts, device=device))
        groups[place] = of_pair.int()
    laid = torch.zeros((total, K), dtype=torch.uint8, device=device)
    laid[place] = rows.data.view(torch.uint8)[source]
    scales = torch.zeros((total, K // 128), device=device)
    scales[place] = rows.scales[source].float()
    return Groups(
        rows=laid.view(rows.data.dtype).view(*shape, K), scales=by_column(scales.view(*shape, -1)),
        out=torch.empty((*shape, N), dtype=torch.bfloat16, device=device), place=place, counts=counts, groups=groups,
        weight=weight, masked=masked,
    )  # fmt: skip


def deep_gemm_rows(
    rows: Fp8, h: Fp8, weights: tuple[Fp8, Fp8], schedules: list[Schedule],
    timed: Callable[[Callable[[Any], Any], list[Any]], dict[str, Any]],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of the table: both GEMMs in both layouts, and one after the other; nothing where the package is not installed.

    timed: (call, its arguments in turn) -> the row's time or its error
    """
    if deep_gemm is None:
        return
    for masked in (False, True):
        name = f"deep_gemm {'masked' if masked else 'contiguous'}"
        try:
            sides = [
                [groups_of(given, weight, schedule, first, masked) for schedule in schedules]
                for given, weight, first in ((rows, weights[0], True), (h, weights[1], False))
            ]
            for gemm, side in zip(("gate_up", "down"), sides, strict=True):
                error = side[0].error()
                row = {"gemm": gemm, "provider": name, "error": error, "rows": int(side[0].place.numel())}
                yield {**row, **(timed(Groups.run, side) if error < MOST_ERROR else {"failed": f"error {error}"})}
            both = timed(lambda pair: (pair[0].run(), pair[1].run()), list(zip(*sides, strict=True)))
            yield {"gemm": "layer", "provider": f"{name}, GEMMs alone", **both}
        except Exception as failure:
            yield {"gemm": "layer", "provider": name, "failed": f"{type(failure).__name__}: {str(failure)[:300]}"}
