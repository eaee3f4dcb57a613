"""paged_attention against plain PyTorch in double; each thing that orders its partials is needed."""

import importlib
from dataclasses import dataclass, fields

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_close, assert_identical
from tests.ops.layer_cases import (
    DEVICES,
    HEADS,
    SMALL,
    Heads,
    changed,
    check_refused,
    everywhere,
    layer_arguments,
    mutated,
    random,
)
from weft import ops
from weft.kernels import split_kv
from weft.kernels.paged_cache import PagedCache, Sequences
from weft.ops.case import FP32

attention = importlib.import_module("weft.ops.attention.paged_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """A case: the sequences' lengths; the table has as many pages as the longest needs and ``spare`` more."""

    heads: Heads
    lengths: tuple[int, ...]
    spare: int = 0
    config: tuple[tuple[str, int], ...] = ()

    def __str__(self):
        config = "".join(f"-{name}={value}" for name, value in self.config)
        return f"{self.heads}-{'_'.join(map(str, self.lengths))}+{self.spare}{config}"


def config(**fields):
    return tuple(fields.items())


QWEN = Heads(q_heads=16, kv_heads=2)
SPLIT = config(block_n=16, least=16, num_warps=1)
ATTENDED = [
    Attended(heads=QWEN, lengths=(1,)),
    Attended(heads=QWEN, lengths=(0, 63, 64, 65, 128)),
    Attended(heads=QWEN, lengths=(1000,), spare=4),
    Attended(heads=QWEN, lengths=(0, 1, 700), spare=1),
    Attended(heads=QWEN, lengths=(300, 15), config=config(block_n=128, least=128, num_warps=8, num_stages=2)),
    Attended(heads=QWEN, lengths=(513,), config=config(block_n=32, least=32, max_splits=3, num_warps=2)),
    Attended(heads=QWEN, lengths=(640,), config=config(block_n=16, least=16, max_splits=64, per_sm=32, num_warps=1)),
    Attended(heads=SMALL, lengths=(0, 0, 0)),
    Attended(heads=SMALL, lengths=(15, 16, 17, 31, 32, 33), config=SPLIT),
    Attended(heads=SMALL, lengths=(256,), spare=0, config=SPLIT),
    Attended(heads=SMALL, lengths=(255, 1, 0, 47), spare=3, config=SPLIT),
    *(Attended(heads=heads, lengths=(0, 1, 77, 160), config=SPLIT) for heads in HEADS),
    *(Attended(heads=heads, lengths=(500,), spare=2) for heads in HEADS),
]


def check_paged_attention(device, case, calls=3):
    heads, B = case.heads, len(case.lengths)
    S, D = heads.page_size, heads.D
    needed = [-(-length // S) for length in case.lengths]
    max_pages = max(max(needed), 1) + case.spare
    total = sum(needed) + 2
    keys, values = heads.cache(total, device, 1)
    q = random((B, heads.q_heads, D), heads.dtype, device, 3)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(B)).tolist()
    # Pages that no sequence owns must not be read, nor cells behind a length.
    pages = torch.full((B, max_pages), 1 << 24, dtype=torch.int32)
    owned = torch.zeros((total, S), dtype=torch.bool)
    for b, length in enumerate(case.lengths):
        for index in range(needed[b]):
            page = pages[b, index] = order.pop()
            owned[page, : length - index * S] = True
    for cache in (keys, values):
        cache[~owned[:, None, :, None].expand(cache.shape).to(device)] = torch.nan
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)

    on_host = [cache.cpu().double() for cache in (keys, values)]
    expected = torch.zeros(B, heads.q_heads, D, dtype=torch.float64)
    for b, length in enumerate(case.lengths):
        if length > 0:
            mine = pages[b, : needed[b]].long()
            k, v = (c[mine].transpose(0, 1).reshape(heads.kv_heads, -1, D)[:, :length] for c in on_host)
            x = q[b].double().cpu().view(heads.kv_heads, -1, D)
            weights = (x @ k.transpose(1, 2) / D**0.5).softmax(-1)
            expected[b] = (weights @ v).view(heads.q_heads, D)

    chosen = attention.AttentionConfig(**dict(case.config)) if case.config else None
    tickets, results = torch.zeros(B * heads.kv_heads + 1, dtype=torch.int32, device=device), []
    for _ in range(calls):
        sequences = Sequences(pages.to(device), lengths)
        results.append(attention.run(q, PagedCache(keys, values), sequences, D**-0.5, tickets, chosen))
        assert not tickets.any(), "tickets are left as they were"
    assert_close(results[0].cpu(), expected, max(case.lengths) + D, partials=1, what=str(case))
    for result in results[1:]:
        assert_identical(result, results[0], what="another call")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ATTENDED, ids=str)
def test_paged_attention(case, device):
    everywhere(check_paged_attention, device, case)


def test_every_field_of_the_config_moves():
    moved = {name for case in ATTENDED for name, _ in case.config}
    assert moved == {field.name for field in fields(attention.AttentionConfig)}


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("B", "length"), [(1, 128), (1, 40000), (32, 1024), (128, 128), (300, 50)], ids=lambda value: str(value)
)
def test_paged_attention_of_a_model(B, length):
    for heads in (QWEN, Heads(q_heads=32, kv_heads=4)):
        check_paged_attention("cuda", Attended(heads=heads, lengths=(length,) * (B - 1) + (length - 1,)))


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


def test_heads_that_kv_heads_do_not_share_evenly_are_refused():
    cache, (_, _, _, *rest) = torch.ones(9, 2, 16, 64), layer_arguments()[1]
    check_refused(ops.paged_attention, (torch.ones(1, 3, 64), cache, cache, *rest[:2]), "q has 3 heads and keys 2")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("block_n=48 is not a power of two", {"block_n": 48}),
        ("least=100 is not a multiple of block_n=64", {"least": 100}),
        ("per_sm=0 is not positive", {"per_sm": 0}),
    ],
)
def test_wrong_configs_are_refused(message, field):
    check_refused(lambda: attention.AttentionConfig(**field), (), message)


MUTATIONS = {
    "no barrier": ("wl.gather_stores()", "pass", "missing-barrier"),
    "no release": ('sem="acq_rel"', 'sem="acquire"', "relaxed-order"),
    "no acquire": ('sem="acq_rel"', 'sem="release"', "relaxed-order"),
    "joined by the first": ("== count - 1", "== 0", "race"),
    "arrival counters not put back": ("tl.store(partials.arrivals + pair, 0)", "pass", "divergence"),
    "none": ("", "", None),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_orders_the_partials_is_needed(mutation, tmp_path):
    old, new, finding = MUTATIONS[mutation]
    name = f"mutant_{list(MUTATIONS).index(mutation)}"
    kernels = mutated(split_kv, old, new, f"{name}_kernels", tmp_path)
    mutant = mutated(attention, "from weft.kernels.split_kv", f"from {kernels.__name__}", name, tmp_path)

    def main(team):
        keys, values = SMALL.cache(20, "cpu")
        q = random((1, SMALL.q_heads, SMALL.D), FP32, "cpu", 2)
        pages, lengths = torch.arange(20, dtype=torch.int32)[None], torch.full((1,), 300, dtype=torch.int32)
        tickets, config = torch.zeros(1, dtype=torch.int32), mutant.AttentionConfig(block_n=16, least=16, num_warps=1)
        arguments = q, PagedCache(keys, values), Sequences(pages, lengths), 0.125, tickets, config
        return [mutant.run(*arguments) for _ in range(2)]

    report = weft.check.check(main, 1, schedules=8)
    found = {finding.kind for found in report.findings for finding in (found.finding, *found.also)}
    assert (finding in found) if finding else report.ok, str(report)
