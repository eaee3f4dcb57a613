"""Plan of gathered_prefill_attention: its designs, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from weft.costs.gpu import gpu_of
from weft.ops.attention.attention_op import MAX_GROUP
from weft.ops.attention.paged_prefill_attention import KeyBlocks, PrefillCall, key_blocks_for
from weft.ops.attention.qk_norm_rope import HEAD_DIMS
from weft.ops.attention.sequence_ranges import default_block_m
from weft.ops.case import Case
from weft.ops.knobs import counts, design_type, halved, knob, moved, stepped
from weft.ops.op import Op
from weft.ops.registration import FLOATS
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.arithmetic import cdiv
from weft.transport.copy_channel import MAX_CHUNKS

# Largest head that cuDNN's attention takes.
LIBRARY_DIM = 128
# Ranks up to which the gathered design is faster at any number of tokens; on more, tokens of a rank up to which ulysses may be.
# A further peer's copies cost 7 us of latency: 1,000 tokens of 32 heads take 35 us on two H200s and 48 on four, ulysses 55 and
# 57. More than four ranks were not measured.
FEW_RANKS, FEW_TOKENS = 4, 256
# Bytes of a chunk at least: shorter copies do not fill a link (H200, W=2: 1 MiB 200 GB/s, 4 MiB 308).
CHUNK_BYTES = 2 << 20


class GatheredArguments(NamedTuple):
    """Arguments of gathered_prefill_attention.

    tables, block_m  of ``ZigzagRanges``; rows: ``ZigzagShards.rows``
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: list[torch.Tensor]
    rows: list[int]
    block_m: int
    scale: float
    return_lse: bool
    team: str
    algorithm: str


def stages_around(blocks: KeyBlocks) -> Iterator[KeyBlocks]:
    """Neighbours of blocks by their stages alone, since calls are few and long."""
    return moved(blocks, num_stages=stepped()(blocks.num_stages))


@design_type
class Gathered:
    """Keys and values of all ranks, by copy engines; this rank's queries.

    chunks  flags of a rank's tokens, at most MAX_CHUNKS
    blocks  of the attention
    """

    chunks: int = knob(MAX_CHUNKS, counts(MAX_CHUNKS, ", the signals that a shard has"), halved())
    blocks: KeyBlocks = knob(KeyBlocks, near=stages_around)


@design_type
class Ulysses:
    """This rank's heads of all tokens, exchanged before and after. blocks: of the attention."""

    blocks: KeyBlocks = knob(KeyBlocks, near=stages_around)


@design_type
class Pipelined:
    """cuDNN's attention to the keys of one rank after the other, while copy engines bring the next ones."""


class GatheredCall(NamedTuple):
    """Sizes that the plan depends on. tokens: of all sequences; heads: of all ranks."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    design: str = AUTO
    sequences: int = 1

    def without_library(self, arch: str) -> str | None:
        """Reason why the pipelined design does not take this call on ``arch``, or None."""
        if arch.startswith("gfx"):
            return f"there is no cuDNN for {arch}"
        if self.sequences != 1:
            return f"there are {self.sequences} sequences, and cuDNN is called for one"
        if self.dtype == torch.float32:
            return "cuDNN's attention is for fp16 and bf16"
        if self.head_dim > LIBRARY_DIM:
            return f"cuDNN's attention takes heads of up to {LIBRARY_DIM} elements, not {self.head_dim}"
        return None


def check_sharing(op: str, q_heads: int, kv_heads: int, head_dim: int) -> None:
    """ValueError unless KV heads share the query heads evenly and heads have a supported size."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{op}: head_dim={head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    if kv_heads < 1 or q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MAX_GROUP:
        raise ValueError(
            f"{op}: q has {q_heads} heads and k {kv_heads}; each KV head must have the same number of query heads, 1 to "
            f"{MAX_GROUP}"
        )


class GatheredPlan(Op):
    """Choice of a design by the tokens of a rank and the KV heads."""

    name, alias = "gathered_prefill_attention", "gathered-prefill-attention"
    bits = "depend on the tokens, W, the rank that holds a token, and the design"
    designs = {"gathered": Gathered, "ulysses": Ulysses, "pipelined": Pipelined}
    sizes = ("tokens", "q_heads", "kv_heads", "head_dim")
    dtypes = FLOATS
    form = "prefill"
    rare = ("ulysses",)

    # --- choosing ----------------------------------------------------------------------------------------------------

    def call_of(self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO) -> GatheredCall:
        tokens, *heads = self.checked_sizes(sizes)
        check_sharing(self.name, *heads)
        return GatheredCall(tokens, *heads, dtype, design)

    def call_of_case(self, case: Case, machine: Machine) -> GatheredCall:
        lengths = case.field("lengths")
        return GatheredCall(sum(lengths), *case.sizes, case.dtype, case.design, len(lengths))

    def rule(self, call: GatheredCall, machine: Machine) -> tuple[str, str]:
        """By tokens of a rank.

        cuDNN attends from as many rows of a stripe (query heads times tokens) as for prompts of one rank. Two H100s, 32 query
        and 4 KV heads of 128: NCCL and cuDNN take 7.4 ms for 32,768 tokens, the gathered design 9.8
        (docs/prefill-over-ranks.md).
        1,000 tokens of 32 heads: gathered 35 us on two H200s and 48 on four, ulysses 55 and 57; 3,000 tokens on four 97 and 122
        (lab/h200-regret/regret-all-w2.json, regret-all-w4.json).
        """
        tokens = cdiv(call.tokens, machine.world_size)
        rows, least = call.q_heads * (tokens // 2), gpu_of(machine.caps).limits.cudnn_rows
        many = machine.world_size > 1 and rows >= least
        if many and not call.without_library(machine.caps.arch):
            return "pipelined", f"{rows:,} rows of a stripe >= {least:,}: cuDNN's attention is faster"
        if call.kv_heads % machine.world_size:
            return "gathered", f"{call.kv_heads} KV heads do not divide into {machine.world_size} shares"
        if tokens <= FEW_TOKENS and machine.world_size > FEW_RANKS:
            few = f"{tokens} tokens of a rank <= {FEW_TOKENS}, {machine.world_size} ranks"
            return "ulysses", f"{few}: two exchanges take less than a gather's copies"
        return "gathered", f"{tokens} tokens of a rank, {machine.world_size} ranks: attention hides the copies"

    def default(self, name: str, call: GatheredCall, machine: Machine) -> Gathered | Ulysses | Pipelined:
        if name == "pipelined":
            return Pipelined()
        world, group = machine.world_size, call.q_heads // call.kv_heads
        heads, tokens = call.kv_heads, cdiv(call.tokens, world)
        if name == "ulysses":
            heads, tokens = max(1, call.kv_heads // world), call.tokens
        programs = cdiv(tokens * group, default_block_m(call.dtype)) * heads
        blocks = key_blocks_for(PrefillCall(programs, heads, tokens, call.head_dim, call.dtype), machine.caps)
        if name == "ulysses":
            return Ulysses(blocks=blocks)
        shard = tokens * call.kv_heads * call.head_dim * call.dtype.itemsize
        return Gathered(chunks=max(1, min(MAX_CHUNKS, shard // CHUNK_BYTES)), blocks=blocks)

    def table_key(self, call: GatheredCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        return self.name, (call.tokens, call.q_heads, call.kv_heads, call.head_dim), machine.world_size

    def tuned(self, call: GatheredCall, machine: Machine) -> Planned | None:
        planned = super().tuned(call, machine)
        # The heads decide which designs there are, their size how many fit into shared memory.
        return planned if planned is None or planned.row.shape[1:] == call[1:4] else None

    def choose(self, call: GatheredCall, machine: Machine) -> Planned:
        """``Op.choose``. ValueError for a design that does not take the call."""
        if call.design == "ulysses" and call.kv_heads % machine.world_size:
            raise ValueError(
                f"{self.name}: k has {call.kv_heads} heads, which world_size={machine.world_size} does not divide, and "
                f"algorithm='ulysses' gives each rank whole ones; take 'gathered'"
            )
        if call.design == "pipelined" and (reason := call.without_library(machine.caps.arch)) is not None:
            raise ValueError(
                f"{self.name}: algorithm='pipelined' does not take this call: {reason}; take 'gathered' or 'auto'"
            )
        return super().choose(call, machine)

    def space(
        self, call: GatheredCall, machine: Machine, quick: bool = False
    ) -> Iterator[Gathered | Ulysses | Pipelined]:
        if not call.without_library(machine.caps.arch):
            yield Pipelined()
        for name in ("gathered", "ulysses"):
            if name == "ulysses" and call.kv_heads % machine.world_size:
                continue
            base = self.default(name, call, machine)
            for block_n in (base.blocks.block_n,) if quick else (32, 64, 128):
                for num_warps, num_stages in ((4, 3),) if quick else ((4, 2), (4, 3), (8, 2), (8, 3)):
                    blocks = KeyBlocks(block_n=block_n, num_warps=num_warps, num_stages=num_stages)
                    if name == "ulysses":
                        yield Ulysses(blocks=blocks)
                    else:
                        yield from (Gathered(chunks=chunks, blocks=blocks) for chunks in (1, base.chunks))
