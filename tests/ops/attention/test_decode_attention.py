"""decode_attention against plain PyTorch in double, and against the two ops that it fuses."""

import importlib

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_close, assert_identical
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
    rms_norm,
    rotate,
)
from weft import ops
from weft.kernels.paged_cache import PagedCache, Sequences
from weft.kernels.rotary import HeadNorms
from weft.ops.attention.paged_attention import AttentionConfig
from weft.ops.case import BF16, FP32

decoding = importlib.import_module("weft.ops.attention.decode_attention")

QWEN = Heads(q_heads=16, kv_heads=2)
SPLIT = AttentionConfig(block_n=16, least=16, num_warps=1)
LENGTHS = ((1,), (0, 63, 64, 65, 128), (15, 16, 17, 31, 32, 33), (300, 0, 1))


class Case:
    """Arguments of decode_attention for sequences of these lengths; cells of new tokens hold NaN."""

    def __init__(self, heads, lengths, device, *, parts=0, squares=0, strided=False, seed=0):
        B, S, D = len(lengths), heads.page_size, heads.D
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
        self.factor = torch.ones((B, 1), dtype=torch.float64, device=device)
        if strided:
            self.qkv = torch.cat((self.qkv, self.qkv), dim=-1)[:, :width]
        self.given = self.qkv
        if squares:
            self.given, self.factor = deferred(self.qkv, squares)
        self.places = self.pages.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
        self.tickets = torch.zeros(B * heads.kv_heads + 1, dtype=torch.int32, device=device)

    def run(self, config=None, module=decoding):
        """(result, the cache after it)"""
        cache = [x.clone() for x in self.cache]
        norms, sequences = HeadNorms(*self.weights, EPS), Sequences(*self.places)
        scale = self.heads.D**-0.5
        out = module.run(self.given, norms, self.angles, PagedCache(*cache), sequences, scale, self.tickets, config)
        assert not self.tickets.any(), "arrival counters are left as they were"
        return out, cache

    def expected(self):
        """(result, cache) in fp64, from rounded queries, keys and values; unwritten cells as they were."""
        heads, D = self.heads, self.heads.D
        summed = (self.qkv.double().sum(0) if self.qkv.dim() == 3 else self.qkv.double()) * self.factor
        x = summed.view(len(self.lengths), -1, D)
        q, k, v = x.split([heads.q_heads, heads.kv_heads, heads.kv_heads], dim=1)
        at = (self.places[1].long() - 1).clamp(min=0)
        cos, sin = self.angles.double()[at].chunk(2, dim=-1)
        q, k = (rotate(rms_norm(y, w.double()), cos, sin) for y, w in zip((q, k), self.weights, strict=True))
        q, k, v = (y.to(heads.dtype).double() for y in (q, k, v))
        keys, values = (cache.double() for cache in self.cache)
        out = torch.zeros(len(self.lengths), heads.q_heads, D, dtype=torch.float64, device=q.device)
        for b, length in enumerate(self.lengths):
            if length > 0:
                mine = self.pages[b, : -(-length // heads.page_size)].long().to(q.device)
                page, offset = mine[-1], (length - 1) % heads.page_size
                keys[page, :, offset], values[page, :, offset] = k[b], v[b]
                ks, vs = (c[mine].transpose(0, 1).reshape(heads.kv_heads, -1, D)[:, :length] for c in (keys, values))
                scores = q[b].view(heads.kv_heads, -1, D) @ ks.transpose(1, 2) / D**0.5
                out[b] = (scores.softmax(-1) @ vs).view(heads.q_heads, D)
        return out, (keys, values)


def check_decode_attention(device, heads, config=None, calls=3, lengths=LENGTHS, **kind):
    for seed, each in enumerate(lengths):
        case = Case(heads, each, device, seed=seed, **kind)
        expected, expected_cache = case.expected()
        out, cache = case.run(config)
        what = f"{heads} {each} {kind}"
        for actual, right, name in zip(cache, expected_cache, ("keys", "values"), strict=True):
            assert_close(actual, right, heads.D, what=f"{what}: {name}")
        # Some queries and keys are rounded to the other neighbour.
        assert_close(out, expected, max(each) + heads.D, partials=1, what=what)
        for _ in range(calls - 1):
            again, cache_again = case.run(config)
            assert_identical(again, out, what=f"{what}, another call")
            for x, y in zip(cache, cache_again, strict=True):
                assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_attention(heads, device):
    everywhere(check_decode_attention, device, heads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [QWEN, SMALL], ids=str)
@pytest.mark.parametrize(
    "kind", [{}, {"parts": 1}, {"parts": 3}, {"squares": 20}, {"strided": True}], ids=lambda kind: str(kind)
)
def test_kinds_of_projection(heads, kind, device):
    """Partials of 16 tokens, any of which may hold the new token."""
    everywhere(lambda device: check_decode_attention(device, heads, SPLIT, **kind), device)


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
@pytest.mark.parametrize(("B", "length"), [(1, 128), (1, 20000), (32, 1024), (128, 129)], ids=str)
def test_of_a_model(B, length):
    for kind in ({"parts": 3}, {"squares": 20}):
        check_decode_attention("cuda", QWEN, lengths=((length,) * (B - 1) + (length - 1,),), **kind)


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


# Text of the kernel, its replacement, and the finding that must follow.
MUTATIONS = {
    "none": ("", "", None),
    "written by the first partial": ("last // TILE.block_n % count == split", "split == 0", "race"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_orders_the_new_token_is_needed(mutation, tmp_path):
    old, new, finding = MUTATIONS[mutation]
    mutant = mutated(decoding, old, new, f"decode_mutant_{list(MUTATIONS).index(mutation)}", tmp_path)

    def main(team):
        case = Case(SMALL, (300,), "cpu")
        return [case.run(SPLIT, mutant)[0] for _ in range(2)]

    report = weft.check.check(main, 1, schedules=20)
    found = {finding.kind for found in report.findings for finding in (found.finding, *found.also)}
    assert (finding in found) if finding else report.ok, str(report)


def test_the_schema_and_the_fake_tell_the_truth():
    def main(team):
        for kind in ({}, {"parts": 2}, {"squares": 3}):
            case = Case(SMALL, (20, 3), "cpu", **kind)
            squares, norm_eps = (case.given.squares, EPS) if kind.get("squares") else (None, 0.0)
            cache = [x.nan_to_num(1.0) for x in case.cache]
            arguments = (
                case.qkv, squares, norm_eps, *case.weights, EPS, case.angles, *cache, *case.places, 0.1, case.tickets
            )  # fmt: skip
            tests = ("test_schema", "test_faketensor", "test_autograd_registration")
            torch.library.opcheck(torch.ops.weft.decode_attention.default, arguments, test_utils=tests)

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
