"""Plan of sharded_decode_attention: its designs, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.ops.attention.attention_op import PAGE, AttentionOp
from weft.ops.attention.decoding import DecodingCall, SplitKV, split_kv_for, splits_of
from weft.ops.attention.qk_norm_rope import check_head_dim
from weft.ops.case import Case
from weft.ops.collectives.over_nodes import OverNodes
from weft.ops.knobs import around, design_type, halved, knob, moved
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import SHARED_BYTES

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities
    from weft.runtime.team.team import Team

# Pairs of a sequence and a KV head up to which more than two ranks merge in a second kernel. Four H200s, one sequence of 32
# query heads: 4 pairs 17.6 us in a row, 23.0 in one kernel; 8 and 12 pairs of 16 to 32 partials within 1 us
# (results/h200-x4-long, lab/h200-regret).
FEW_PAIRS = 4


def splits_around(split: SplitKV) -> Iterable[SplitKV]:
    """Neighbours of a way to split keys, also with more than MAX_SPLITS: contexts are long here."""
    return dict.fromkeys((*around(split), *moved(split, splits=halved(high=128)(split.splits))))


@design_type
class OneKernel:
    """Attention, push and merge in one kernel, all of whose programs are resident."""

    split: SplitKV = knob(SplitKV, near=splits_around)


@design_type
class TwoKernels:
    """Attention and push in one kernel, merge in another: any number of programs."""

    split: SplitKV = knob(SplitKV, near=splits_around)


class ShardedShape(NamedTuple):
    """Shape of form "sharded": sequences of ``context`` tokens over the caches of ``ranks`` ranks."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int
    ranks: int


class ShardedCall(NamedTuple):
    """Sizes that the plan depends on, equal on all ranks.

    pairs   of a sequence and a KV head
    tokens  of a sequence that a row of a rank's page table has room for, or that lie in the window
    dtype   of the cache
    """

    pairs: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    design: str = AUTO


def resident_programs(split: SplitKV, head_dim: int, itemsize: int, caps: Capabilities) -> int:
    """Programs of the fused kernel that the GPU holds at a time, at 255 registers a thread."""
    if not caps.arch.startswith("sm_"):
        return caps.sms
    # GPUs with less shared memory hold one program an SM.
    stages = 2 * split.num_stages * split.block_n * head_dim * itemsize
    return caps.sms * max(1, min(8 // split.num_warps, SHARED_BYTES // (stages + 4096)))


def attended_tokens(pages: int, page: int, window: int | None, world_size: int) -> int:
    """Most tokens of a sequence that a rank attends to, in ``pages`` columns of its page table."""
    return page * (pages if window is None else min(pages, cdiv(window, page * world_size) + 1))


def room_of(case: Case) -> int:
    """Columns of each rank's page table: pages of the longest sequence, and the case's ``spare``."""
    pages = cdiv(cdiv(max(case.field("lengths")), case.sizes[3]), case.world_size)
    return max(1, pages) + (case.field("spare") or 0)


class ShardedPlan(AttentionOp):
    """Choice of a design by the programs that are resident at once.

    sizes of a call: sequences, tokens that a row of a rank's page table has room for, KV heads, D
    """

    name, alias = "sharded_decode_attention", "sharded-decode-attention"
    bits = "depend on the batch, the new tokens of a sequence, the KV heads, the page table's room, W and the design"
    designs = {"one_kernel": OneKernel, "two_kernels": TwoKernels, "over_nodes": OverNodes}
    internal = ("over_nodes",)
    spans_nodes = True
    sizes = ("batch", "context", "kv_heads", "head_dim")
    form = "sharded"
    collective = True

    # --- shapes ------------------------------------------------------------------------------------------------------

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        whole = ShardedShape(*shape)
        sizes = whole.q_heads, whole.kv_heads, whole.head_dim, PAGE
        return self.case(world_size, dtype, sizes, **{"lengths": (whole.context,) * whole.batch, **fields})

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of the keys and values of a rank."""
        shape = ShardedShape(*sizes)
        tokens = cdiv(shape.batch * shape.context, shape.ranks)
        return 2 * tokens * shape.kv_heads * shape.head_dim * dtype.itemsize

    def traffic_of(self, case: Case) -> int:
        """Bytes of a rank's parts of other ranks' heads, in fp32."""
        q_heads, _, D, _ = case.sizes
        sent = q_heads - q_heads // case.world_size
        return 4 * len(case.field("lengths")) * sent * (D + 1)

    # --- choosing ----------------------------------------------------------------------------------------------------

    def call_of(self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO) -> ShardedCall:
        batch, context, kv_heads, head_dim = self.checked_sizes(sizes)
        check_head_dim(head_dim)
        return ShardedCall(batch * kv_heads, context, head_dim, dtype, design)

    def call_of_case(self, case: Case, machine: Machine) -> ShardedCall:
        _, heads, head_dim, page = case.sizes
        tokens = attended_tokens(room_of(case), page, case.field("window"), case.world_size)
        return ShardedCall(len(case.field("lengths")) * heads, tokens, head_dim, case.dtype, case.design)

    def table_key(self, call: ShardedCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        return self.name, (call.pairs, call.tokens, call.head_dim), machine.world_size

    def tuned(self, call: ShardedCall, machine: Machine) -> Planned | None:
        planned = super().tuned(call, machine)
        # A row of another batch may have more programs than fit.
        fits = (
            planned is None
            or not isinstance(planned.design, OneKernel)
            or self.fits(planned.design.split, call, machine)
        )
        return planned if fits else None

    def rule(self, call: ShardedCall, machine: Machine) -> tuple[str, str]:
        split = self.split_of(call, machine)
        programs = call.pairs * split.splits
        reason = f"{call.pairs} pairs of a sequence and a KV head, {programs} programs"
        if machine.world_size > 2 and call.pairs <= FEW_PAIRS:
            return "two_kernels", f"{reason}: few join, and would receive all heads"
        if machine.world_size == 1 or self.fits(split, call, machine):
            return "one_kernel", f"{reason}, all resident"
        return "two_kernels", f"{reason}, more than are resident at a time"

    def default(self, name: str, call: ShardedCall, machine: Machine) -> OneKernel | TwoKernels:
        split = self.split_of(call, machine)
        if name == "one_kernel" and machine.world_size > 1:
            most = resident_programs(split, call.head_dim, call.dtype.itemsize, machine.caps)
            split = replace(split, splits=max(1, min(split.splits, most // max(1, call.pairs))))
        return self.designs[name](split=split)

    def choose(self, call: ShardedCall, machine: Machine) -> Planned:
        if machine.nodes == 1:
            return super().choose(call, machine)
        if call.design == "one_kernel":
            raise ValueError(
                f"{self.name}: algorithm='one_kernel' is of one node, and the team has {machine.nodes}; pass 'two_kernels'"
            )
        node = self.plan(call._replace(design="two_kernels"), machine.node)
        return Planned("over_nodes", OverNodes(node=node), f"{machine.nodes} nodes: a part of each head from each node")

    def split_of(self, call: ShardedCall, machine: Machine) -> SplitKV:
        """Local attention by ``paged_attention``'s rule; of more than two ranks one program an SM.

        Four H200s, 8 pairs, 60,000 tokens: 16 partials 31.2 us, 32 32.7 (lab/h200-regret/regret-all-w4.json).
        """
        split = split_kv_for(
            DecodingCall(call.pairs, call.tokens, call.head_dim, call.dtype, spread=True), machine.caps
        )
        if machine.world_size > 2:
            split = replace(split, splits=min(split.splits, max(1, machine.caps.sms // max(1, call.pairs))))
        return split

    def fits(self, split: SplitKV, call: ShardedCall, machine: Machine) -> bool:
        """True if all programs of a call are resident at once."""
        most = resident_programs(split, call.head_dim, call.dtype.itemsize, machine.caps)
        return call.pairs * split.splits <= most

    def is_held(self, design: OneKernel | TwoKernels | OverNodes, call: ShardedCall, team: Team) -> bool:
        """False if ``design`` needs more resident programs than the platform holds.

        Platforms may hold fewer than the GPU of the plan: virtual ranks with ``sms``, GSan.
        """
        if not isinstance(design, OneKernel) or team.size == 1:
            return True
        return call.pairs * design.split.splits <= team.holds(design.split.num_warps)

    def space(self, call: ShardedCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        rule, sms = self.split_of(call, machine), machine.caps.sms
        for kind in (OneKernel, TwoKernels):
            for block_n in (rule.block_n,) if quick else (32, 64, 128):
                for per_sm in (1, 2) if quick else (1, 2, 4):
                    least = max(rule.least, block_n)
                    # More than MAX_SPLITS too: contexts are long here.
                    many = max(1, min(per_sm * sms // max(1, call.pairs), cdiv(call.tokens, least)))
                    for splits in {splits_of(call.pairs, call.tokens, per_sm * sms, least), many}:
                        split = replace(
                            rule, block_n=block_n, least=least, splits=splits, num_warps=min(4, block_n // 16)
                        )
                        if kind is TwoKernels or self.fits(split, call, machine):
                            yield kind(split=split)
