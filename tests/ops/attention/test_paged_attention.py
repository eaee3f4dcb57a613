"""paged_attention: graphs, refused arguments, and the order of its partials; its cases run with all others."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_close, assert_identical
from tests.ops.layer_cases import (
    DEVICES,
    SMALL,
    Heads,
    changed,
    check_refused,
    everywhere,
    layer_arguments,
    mutated,
    random,
)
from tests.sampled import sampled
from weft import ops
from weft.kernels import split_kv
from weft.kernels.paged_cache import Sequences
from weft.ops.attention import cases
from weft.ops.case import BF16, FP32, Draw

attention = importlib.import_module("weft.ops.attention.paged_attention")
OP = attention.PAGED_ATTENTION


QWEN = Heads(q_heads=16, kv_heads=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", list(OP.cases())[:12:2], ids=str)
def test_arrival_counters_are_left_as_zeros_and_calls_repeat(case, device):
    def check(device):
        q, keys, values, pages, lengths = OP.inputs(case, 0, Draw(case, 0, 0, device))
        tickets = torch.zeros(q.shape[0] * keys.shape[1] + 1, dtype=torch.int32, device=device)
        design = OP.plan_of(keys, pages) if isinstance(case.design, str) else case.design
        scale = q.shape[2] ** -0.5
        given = attention.PagedArguments(q, keys, values, Sequences(pages, lengths), scale, tickets, None)
        results = []
        for _ in range(3):
            results.append(OP.run(design, None, given))
            assert not tickets.any()
        for result in results[1:]:
            assert_identical(result, results[0], what="another call")

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
def test_paged_attention_by_its_public_name(device):
    """A scale, no arrival counters, strided queries, and lengths beyond the table, which are cut to fit."""

    def check(device):
        keys, values = SMALL.cache(4, device)
        q = random((SMALL.q_heads, 2, SMALL.D), FP32, device, 7).transpose(0, 1)
        pages = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=device)
        lengths = torch.tensor([90, 20], dtype=torch.int32, device=device)
        actual = ops.paged_attention(q, keys, values, pages, lengths, scale=0.3)
        for b, length in ((0, 32), (1, 20)):
            k, v = (cache[pages[b].long(), 0].reshape(-1, SMALL.D)[:length].double() for cache in (keys, values))
            assert_close(actual[b], (q[b].double() @ k.T * 0.3).softmax(-1) @ v, length + SMALL.D, what=f"row {b}")

    everywhere(check, device)


@pytest.mark.gpu(1)
def test_a_replayed_graph_follows_lengths_and_pages():
    heads = QWEN
    keys, values = heads.cache(64, "cuda")
    q, out = random((2, heads.q_heads, heads.D), heads.dtype, "cuda", 5), None
    pages, lengths = (
        torch.zeros((2, 30), dtype=torch.int32, device="cuda"),
        torch.ones(2, dtype=torch.int32, device="cuda"),
    )
    tickets = torch.zeros(8, dtype=torch.int32, device="cuda")
    ops.paged_attention(q, keys, values, pages, lengths, tickets=tickets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.paged_attention(q, keys, values, pages, lengths, tickets=tickets)
    for seed, new in enumerate(((1, 1920), (0, 64), (700, 1300), (65, 1))):
        pages.copy_(torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:60].view(2, 30))
        lengths.copy_(torch.tensor(new))
        graph.replay()
        replayed = out.clone()
        assert_identical(replayed, ops.paged_attention(q, keys, values, pages, lengths), what=f"lengths {new}")


@pytest.mark.parametrize(
    ("message", "position", "value"),
    [
        ("q has shape (4, 64); it must be (B, Hq, 64)", 0, torch.ones(4, 64)),
        ("q has 0 heads and keys 1", 0, torch.ones(1, 0, 64)),
        ("page_size=8 is not one of 16, 32, 64, 128, 256", 1, torch.ones(40, 1, 8, 64)),
        ("pages has shape (2, 20); it must be (1, max_pages)", 3, torch.zeros((2, 20), dtype=torch.int32)),
        ("pages.dtype=torch.int64 is not one of int32", 3, torch.zeros((1, 20), dtype=torch.int64)),
        ("lengths has shape (); it must be (1,)", 4, torch.zeros((), dtype=torch.int32)),
        ("contiguous row of B * Hkv=1 or more", 6, torch.zeros(0, dtype=torch.int32)),
    ],
)
def test_wrong_arguments_are_refused(message, position, value):
    arguments = changed(position, value, layer_arguments()[1])
    # keys and values change together: else their shapes differ, and that is what is said.
    check_refused(ops.paged_attention, changed(2, value, arguments) if position == 1 else arguments, message)


def test_a_scale_that_is_not_positive_is_refused_with_several_queries():
    q, keys, values, pages, lengths, *_ = layer_arguments()[1]
    q, lengths, call = torch.cat((q, q)), torch.cat((lengths, lengths)), ops.paged_attention
    for scale in (0.0, -1.0):
        message = f"scale={scale} is not positive; scores are compared before it is applied"
        check_refused(lambda scale=scale: call(q, keys, values, pages, lengths, scale, queries=2), (), message)


def test_heads_that_kv_heads_do_not_share_evenly_are_refused():
    cache, (_, _, _, *rest) = torch.ones(9, 2, 16, 64), layer_arguments()[1]
    check_refused(ops.paged_attention, (torch.ones(1, 3, 64), cache, cache, *rest[:2]), "q has 3 heads and keys 2")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("block_n=48 is not a power of two", {"block_n": 48}),
        ("least=100 is not a multiple of block_n=64", {"least": 100}),
        ("splits=0 is not positive", {"splits": 0}),
    ],
)
def test_wrong_designs_are_refused(message, field):
    check_refused(lambda: attention.SplitKV(**field), (), message)


MUTATIONS = {
    "no barrier": ("wl.gather_stores()", "pass", "missing-barrier"),
    "no release": ('sem="acq_rel"', 'sem="acquire"', "relaxed-order"),
    "no acquire": ('sem="acq_rel"', 'sem="release"', "relaxed-order"),
    "joined by the first": ("== count - 1", "== 0", "race"),
    "arrival counters not put back": ("tl.store(partials.arrivals + pair, 0)", "pass", "divergence"),
    "none": ("", "", None),
}


@pytest.mark.parametrize(
    ("mutation", "schedules"),
    sampled(
        ((mutation, schedules) for mutation in MUTATIONS for schedules in (2, 8)), lambda _, schedules: schedules == 2
    ),
)
def test_what_orders_the_partials_is_needed(mutation, schedules, tmp_path):
    old, new, finding = MUTATIONS[mutation]
    name = f"mutant_{list(MUTATIONS).index(mutation)}"
    kernels = mutated(split_kv, old, new, f"{name}_kernels", tmp_path)
    mutant = mutated(attention, "from weft.kernels.split_kv", f"from {kernels.__name__}", name, tmp_path)

    def main(team):
        keys, values = SMALL.cache(8, "cpu")
        q = random((1, SMALL.q_heads, SMALL.D), FP32, "cpu", 2)
        pages, lengths = torch.arange(8, dtype=torch.int32)[None], torch.full((1,), 100, dtype=torch.int32)
        tickets, design = (
            torch.zeros(1, dtype=torch.int32),
            mutant.SplitKV(block_n=16, least=16, splits=16, num_warps=1),
        )
        given = mutant.PagedArguments(q, keys, values, Sequences(pages, lengths), 0.125, tickets, None)
        return [mutant.PAGED_ATTENTION.run(design, None, given) for _ in range(2)]

    report = weft.check.check(main, 1, schedules=schedules)
    found = {finding.kind for found in report.findings for finding in (found.finding, *found.also)}
    assert (finding in found) if finding else report.ok, str(report)


PLANTED = {
    "tokens see those after them": ("seen = local[:, None, :] < end", "seen = there[:, None, :]"),
    "a part begins at a token of the part before": ("+ sequence % PARTS * TILE.queries\n", "+ sequence % PARTS\n"),
    "keys before a window are seen": ("seen &= local[:, None, :] >= end - TILE.window", "pass"),
    "a new token's block is seen whole": (
        "shortest // BLOCK_N * BLOCK_N))",
        "shortest // BLOCK_N * BLOCK_N + BLOCK_N))",
    ),
}


def planted(name, directory):
    """The op of a copy of the kernels with a mistake of PLANTED, "" for none."""
    from weft.kernels import online_softmax

    old, new = PLANTED.get(name, ("", ""))
    stem, modules = f"few_{list(PLANTED).index(name) if name else 'sound'}", {}
    for module in (online_softmax, split_kv):
        given = (old, new) if old in Path(module.__file__).read_text() else ("", "")
        modules[module.__name__] = mutated(module, *given, f"{stem}_{module.__name__.split('.')[-1]}", directory)
    source = Path(attention.__file__).read_text()
    for original, copy in modules.items():
        source = source.replace(f"from {original}", f"from {copy.__name__}")
    assert not old or old in source or any(old not in Path(copy.__file__).read_text() for copy in modules.values())
    (directory / f"{stem}_source.py").write_text(source)
    return mutated(
        SimpleNamespace(__file__=directory / f"{stem}_source.py"),
        *((old, new) if old and old in source else ("", "")),
        stem,
        directory,
    ).PAGED_ATTENTION


@pytest.mark.parametrize("name", ["", *PLANTED])
def test_mistakes_with_several_new_tokens_are_found(name, tmp_path):
    """By a few cases: tokens of a sequence in one program of 16 rows, of 64 rows, and in two programs; windows."""
    op, split = planted(name, tmp_path), attention.SplitKV(block_n=16, least=16, splits=8, num_warps=1)
    wide, narrow = ((48, 2, 16, 16), BF16), cases.SMALL

    def main(team):
        for heads, fields in (
            (narrow, {"lengths": (40, 41, 42, 9, 10, 0), "queries": 3}),
            (narrow, {"lengths": (60, 61, 62), "queries": 3, "window": 20}),
            (wide, {"lengths": (33, 34, 35, 20, 0, 0), "queries": 3}),
            (((16, 2, 32, 16), BF16), {"lengths": (70, 71, 72, 73, 74, 0), "queries": 3}),
        ):
            case = cases.case_of("paged_attention", heads, split, **fields)
            inputs = OP.inputs(case, 0, Draw(case, 0, 0, "cpu"))
            actual = op.call(case, team, *inputs)
            assert_close(actual, OP.reference(case, 0, [inputs]), 200, partials=1, by_row=True, what=str(case))

    if name:
        with pytest.raises((AssertionError, weft.errors.WeftError)):
            weft.simulate(main, 1)
    else:
        weft.simulate(main, 1)
