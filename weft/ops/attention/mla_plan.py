"""Plan of mla_decode_attention: its designs, and the rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.ops.attention.decoding import MAX_SPLITS, splits_of
from weft.ops.case import Case
from weft.ops.knobs import check_knobs, counts, design_type, halved, knob, powers, stepped
from weft.ops.op import Op
from weft.ops.registration import FLOATS
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities


@design_type
class LatentBlocks:
    """Attention over latents in blocks of rows and splits of the context.

    block_m  rows of a program, each a query head of a new token
    block_n  tokens of a step
    least    tokens of a split at least, a multiple of block_n
    splits   of a sequence at most
    """

    block_m: int = knob(64, powers(16), halved(16, 64))
    block_n: int = knob(64, powers(16), halved(16, 128))
    least: int = knob(256, near=halved())
    splits: int = knob(1, counts(), halved(high=MAX_SPLITS))
    num_warps: int = knob(8, powers(), halved(high=8))
    num_stages: int = knob(2, near=stepped())

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.least < 1 or self.least % self.block_n:
            raise ValueError(f"least={self.least} is not a multiple of block_n={self.block_n}")


@design_type
class EarlyBlocks(LatentBlocks):
    """``LatentBlocks`` with copies before products, and scores that groups of warps share."""


class MLACall(NamedTuple):
    """Sizes that the plan of mla_decode_attention depends on.

    rows    of a sequence: query heads times new tokens
    tokens  that a row of the page table has room for
    width   elements of a token's row in the cache
    """

    sequences: int
    rows: int
    tokens: int
    width: int
    dtype: torch.dtype
    design: str = AUTO


def blocks_for(call: MLACall, caps: Capabilities) -> LatentBlocks:
    """The design of a call: 64 rows a program where a sequence has more than 16.

    Then tokens are loaded less often. sm_90 multiplies 64 rows at once, in one program an SM. Programs of 16 rows wait for
    memory: an SM holds two with steps of 32 tokens, and where there are few, one with steps of 64, which an H200 runs faster
    for 1 and for 32 sequences. 128 rows would need 512 threads with more registers than each can have. Steps are as long as
    shared memory and registers allow without a stack.
    """
    block_m = 16 if call.rows <= 16 or call.dtype == torch.float32 else 64
    pairs = max(1, call.sequences * cdiv(call.rows, block_m))
    per_sm = 2 if block_m == 16 else 1
    gfx = caps.arch.startswith("gfx")
    if gfx or call.dtype == torch.float32:
        block_n, num_stages = 16, 2
    elif block_m == 16 and caps.arch == "sm_90" and 2 * pairs <= caps.sms:
        block_n, num_stages, per_sm = 64, 3, 1
    elif block_m == 16:
        block_n, num_stages = 32, 3
    else:
        block_n, num_stages = {"sm_90": (64, 2), "sm_100": (32, 2)}.get(caps.arch, (16, 3))
    least = 128 if 4 * pairs <= caps.sms else 512
    return LatentBlocks(
        block_m=block_m,
        block_n=block_n,
        least=least,
        splits=splits_of(pairs, call.tokens, per_sm * caps.sms, least),
        num_warps=4 if block_m == 16 else 8,
        num_stages=num_stages,
    )


def early_blocks_for(call: MLACall, caps: Capabilities) -> EarlyBlocks:
    """``blocks_for`` with early copies, and with 8 warps: with 4 a step of 16 rows has a stack."""
    return EarlyBlocks(**asdict(blocks_for(call, caps)) | {"num_warps": 8})


class MLAPlan(Op):
    """Blocks of rows by the number of rows, and splits for as many programs as SMs hold.

    On sm_90 blocks of 64 rows are early ones. One H200, 4,096 tokens, in brackets ``blocks``: 128 heads, 1, 32 and 128
    sequences 26.9 (28.5), 111 (152) and 397 (532) us, 64 heads 26.5 (28.3), 66.5 (88.1) and 204 (288); 16 heads, 128 sequences
    200 (156) (benchmarks/lab/h200-mla-early.json).
    """

    name, alias = "mla_decode_attention", "mla-decode-attention"
    bits = "depend on the batch, the new tokens of a sequence, a rank's heads, the page table's room and the design"
    designs = {"blocks": LatentBlocks, "early": EarlyBlocks}
    calls = MLACall
    sizes = ("batch", "heads", "context", "width")
    dtypes = FLOATS
    collective = False

    def call_of_case(self, case: Case, machine: Machine) -> MLACall:
        (heads, _, width, page), lengths, queries = case.sizes, case.field("lengths"), case.field("queries") or 1
        room = (max(1, cdiv(max(lengths), page)) + (case.field("spare") or 0)) * page
        return MLACall(len(lengths) // queries, heads * queries, room, width, case.dtype, case.design)

    def table_key(self, call: MLACall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        return self.name, (call.sequences, call.rows, call.tokens, call.width), 1

    def tuned(self, call: MLACall, machine: Machine) -> Planned | None:
        planned = super().tuned(call, machine)
        # The tile of a row for another number of rows need not fit.
        fits = planned is not None and planned.row.shape[1::2] == (call.rows, call.width)
        return planned if fits else None

    def rule(self, call: MLACall, machine: Machine) -> tuple[str, str]:
        design = blocks_for(call, machine.caps)
        early = machine.caps.arch == "sm_90" and design.block_m == 64
        return "early" if early else "blocks", (
            f"{call.rows} rows of each of {call.sequences} sequences, in blocks of {design.block_m} on {machine.caps.sms} SMs; "
            f"splits of at least {design.least} tokens"
        )

    def default(self, name: str, call: MLACall, machine: Machine) -> LatentBlocks:
        return blocks_for(call, machine.caps) if name == "blocks" else early_blocks_for(call, machine.caps)

    def space(self, call: MLACall, machine: Machine, quick: bool = False) -> Iterator[LatentBlocks]:
        rule = blocks_for(call, machine.caps)
        for block_m, num_warps in ((rule.block_m, rule.num_warps),) if quick else ((16, 4), (64, 8)):
            pairs = max(1, call.sequences * cdiv(call.rows, block_m))
            for block_n in (rule.block_n,) if quick else (16, 32, 64):
                least = max(rule.least, block_n)
                for per_sm in (1, 2):
                    splits = splits_of(pairs, call.tokens, per_sm * machine.caps.sms, least)
                    tile = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps}
                    yield replace(rule, least=least, splits=splits, **tile)
        if not quick:
            yield early_blocks_for(call, machine.caps)
