"""sharded_decode_attention and its cache over ranks: schedules, repeated calls, extremes, graphs, refused arguments."""

import importlib

import pytest
import torch

import weft
import weft.check
from tests.compiling import SHARED, TARGETS, a_view, compiled, stack_bytes
from tests.ops.checking import assert_identical, check_replicated, run_cases
from tests.ops.layer_cases import mutated
from tests.ops.test_compile_layer_kernels import caps_of, check_compiles, check_machine_code
from weft import ops
from weft.kernels.block_cyclic import local_lengths, local_slots
from weft.kernels.online_softmax import ScoreRule
from weft.kernels.paged_cache import CacheSizes, PagedCache, Sequences
from weft.kernels.split_kv import Partials
from weft.ops.attention import cases, head_words
from weft.ops.attention.decoding import DecodingCall, SplitKV, split_kv_for
from weft.ops.attention.head_words import HeadSizes, HeadWords, merge_heads_kernel
from weft.ops.attention.sharded_decode_attention import (
    SHARDED_DECODE_ATTENTION,
    long_tile_of,
    sharded_attention_kernel,
)
from weft.ops.attention.sharded_plan import OneKernel, ShardedCall, TwoKernels
from weft.plan.planned import machine
from weft.runtime.capabilities import launch_options, simulated

module = importlib.import_module("weft.ops.attention.sharded_decode_attention")
ALGORITHMS = ("one_kernel", "two_kernels")
HEADS, KV_HEADS, D, S = 24, 2, 16, 16


def cache_of(rank, pages=12):
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(pages, KV_HEADS, S, D, generator=generator) for _ in range(2))


def calls(team, algorithm, count=4):
    """Calls in a row of other batches and lengths, on one workspace, without a barrier between."""
    cache, results = tuple(cache_of(team.rank)), []
    for call in range(count):
        lengths = ((33, 0), (16 * team.size + 1,), (1, 60), (0, 0))[call % 4]
        q = torch.randn(len(lengths), HEADS, D, generator=torch.Generator().manual_seed(call))
        pages = torch.arange(4 * len(lengths), dtype=torch.int32).view(-1, 4)
        given = q, *cache, pages, torch.tensor(lengths, dtype=torch.int32)
        results.append(ops.sharded_decode_attention(*given, team, algorithm=algorithm))
    return results


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_more_cases(world_size):
    more = cases.more_sharded_cases(SHARDED_DECODE_ATTENTION.name, OneKernel, TwoKernels, SplitKV)
    here = [case for case in more if case.world_size == world_size]
    check_replicated(weft.simulate(run_cases, world_size, seed=world_size, args=(here, 2)))


def test_the_same_bits_from_both_designs_and_with_a_late_rank():
    first = weft.simulate(calls, 2, args=("one_kernel", 3))
    for seed, slow, algorithm in ((1, {1: 30}, "one_kernel"), (2, {0: 30}, "two_kernels")):
        for mine, other in zip(first, weft.simulate(calls, 2, seed=seed, slow=slow, args=(algorithm, 3)), strict=True):
            for one, another in zip(mine, other, strict=True):
                assert_identical(another, one)


def replays(team):
    """Lengths grow in static tensors between replays, with eager calls between; the same bits as eager calls."""
    cache = [x.to(team.device, torch.bfloat16) for x in cache_of(team.rank)]
    q, pages = torch.zeros(2, HEADS, D), torch.arange(8, dtype=torch.int32).view(2, 4)
    q, pages, lengths = (x.to(team.device) for x in (q.bfloat16(), pages, torch.ones(2, dtype=torch.int32)))
    for algorithm in ALGORITHMS:
        given = q, *cache, pages, lengths, team
        ops.sharded_decode_attention(*given, algorithm=algorithm)
        team.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = [ops.sharded_decode_attention(*given, algorithm=algorithm) for _ in range(3)][-1]
        for step in range(20):
            q.copy_(torch.randn(2, HEADS, D, generator=torch.Generator().manual_seed(step)))
            lengths.copy_(torch.tensor([step * 6, 16 * step % 64 + 1]))
            graph.replay()
            assert_identical(
                out.clone(), ops.sharded_decode_attention(*given, algorithm=algorithm), what=f"step {step}"
            )
    return True


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
@pytest.mark.gpu(1)
def test_a_replayed_graph_follows_growing_lengths(world_size):
    assert all(weft.launch(replays, world_size, "cuda", share_gpus=torch.cuda.device_count() < world_size))


def test_scores_of_minus_infinity_do_not_count():
    """At one rank, and at all: then zeros, as for no tokens. Products of -inf and 0 are no scores, so q is positive."""

    def main(team):
        keys, values = cache_of(team.rank)
        keys[0] = -torch.inf  # of the first sequence at every rank, the second one at rank 0
        if team.rank == 0:
            keys[4] = -torch.inf
        pages = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]], dtype=torch.int32)
        given = torch.ones(2, HEADS, D), keys, values, pages, torch.tensor([32, 32], dtype=torch.int32)
        results = [ops.sharded_decode_attention(*given, team, algorithm=algorithm) for algorithm in ALGORITHMS]
        return results, keys[4], values[4]

    found = weft.simulate(main, 2)
    keys, values = (x.double() for x in found[1][1:])
    alone = torch.einsum("hs,hsd->hd", (keys.sum(-1) * D**-0.5).softmax(-1), values).repeat_interleave(12, 0)
    for rank, (results, _, _) in enumerate(found):
        for result in results:
            assert not result[0].any()
            torch.testing.assert_close(result[1].double(), alone[12 * rank :][:12], rtol=1e-5, atol=1e-5)


def test_block_cyclic_lengths_and_slots():
    for world_size in (1, 2, 3, 4, 8):
        for length in range(70):
            token = torch.arange(length)
            owners = token // 4 % world_size
            for rank in range(world_size):
                assert local_lengths(torch.tensor([length]), rank, world_size, 4).item() == (owners == rank).sum()
                pages = (torch.arange(20).flip(0).int()).expand(length, 20)
                slots = local_slots(token, pages, 4, rank, world_size)
                mine = owners == rank
                assert (slots[~mine] == -1).all()
                # A rank's tokens are a sequence of their own.
                local = torch.arange(int(mine.sum()))
                assert torch.equal(slots[mine], (19 - local // 4) * 4 + local % 4)
    assert local_slots(torch.tensor([-1]), torch.zeros(1, 2).int(), 4, 0, 2).item() == -1


@pytest.mark.parametrize(
    ("pairs", "name"), [(132, "one_kernel"), (8 * 132 + 1, "two_kernels")], ids=["all resident", "too many programs"]
)
def test_the_plan_takes_one_kernel_where_all_programs_are_resident(pairs, name):
    plan = SHARDED_DECODE_ATTENTION.plan(ShardedCall(pairs, 128, 16, torch.bfloat16), machine(simulated(2), 2))
    assert plan.name == name and f"{pairs} pairs" in plan.reason


@pytest.mark.parametrize(
    ("sms", "design"), [(None, OneKernel), (8, TwoKernels)], ids=["as many as the GPU holds", "fewer"]
)
def test_auto_runs_a_design_whose_programs_the_virtual_ranks_hold(sms, design, monkeypatch):
    """More programs than SMs, which a GPU holds two an SM."""
    run, batch, designs = SHARDED_DECODE_ATTENTION.run, 70, []

    def seen(self, chosen, *given):
        designs.append(type(chosen))
        return run(chosen, *given)

    def main(team):
        cache, lengths = cache_of(team.rank, pages=1), torch.ones(batch, dtype=torch.int32)
        q = torch.ones(batch, HEADS, D)
        return ops.sharded_decode_attention(q, *cache, torch.zeros(batch, 1).int(), lengths, team)

    monkeypatch.setattr(type(SHARDED_DECODE_ATTENTION), "run", seen)
    _, values = cache_of(0, pages=1)  # the only token of each sequence is rank 0's
    for rank, out in enumerate(weft.simulate(main, 2, sms=sms)):
        own = values[0, :, 0].repeat_interleave(HEADS // KV_HEADS, 0)[rank * 12 :][:12]
        torch.testing.assert_close(out, own.expand(batch, -1, -1))
    assert designs == [design, design]


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("q has 8 heads, which world_size=3 ranks cannot share evenly", {"q": torch.ones(1, 8, 16)}),
        ("window=0", {"window": 0}),
        ("algorithm='ring' is not one of 'auto', 'one_kernel', 'two_kernels'", {"algorithm": "ring"}),
        ("pages has shape (2, 4); it must be (1, local_pages)", {"pages": torch.zeros(2, 4).int()}),
        ("lengths.dtype=torch.int64 is not one of int32", {"lengths": torch.zeros(1).long()}),
        ("keys.dtype=torch.float16 is not one of float32", {"keys": torch.ones(4, 2, 16, 16).half()}),
        ("algorithm='one_kernel' has 266 programs that wait for peers, and 264 are resident", {"batch": 133}),
    ],
)
def test_wrong_arguments_are_refused(message, fields):
    def main(team):
        batch = fields.get("batch", 1)
        given = {
            "q": torch.ones(batch, 12, 16), "keys": torch.ones(4, 2, 16, 16), "values": torch.ones(4, 2, 16, 16),
            "pages": torch.zeros(batch, 4).int(), "lengths": torch.ones(batch).int(), "algorithm": "one_kernel",
            **{name: value for name, value in fields.items() if name != "batch"},
        }  # fmt: skip
        with pytest.raises(ValueError) as refused:
            ops.sharded_decode_attention(**given, team=team)
        assert message in str(refused.value) and "\n" not in str(refused.value)

    weft.simulate(main, 3)


# --- planted bugs -------------------------------------------------------------------------------------------------------

CLEAR = "        wl.lamport_clear(cells, of_cells)\n        wl.lamport_clear(sums, there)\n"
# The file that changes, source, what to, the finding.
BUGS = {
    "owner off by one": ("head_words", "return tl.minimum(head // HEADS.own, world - 1)",
                         "return tl.minimum(head // HEADS.own + 1, world - 1)", "race"),
    "words not cleared": ("head_words", CLEAR, "        pass\n", "uncleared"),
    "one half": ("sharded_decode_attention", "tl.store(words.halves + pair, 1 - half)", "pass", "race|deadlock"),
    "merged before the words are there": ("head_words", "wl.lamport_load_keyed(cells, of_cells, sums, there, team, exchange)",
                                          "tl.load(cells, of_cells), tl.load(sums, there)", "race"),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", BUGS)
def test_the_check_finds_a_planted_bug(name, algorithm, tmp_path, monkeypatch):
    file, old, new, kind = BUGS[name]
    stem = f"sharded_mutant_{list(BUGS).index(name)}"
    if file == "head_words":
        words = mutated(head_words, old, new, f"{stem}_words", tmp_path)
        old, new = "from weft.ops.attention.head_words", f"from {words.__name__}"
    mutant = mutated(module, old, new, stem, tmp_path)
    for kernel in ("sharded_attention_kernel", "merge_heads_kernel"):
        monkeypatch.setattr(module, kernel, getattr(mutant, kernel))
    report = weft.check.check(calls, 2, schedules=8, sms=8, args=(algorithm,))
    found = {finding.kind for each in report.wrong for finding in (each.finding, *each.also)}
    assert found & set(kind.split("|")), f"{found}\n{report}"


# --- compiled -----------------------------------------------------------------------------------------------------------

FLOATS, INTS = torch.zeros(16), torch.zeros(16, dtype=torch.int32)


def built(
    arch,
    *,
    dtype=torch.bfloat16,
    D=128,
    group=8,
    kv_heads=4,
    page=64,
    fused=True,
    world_size=2,
    window=None,
    scored=False,
):
    x, caps = torch.zeros(16, dtype=dtype), caps_of(arch)
    split = split_kv_for(DecodingCall(kv_heads, 1 << 20, D, dtype), caps)
    heads = HeadSizes.of(group * kv_heads, kv_heads, 1, world_size)
    constants = {"SIZES": CacheSizes(kv_heads, page, D), "TILE": long_tile_of(split, group, D, window), "HEADS": heads}
    constants |= {"FUSED": fused, "num_warps": split.num_warps, "num_stages": split.num_stages, **launch_options(caps)}
    scores = ScoreRule(0.1, 0.2, x) if scored else ScoreRule(0.1)
    places = PagedCache(x, x), Sequences(INTS, INTS), x, Partials(FLOATS, FLOATS, INTS), 40, scores
    words = HeadWords(FLOATS, FLOATS, INTS), a_view(world_size=world_size)
    return compiled(sharded_attention_kernel, x, *places, *words, arch=arch, **constants)


def merge(arch, world_size=2):
    constants = {"HEADS": HeadSizes.of(32, 4, 1, world_size), "ROWS": 4, "D": 128, **launch_options(caps_of(arch))}
    out = torch.zeros(16, dtype=torch.bfloat16)
    words = HeadWords(FLOATS, FLOATS, INTS), a_view(world_size=world_size)
    return compiled(merge_heads_kernel, out, None, *words, arch=arch, **constants)


@pytest.mark.triton_internals
@pytest.mark.sweep
@pytest.mark.parametrize("arch", TARGETS)
def test_kernels_compile_and_fit(arch, tmp_path):
    windows = {"window": 1000}, {"window": 1000, "fused": False}
    for fields in (
        {},
        {"fused": False},
        {"world_size": 8},
        {"group": 16},
        {"group": 1, "kv_heads": 12, "D": 64},
        *windows,
        {"window": 1000, "scored": True},
    ):
        for dtype in (torch.bfloat16, torch.float16):
            kernel = built(arch, dtype=dtype, **fields)
            assert kernel.metadata.shared <= SHARED[arch]
            check_compiles(kernel, arch)
            assert arch != "sm_90" or stack_bytes(kernel, tmp_path) == 0
    for world_size in (1, 2, 8):
        check_compiles(merge(arch, world_size), arch)


@pytest.mark.triton_internals
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.sweep), 1000])
def test_machine_code_on_sm_90(window, tmp_path):
    for kernel in (built("sm_90", D=64, group=4, window=window), merge("sm_90")):
        check_machine_code(kernel, tmp_path)
        # Two programs of four warps an SM, which the plan counts on.
        assert kernel.metadata.shared + 1024 <= (228 << 10) // 2 and stack_bytes(kernel, tmp_path) == 0
