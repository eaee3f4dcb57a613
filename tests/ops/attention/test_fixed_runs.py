"""Attention in runs of positions: one row, the same bits, in decode steps, prompts cut in any way, and beside drafts."""

import re
from dataclasses import replace

import pytest
import torch

import weft
from tests.compiling import SHARED, compiled, sums_of
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import DEVICES, everywhere, random
from tests.ops.test_compile_layer_kernels import FP32 as FLOATS
from tests.ops.test_compile_layer_kernels import INTS, caps_of
from weft import ops
from weft.kernels.fixed_runs import RunPartials, RunTile
from weft.kernels.online_softmax import ScoreRule
from weft.kernels.paged_cache import CacheSizes, PagedCache
from weft.ops.attention import fixed_runs
from weft.ops.attention.fixed_runs import Attended, FixedRuns, Rows, attend_in_runs
from weft.ops.case import BF16, FP32
from weft.plan import memo
from weft.runtime.capabilities import launch_options

# Query heads, KV heads, head dim, tokens, dtype, options of scores.
SHAPES = [
    (4, 2, 32, 70, FP32, {}),
    (8, 2, 64, 150, BF16, {}),
    (6, 2, 64, 90, BF16, {"window": 37, "sinks": True}),
    (4, 1, 64, 90, BF16, {"softcap": 3.0}),
    (20, 1, 16, 40, FP32, {}),
]
PAGE = 16


class Sequence:
    """Queries, keys and values of one sequence, its pages in the midst of a cache."""

    def __init__(self, q_heads, heads, D, length, dtype, device, seed=0):
        self.length, pages = length, -(-length // PAGE)
        self.q = random((length, q_heads, D), dtype, device, seed + 1)
        self.keys, self.values = (random((pages + 3, heads, PAGE, D), dtype, device, seed + part) for part in (2, 3))
        order = torch.randperm(pages + 3, generator=torch.Generator().manual_seed(seed))[:pages]
        self.pages = order.to(torch.int32).to(device)

    def options(self, kind, q_heads, dtype):
        sinks = torch.linspace(-2, 2, q_heads, device=self.q.device).to(dtype) if "sinks" in kind else None
        return {**kind, "sinks": sinks, "invariant": True}


def in_chunks(sequence, chunk, options):
    """Rows of all tokens, read in chunks."""
    rows, table = [], sequence.pages[None]
    for before in range(0, sequence.length, chunk):
        length = min(chunk, sequence.length - before)
        q = sequence.q[before : before + length]
        given = sequence.keys, sequence.values, table, [(before, length)]
        rows.append(ops.paged_prefill_attention(q, *given, **options))
    return torch.cat(rows)


def decoded(sequence, tokens, queries, options, beside=0):
    """Rows of ``tokens``, ``queries`` a sequence, with as many rows of padding as ``beside`` says before them."""
    lengths = torch.tensor([0] * beside * queries + [token + 1 for token in tokens], dtype=torch.int32)
    rows = torch.tensor([0] * beside * queries + list(tokens))
    table = sequence.pages.repeat(len(lengths) // queries, 1)
    q = sequence.q[rows.to(sequence.q.device)]
    given = sequence.keys, sequence.values, table, lengths.to(q.device)
    return ops.paged_attention(q, *given, queries=queries, **options)[beside * queries :]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("q_heads", "heads", "D", "length", "dtype", "kind"), SHAPES)
def test_rows_have_the_same_bits_however_they_are_computed(q_heads, heads, D, length, dtype, kind, device):
    def check(device):
        sequence = Sequence(q_heads, heads, D, length, dtype, device)
        options = sequence.options(kind, q_heads, dtype)
        whole = in_chunks(sequence, length, options)
        for chunk in (7, 32):
            assert_identical(in_chunks(sequence, chunk, options), whole, what=f"chunks of {chunk}")
        tokens = [0, 15, 16, 36, 37, 38, length - 1]
        assert_identical(decoded(sequence, tokens, 1, options), whole[tokens], what="a decode step")
        assert_identical(decoded(sequence, tokens[3:], 1, options, beside=4), whole[tokens[3:]], what="another batch")
        for first, queries in ((20, 3), (31, 9)):
            drafts = list(range(first, first + queries))
            assert_identical(decoded(sequence, drafts, queries, options, 1), whole[drafts], what=f"{queries} drafts")

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
def test_programs_that_share_out_runs_change_no_bit(device):
    def check(device):
        sequence = Sequence(8, 2, 64, 330, BF16, device)
        cache, q = PagedCache(sequence.keys, sequence.values), sequence.q[-3:]
        lengths = torch.tensor([330, 64, 65], dtype=torch.int32, device=device)
        rows, attended = Rows(lengths, lengths), Attended(cache, sequence.pages.repeat(3, 1), ScoreRule.of(0.1))
        alone, *shared = (
            attend_in_runs(FixedRuns(run=64, programs=n), q, attended, rows, queries=1) for n in (1, 2, 3, 9)
        )
        for out in shared:
            assert_identical(out, alone, what="shared out")
        # The first 128 positions in runs of 32, the rest in runs of 64.
        early = FixedRuns(block_n=32, run=64, early=128)
        alone, *shared = (
            attend_in_runs(replace(early, programs=n), q, attended, rows, queries=1) for n in (1, 2, 3, 9)
        )
        for out in shared:
            assert_identical(out, alone, what="early runs shared out")

    everywhere(check, device)


@pytest.mark.parametrize("planted", ["a step of keys that the length decides", "runs that the batch decides"])
def test_planted_orders_are_caught(planted, monkeypatch):
    """The test above sees an order of sums that depends on more than positions."""
    chosen = fixed_runs.fixed_runs_for

    def wrong(head_dim, dtype, caps, pairs, tokens):
        design = chosen(head_dim, dtype, caps, pairs, tokens)
        if planted.startswith("a step"):
            return FixedRuns(block_n=16, run=512) if tokens == 1 else design
        return FixedRuns(block_n=16, run=32 if pairs > 4 else 64)

    for module in ("decoding", "paged_prefill_attention"):
        monkeypatch.setattr(f"weft.ops.attention.{module}.fixed_runs_for", wrong)
    memo.forget()
    with pytest.raises(AssertionError):
        test_rows_have_the_same_bits_however_they_are_computed(*SHAPES[1], "cpu")
    memo.forget()


def test_a_table_without_pages_gives_zeros():
    def main(team):
        q, cache = torch.ones(2, 4, 16), torch.ones(3, 2, PAGE, 16)
        lengths, table = torch.ones(2, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32)
        attended, rows = Attended(PagedCache(cache, cache), table, ScoreRule.of(1.0)), Rows(lengths, lengths)
        return attend_in_runs(FixedRuns(programs=2), q, attended, rows, queries=1).abs().max().item()

    torch.use_deterministic_algorithms(True)  # new tensors are NaN
    try:
        assert weft.simulate(main, 1) == [0.0]
    finally:
        torch.use_deterministic_algorithms(False)


def test_lengths_apart_in_a_window_are_refused():
    def main(team):
        q, cache = torch.ones(4, 2, 16), torch.ones(40, 1, PAGE, 16)
        given = torch.arange(40, dtype=torch.int32)[None].repeat(2, 1), torch.tensor([9, 0, 20, 22], dtype=torch.int32)
        ops.paged_attention(q, cache, cache, *given, queries=2, invariant=True)
        ops.paged_attention(q, cache, cache, *given, queries=2, window=5)
        with pytest.raises(
            ValueError, match=r"lengths=\[20, 22\] of one sequence do not lie within a range of queries=2"
        ):
            ops.paged_attention(q, cache, cache, *given, queries=2, invariant=True, window=5)

    weft.simulate(main, 1)


def test_tiles_of_another_size_are_refused():
    sequence = Sequence(4, 2, 64, 20, BF16, "cpu")
    spans = ops.SequenceRanges.make([(0, 20)], 2, BF16, block_m=128)
    with pytest.raises(ValueError, match="spans have tiles of block_m=128 rows; with invariant=True pass 64"):
        ops.paged_prefill_attention(
            sequence.q, sequence.keys, sequence.values, sequence.pages[None], spans, invariant=True
        )


def built(arch, dtype=BF16, D=128, group=4, queries=1, split=True, window=None):
    x, caps = torch.zeros(16, dtype=dtype), caps_of(arch)
    design, options = fixed_runs.fixed_runs_for(D, dtype, caps, 4, 4096), launch_options(caps)
    per = 0 if queries == 0 else fixed_runs.tokens_in_tile(group, queries, dtype)
    block_m = fixed_runs.block_m_of(dtype, group)
    tile = RunTile(group, block_m, design.block_n, design.run, per, split, window, design.early)
    options |= {"num_warps": design.num_warps, "num_stages": design.num_stages}
    partials = RunPartials(FLOATS, FLOATS, INTS) if split else RunPartials(x, x, x)
    rest = INTS, x, Rows(INTS, INTS), 40, 9, partials, ScoreRule(0.1)
    constants = {"SIZES": CacheSizes(2, 64, D), "TILE": tile, "QUERIES": queries, **options}
    return compiled(fixed_runs.fixed_runs_kernel, x, PagedCache(x, x), *rest, arch=arch, **constants)


@pytest.mark.triton_internals
@pytest.mark.parametrize(("queries", "split"), [(1, True), (1, False), (5, True), (0, False)])
def test_all_calls_multiply_by_one_shape_of_instruction_on_sm_90(queries, split):
    kernel = built("sm_90", queries=queries, split=split)
    assert {*re.findall(r"wgmma\.mma_async\.\S*(m\d+n\d+k\d+)", kernel.asm["ptx"])} == {"m64n64k16", "m64n128k16"}
    assert sums_of(kernel) == sums_of(built("sm_90")), "the weights of a step are summed in another order"
    assert kernel.metadata.shared <= SHARED["sm_90"]


@pytest.mark.triton_internals
@pytest.mark.parametrize(("arch", "dtype", "D"), [("sm_80", BF16, 128), ("gfx942", BF16, 128), ("gfx942", FP32, 64)])
def test_compiles_and_fits(arch, dtype, D):
    for queries, split, window in ((1, True, None), (0, False, 100)):
        kernel = built(arch, dtype, D, queries=queries, split=split, window=window)
        assert kernel.metadata.shared <= SHARED[arch], (queries, kernel.metadata.shared)
