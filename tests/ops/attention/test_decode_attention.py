"""decode_attention against the two ops that it fuses, graphs, and the order of its writes; its cases run with all others."""

import importlib

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_close, assert_identical, inputs_of
from tests.ops.checking import check as check_result
from tests.ops.layer_cases import (
    DEVICES,
    EPS,
    HEADS,
    SMALL,
    Heads,
    deferred,
    everywhere,
    mutated,
    random,
)
from tests.sampled import sampled
from weft import ops
from weft.kernels.paged_cache import Sequences
from weft.kernels.rotary import HeadNorms
from weft.ops.attention.decode_attention import DecodeArguments
from weft.ops.attention.decoding import SplitKV
from weft.ops.attention.qk_norm_rope import parts_of
from weft.ops.case import BF16, FP32

decoding = importlib.import_module("weft.ops.attention.decode_attention")

QWEN = Heads(q_heads=16, kv_heads=2)
SPLIT = SplitKV(block_n=16, least=16, splits=8, num_warps=1)


class Case:
    """Arguments of decode_attention for sequences of these lengths; cells of new tokens hold NaN."""

    def __init__(self, heads, lengths, device, *, parts=0, squares=0, window=None, seed=0):
        B, S, D = len(lengths), heads.page_size, heads.D
        self.window = window
        self.heads, self.lengths, width = heads, lengths, (heads.q_heads + 2 * heads.kv_heads) * D
        needed = [-(-length // S) for length in lengths]
        total = sum(needed) + 2
        self.cache = heads.cache(total, device, seed + 1)
        self.pages = torch.full((B, max(*needed, 1) + 1), 1 << 24, dtype=torch.int32)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
        old = torch.zeros((total, S), dtype=torch.bool)
        for b, length in enumerate(lengths):
            for index in range(needed[b]):
                page = self.pages[b, index] = order.pop()
                old[page, : length - 1 - index * S] = True
        for cache in self.cache:
            cache[~old[:, None, :, None].expand(cache.shape).to(device)] = torch.nan
        self.weights = [1 + random((D,), heads.dtype, device, seed + i) / 4 for i in (2, 3)]
        self.angles = random((max(*lengths, 1) + 1, D), FP32, device, seed + 4)
        dtype = FP32 if parts else heads.dtype
        self.qkv = random((parts, B, width) if parts else (B, width), dtype, device, seed + 5)
        self.given = self.qkv
        if squares:
            self.given, _ = deferred(self.qkv, squares)
        self.places = self.pages.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
        self.tickets = torch.zeros(B * heads.kv_heads + 1, dtype=torch.int32, device=device)

    def run(self, design=None, module=decoding, gate=None):
        """(result, the cache after it)"""
        cache = [x.clone() for x in self.cache]
        norms, sequences = HeadNorms(*self.weights, EPS), Sequences(*self.places)
        scale = self.heads.D**-0.5
        op = module.DECODE_ATTENTION
        design = design or op.plan_of(cache[0], sequences.pages, self.window)
        options = sequences, scale, self.tickets, None, self.window
        arguments = DecodeArguments(*parts_of(self.given), norms, self.angles, *cache, *options, gate=gate)
        out = op.run(design, None, arguments)
        assert not self.tickets.any(), "arrival counters are left as they were"
        return out, cache


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("design", [None, SPLIT], ids=["planned", "split"])
def test_another_call_gives_the_same_bits(design, device):
    def check(device):
        case = Case(QWEN, (300, 0, 1), device)
        out, cache = case.run(design)
        for _ in range(2):
            again, cache_again = case.run(design)
            assert_identical(again, out)
            for x, y in zip(cache, cache_again, strict=True):
                assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_equals_the_two_ops_that_it_fuses(heads, device):
    def check(device):
        case = Case(heads, (5, 0, 70, 33), device)
        out, cache = case.run()
        other = [x.clone() for x in case.cache]
        pages, lengths = case.places
        at = (lengths.long() - 1).clamp(min=0)
        page = pages.gather(1, (at // heads.page_size)[:, None])[:, 0].long()
        slots = torch.where(lengths > 0, page * heads.page_size + at % heads.page_size, -1)
        q = ops.qk_norm_rope(case.qkv, *case.weights, EPS, case.angles, at, slots, *other)
        assert_close(out, ops.paged_attention(q, *other, pages, lengths).double(), 70 + heads.D, partials=1)
        for x, y in zip(cache, other, strict=True):
            assert_close(x, y.double(), heads.D)

    everywhere(check, device)


@pytest.mark.gpu(1)
def test_a_replayed_graph_follows_lengths_and_pages():
    case = Case(QWEN, (300, 300), "cuda")
    for cache in case.cache:
        cache.nan_to_num_(1.0)
    pages, lengths = case.places
    pages.copy_(torch.arange(pages.numel()).view(pages.shape))

    def run():
        return ops.decode_attention(case.qkv, *case.weights, EPS, case.angles, *case.cache, pages, lengths)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed, new in enumerate(((1, 190), (0, 64), (65, 1), (129, 300))):
        pages.copy_(torch.randperm(pages.numel(), generator=torch.Generator().manual_seed(seed)).view(pages.shape))
        lengths.copy_(torch.tensor(new))
        case.qkv.normal_()
        graph.replay()
        replayed = out.clone()
        assert_identical(replayed, run(), what=f"lengths {new}")


# Text of the kernel, its replacement, the window, and the finding that must follow.
MUTATIONS = {
    "none": ("", "", None, None),
    "none, with a window": ("", "", 100, None),
    "written by the first partial": ("(last - begin) // TILE.block_n % count == split", "split == 0", None, "race"),
    "written by the partial of all tokens": ("(last - begin) //", "last //", 100, "race"),
}


@pytest.mark.parametrize(
    ("mutation", "schedules"),
    sampled(
        ((mutation, schedules) for mutation in MUTATIONS for schedules in (4, 20)), lambda _, schedules: schedules == 4
    ),
)
def test_what_orders_the_new_token_is_needed(mutation, schedules, tmp_path):
    old, new, window, finding = MUTATIONS[mutation]
    mutant = mutated(decoding, old, new, f"decode_mutant_{list(MUTATIONS).index(mutation)}", tmp_path)

    def main(team):
        case = Case(SMALL, (300,), "cpu", window=window)
        return [case.run(SPLIT, mutant)[0] for _ in range(2)]

    report = weft.check.check(main, 1, schedules=schedules)
    found = {finding.kind for found in report.findings for finding in (found.finding, *found.also)}
    assert (finding in found) if finding else report.ok, str(report)


@pytest.mark.parametrize("heads", [QWEN, HEADS[-1]], ids=str)
def test_gates_multiply_as_sigmoid_mul_does(heads):
    """A step of several tokens multiplies by that op."""

    def main(team):
        case = Case(heads, (33, 0, 5), "cpu")
        wide = random((3, 2 * heads.q_heads * heads.D), heads.dtype, "cpu")
        gate = wide[:, heads.q_heads * heads.D :]
        plain, gated = (case.run(SPLIT, gate=one)[0] for one in (None, gate))
        assert_identical(gated.flatten(1), ops.sigmoid_mul(plain.flatten(1), gate))

    weft.simulate(main, 1)


# Text of the kernel and its replacement.
OF_GATES = {
    "gates forgotten": ("None, gate_of_pair)", "None, None)"),
    "gates of the first sequence": ("gate.rows + sequence.to(tl.int64) * gate.stride", "gate.rows"),
    "gates of the first head": (" + head * (TILE.group * D)\n", "\n"),
}


@pytest.mark.parametrize("mistake", OF_GATES)
def test_the_cases_find_planted_mistakes_with_gates(mistake, tmp_path):
    case = next(case for case in decoding.DECODE_ATTENTION.cases() if case.field("gate"))
    mutant = mutated(decoding, *OF_GATES[mistake], f"decode_gates_{list(OF_GATES).index(mistake)}", tmp_path)

    def main(team):
        inputs = inputs_of(case, 0)
        given = [x.clone() for x in inputs]
        check_result(case, 0, [inputs], mutant.DECODE_ATTENTION.call(case, None, *given))

    with pytest.raises(AssertionError, match="wrong"):
        weft.simulate(main, 1)


def refused():
    case = Case(SMALL, (20, 3), "cpu")
    keys, values = case.cache
    pages, lengths = case.places

    def call(qkv=case.qkv, q=case.weights[0], keys=keys, values=values, pages=pages, lengths=lengths, **rest):
        return lambda: ops.decode_attention(
            qkv, q, case.weights[1], EPS, case.angles, keys, values, pages, lengths, **rest
        )

    yield r"qkv has shape \(2, 100\); .* \[B, \(Hq \+ 2\) \* 64\]", call(qkv=case.qkv[:, :100])
    yield r"keys\.dtype=torch\.float32 is not one of bfloat16", call(qkv=case.qkv.to(BF16))
    yield r"q_weight has shape \(3,\)", call(q=torch.ones(3))
    yield r"values has shape", call(values=values[:1])
    yield r"pages has shape", call(pages=pages[:1])
    yield r"lengths\.dtype=torch\.int64", call(lengths=lengths.long())
    yield r"tickets has shape \(1,\)", call(tickets=torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("number", range(7))
def test_wrong_arguments_are_refused_by_name(number):
    message, call = list(refused())[number]
    with pytest.raises(ValueError, match=f"decode_attention: .*{message}"):
        call()
