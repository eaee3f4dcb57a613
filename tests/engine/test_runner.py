"""The runner: prompts padded or as they are, buckets with empty slots, rows that the device already knows."""

import weakref
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import weft
import weft.engine.prompts as prompts_module
import weft.engine.runner as runner_module
import weft.engine.sizes as sizes_module
from weft.console import layout_of
from weft.costs.gpu import named
from weft.engine.config import EngineConfig
from weft.engine.graphs import Graphs
from weft.engine.params import Kind, SamplingParams
from weft.engine.pipeline import Pipeline
from weft.engine.prefill import PrefillChunk, StaticPrefill
from weft.engine.prompts import (
    Gathering,
    Shape,
    gathering_shapes,
    prompt_shapes,
    ragged_shape_of,
    shape_of_new,
    single_lengths,
)
from weft.engine.runner import Runner
from weft.engine.sizes import affordable_pages, decode_buckets
from weft.engine.slots import SlotState
from weft.models import Qwen3ForCausalLM

SAMPLE = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
ONE_PAGE = SimpleNamespace(data=torch.zeros(100), states=None)  # 400 bytes


def on_one_rank(main, directory, fused=False):
    def rank(team):
        mode = "gemm_ar" if fused else "torch"
        return main(Qwen3ForCausalLM.from_pretrained(directory, team, mode=mode, fused=fused))

    return weft.simulate(rank, 1)[0]


def prompt(length, seed=0):
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reads_of(*lengths, params=SAMPLE):
    """Prompts of these lengths at slots 0, 1, …, each with pages of its own, in falling order."""
    return [
        PrefillChunk(
            slot=slot,
            tokens=prompt(length, slot),
            before=0,
            pages=list(range(6 * (slot + 1), 6 * slot, -1)),
            params=params,
            choose=True,
        )
        for slot, length in enumerate(lengths)
    ]


def new_runner(model, max_batch=8):
    return Runner(model, EngineConfig(max_batch=max_batch, page_size=16, max_seq_len=96, pages=49))


@pytest.mark.parametrize("fused", [False, True])
def test_chunks_that_cudnn_attends_to_in_parts_have_no_graph(one_layer, monkeypatch, fused):
    """By the number of cached tokens and of rows, which a graph would hold; each chunk of a pass must be one of them."""
    limits = replace(named("h200").limits, cudnn_rows=1, cudnn_cached=32)
    monkeypatch.setattr("weft.engine.prompts.limits_of", lambda team: limits)
    monkeypatch.setattr("weft.parallel.step.takes_cached", lambda *given: True)
    reads = [continued(read, before) for read, before in zip(reads_of(48, 48), (32, 31), strict=True)]

    def main(model):
        runner = new_runner(model)
        return [runner.prompts.attends_in_parts(chunks) for chunks in (reads[:1], reads[1:], reads, reads_of(48))]

    assert on_one_rank(main, one_layer, fused=fused) == [fused, False, False, False]


def test_shapes_pad_little():
    def shape(*lengths):
        return shape_of_new(reads_of(*lengths))

    assert shape(1) == Shape.of_new(1, 16)
    assert shape(100) == Shape.of_new(1, 128)
    assert shape(7, 16, 3) == Shape.of_new(4, 16)
    assert shape(*[64] * 32) == Shape.of_new(32, 64)
    assert shape(90, 1, 1) is None  # 4 x 128 for 92 tokens
    assert shape_of_new([continued(reads_of(17)[0], 16)]) is None


def test_single_prompts_have_the_shapes_that_pad_them_little():
    for most in (1, 16, 17, 200, 300, 500, 4096, 5000):
        used = {
            shape.length
            for length in range(1, most + 1, 1 + most // 200)
            if (shape := shape_of_new(reads_of(length))) is not None
        }
        assert single_lengths(most) == sorted(used)


def test_ragged_shapes_pad_little():
    def shape(*lengths, max_batch=64):
        return ragged_shape_of(reads_of(*lengths), max_batch)

    assert shape(1) == Shape(16, 1) != Shape.of_new(16, 1)
    assert shape(7, 16, 3) == Shape(32, 8)
    assert shape(90, 1, 1, max_batch=6) == Shape(128, 6)
    assert shape(*[64] * 33) == Shape(2304, 64)
    assert shape(*[1] * 65, max_batch=512) == Shape(128, 512)
    sizes = [shape(tokens).tokens for tokens in range(1, 10_000)]
    assert all(size >= tokens for tokens, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert all(size % 128 == 0 for size in sizes if size > 128)
    for above, padding in ((16, 2), (256, 1.5), (1024, 1.125)):
        assert all(size < padding * (tokens + 1) for tokens, size in enumerate(sizes, 1) if tokens > above)
    assert len(set(sizes)) == 37


def test_captured_shapes_hold_every_chunk_and_pad_little():
    for chunk_tokens, max_batch in ((1, 1), (40, 3), (700, 64), (4096, 200)):
        shapes = prompt_shapes(chunk_tokens, max_batch, [16])
        assert shapes == sorted(shapes, key=lambda shape: (shape.tokens, shape.batch), reverse=True)
        for tokens in range(1, chunk_tokens + 1, 1 + chunk_tokens // 100):
            for batch in {1, min(tokens, max_batch)}:
                held = [s for s in shapes if s.length is None and s.tokens >= tokens and s.batch >= batch]
                assert held[-1].tokens == ragged_shape_of(reads_of(tokens), 1).tokens
    assert len(shapes) == 1 + 2 * 27 - 3, "two numbers of sequences, one where there are no more than 64 tokens"


def test_decode_buckets_lie_closer_where_rows_cost_time():
    assert decode_buckets(1) == [1] and decode_buckets(64) == [1, 2, 4, 8, 16, 32, 64]
    assert decode_buckets(100) == [1, 2, 4, 8, 16, 32, 64, 96, 100]
    assert decode_buckets(600)[6:] == [64, 96, 128, 256, 384, 512, 600]
    large = decode_buckets(5000)[9:]
    assert all(size % 128 == 0 for size in large[:-1]) and len(large) == 16
    assert all(size <= 1.5 * before for before, size in pairwise(large))


def test_memory_of_graphs_is_reserved_before_the_pages(byte_model, monkeypatch):
    """The first of 2 x 9 graphs takes 700 bytes, each other 10; the trial's are given back."""
    free = [100_000, 99_300, 99_290, 100_000]
    monkeypatch.setattr(runner_module, "free_bytes", lambda device: free.pop(0))
    monkeypatch.setattr(Runner, "_warm", lambda self, size, kind: self.graphs._graphs.update({(size, kind): "trial"}))

    def main(model):
        runner = new_runner(model, max_batch=2)
        runner.prompts.chunk_tokens = 64
        sizes = runner._warm_sizes()
        made = []
        monkeypatch.setattr(
            model, "new_cache", lambda *given, new=model.new_cache: made.append(new(*given)) or made[-1]
        )
        reserved = runner._graph_bytes()
        trial = weakref.ref(made.pop())
        assert not len(runner.graphs) and trial() is None
        device = SimpleNamespace(device=torch.device("cuda"), exchange=lambda pages: [pages])
        monkeypatch.setattr(sizes_module, "memory_of", lambda device: (free.pop(0), 1 << 40))
        return sizes, reserved, affordable_pages(ONE_PAGE, EngineConfig(memory_fraction=0.5), device, reserved, 0)

    sizes, reserved, pages = on_one_rank(main, byte_model, fused=True)
    assert [size for size, kind in sizes if kind == Kind.GREEDY] == [
        *(Shape(tokens, 2) for tokens in (64, 32, 16)),
        2,
        1,
    ]
    assert reserved == 700 + 10 * (len(sizes) - 1) and pages == int((100_000 - reserved) * 0.5) // 400


def test_without_fused_kernels_single_prompts_are_captured(byte_model):
    def main(model):
        return [size for size, kind in new_runner(model, max_batch=2)._warm_sizes() if kind == Kind.GREEDY]

    assert on_one_rank(main, byte_model) == [*(Shape.of_new(1, length) for length in (128, 64, 32, 16)), 2, 1]


def continued(read, before):
    """`read` without its first tokens."""
    return replace(read, tokens=read.tokens[before:], before=before)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("lengths", "shape"),
    [((5, 16, 9), Shape.of_new(4, 16)), pytest.param((94,), Shape.of_new(1, 128), marks=pytest.mark.sweep)],
    ids=str,
)
def test_padded_prompts_are_read_as_they_are(byte_model, lengths, shape, fused):
    """The model has 96 positions: the padding of the last shape has none."""
    reads, count = reads_of(*lengths), len(lengths)
    assert shape_of_new(reads) == shape

    def main(model):
        runner = new_runner(model)
        runner.prefill(reads)
        prefill = StaticPrefill(Pipeline.whole(model), model.new_cache(49, 16), shape, max_pages=6)
        prefill.cache.data[:, :, 0] = 50.0
        prefill.load(reads)
        prefill.run(Kind.NUCLEUS)
        return runner.decoding.tokens[:count], prefill.chosen[:count], runner.cache.data, prefill.cache.data

    expected, found, expected_cache, cache = on_one_rank(main, byte_model, fused)
    assert torch.equal(found, expected)
    torch.testing.assert_close(cache[:, :, 1:], expected_cache[:, :, 1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("lengths", "befores", "shape"),
    [
        ((5, 16, 9), (0, 0, 0), (32, 8)),
        pytest.param((94,), (0,), (128, 1), marks=pytest.mark.sweep),
        pytest.param((94, 1, 70), (40, 0, 69), (64, 8), marks=pytest.mark.sweep),
        ((90,), (80,), (16, 1)),
        pytest.param((16,), (0,), (16, 1), marks=pytest.mark.sweep),
        pytest.param((4,) * 8, (0,) * 8, (32, 8), marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_ragged_prompts_are_read_as_they_are(one_layer, lengths, befores, shape):
    """What comes first is read into both caches as it is. All chunks but the second have a token chosen."""
    reads = reads_of(*lengths)
    first = [replace(r, tokens=r.tokens[:n], choose=False) for r, n in zip(reads, befores, strict=True) if n]
    rest = [continued(r, n) for r, n in zip(reads, befores, strict=True)]
    rest[1:2] = [replace(r, choose=False) for r in rest[1:2]]
    assert ragged_shape_of(rest, 8) == Shape(*shape)
    chosen = [index for index, read in enumerate(rest) if read.choose]

    def main(model):
        runners = [new_runner(model) for _ in range(2)]
        for runner in runners:
            if first:
                runner.prefill(first)
        exact, padded = runners
        exact.prefill(rest)
        padded.cache.data[:, :, 0] = 50.0
        prefill = StaticPrefill(Pipeline.whole(model), padded.cache, Shape(*shape), max_pages=6)
        prefill.load(reads_of(15))  # what was read before leaves nothing behind
        prefill.load(rest)
        prefill.run(Kind.NUCLEUS)
        return exact.decoding.tokens[: len(rest)], prefill.chosen[: len(rest)], exact.cache.data, padded.cache.data

    expected, found, expected_cache, cache = on_one_rank(main, one_layer, fused=True)
    assert torch.equal(found[chosen], expected[chosen])
    torch.testing.assert_close(cache[:, :, 1:], expected_cache[:, :, 1:], rtol=1e-4, atol=1e-4)
    assert (cache[:, :, 0] == 50.0).all()


@pytest.mark.parametrize(
    ("lengths", "befores", "shape"),
    [
        ((20, 1, 19), (17, 0, 16), Shape(16, 8, 2)),
        pytest.param((70, 1, 41), (40, 0, 33), Shape(64, 8, 4), marks=pytest.mark.sweep),
        pytest.param((90,), (80,), Shape(16, 1, 4), marks=pytest.mark.sweep),
        ((9,), (0,), Shape.of_new(1, 16)),
    ],
    ids=str,
)
def test_prompts_of_a_spread_cache_are_read_as_they_are(one_layer, monkeypatch, lengths, befores, shape):
    """Chunks begin and end within pages of both ranks. New tensors are NaN."""
    empty = torch.Tensor.new_empty

    def poisoned(x, *sizes, **options):
        made = empty(x, *sizes, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    reads = reads_of(*lengths)
    first = [replace(r, tokens=r.tokens[:n], choose=False) for r, n in zip(reads, befores, strict=True) if n]
    rest = [continued(r, n) for r, n in zip(reads, befores, strict=True)]

    def main(team):
        model = Qwen3ForCausalLM.from_pretrained(one_layer, team, mode="replicated", fused=True, context_parallel=True)
        exact, padded = (new_runner(model) for _ in range(2))
        assert (shape_of_new(rest) or ragged_shape_of(rest, 8, exact.prompts.gathering)) == shape
        if first:
            exact.prefill(first)
        padded.cache.data.copy_(exact.cache.data)
        exact.prefill(rest)
        padded.cache.data[:, :, 0] = 50.0
        prefill = padded.prompts.static(shape)
        prefill.load(reads_of(15))  # what was read before leaves nothing behind
        prefill.load(rest)
        prefill.run(Kind.NUCLEUS)
        return exact.decoding.tokens[: len(rest)], prefill.chosen[: len(rest)], exact.cache.data, padded.cache.data

    for expected, found, expected_cache, cache in weft.simulate(main, 2):
        assert torch.equal(found, expected)
        torch.testing.assert_close(cache[:, :, 1:], expected_cache[:, :, 1:], rtol=1e-4, atol=1e-4)
        assert (cache[:, :, 0] == 50.0).all()


def test_many_gathered_pages_have_no_graph():
    [read] = reads_of(4000)
    reads = [continued(replace(read, tokens=read.tokens * 2), before) for before in (63, 64 * 32, 64 * 32 + 1)]
    gathering = Gathering(32, 2 << 20)
    assert [ragged_shape_of([read], 8, gathering) for read in reads[1:]] == [Shape(6144, 1, 64), None]
    assert [ragged_shape_of([read], 8).entries for read in reads] == [0, 0, 0]
    assert ragged_shape_of(reads[:1], 8, gathering).entries == 2
    assert ragged_shape_of(reads[2:], 8, gathering._replace(window=65)).entries == 4  # from token 1985 on: 3 entries


def test_few_shapes_gather_and_hold_every_chunk():
    gathering = Gathering(512, 512 * 512)  # a KV head of 128 in 16 bits, pages of 64 tokens on 8 ranks
    shapes = gathering_shapes(4096, 64, gathering, 80)
    assert shapes == sorted(shapes, key=lambda shape: (shape.tokens, shape.batch, shape.entries), reverse=True)
    assert sorted({shape.entries for shape in shapes}) == [8, 16, 32, 64, 80] and len(shapes) == 5 * 17
    assert max(shape.entries for shape in gathering_shapes(4096, 64, gathering, 1000)) == 512  # 128 MiB
    sizes = sorted({shape.tokens for shape in shapes})
    assert {128, 1024, 4096} <= set(sizes) and all(b <= (1.25 if a >= 1024 else 2) * a for a, b in pairwise(sizes))
    assert gathering_shapes(40, 4, Gathering(32, 4096), 3) == [Shape(size, 4, 3) for size in (64, 32, 16)]


def test_after_a_warm_up_prompts_behind_cached_tokens_run_in_graphs(one_layer, monkeypatch):
    """Here a replay is the pass itself. Sampling of the second kind serves greedy requests too."""
    replayed, warmed = [], []

    def capture(self, key, run):
        self._graphs[key] = SimpleNamespace(replay=lambda: self in warmed and (replayed.append(key), run()))

    monkeypatch.setattr(Graphs, "capture", capture)
    reads = reads_of(40, 20, params=SamplingParams())
    parts = [[replace(reads[0], tokens=reads[0].tokens[:30], choose=False)], [continued(reads[0], 30), reads[1]]]
    config = EngineConfig(max_batch=2, page_size=16, max_seq_len=96, pages=13, chunk_tokens=32)

    def main(team):
        model = Qwen3ForCausalLM.from_pretrained(one_layer, team, mode="replicated", fused=True, context_parallel=True)
        exact, warm = Runner(model, config), Runner(model, config)
        warm.cuda_graph = True
        warm.warm_up()
        warmed.append(warm.graphs)
        for runner in (exact, warm):
            for part in parts:
                runner.prefill(part)
        return exact.decoding.tokens, warm.decoding.tokens

    for expected, found in weft.simulate(main, 2):
        assert torch.equal(found, expected)
    assert replayed[-2:] == [(Shape(32, 2, 3), Kind.TRUNCATED)] * 2
    assert [size.entries for size, _ in replayed] == [0, 0, 3, 3]


def test_shapes_that_come_again_are_captured(one_layer, monkeypatch):
    """Here a capture is the pass itself: what is captured gives the tokens of what is not."""
    captured = []
    monkeypatch.setattr(Graphs, "run", lambda self, key, run: (captured.append(key), run()))
    monkeypatch.setattr(prompts_module, "RAGGED_FIRST", 2)

    def main(model):
        runner, other = new_runner(model), new_runner(model)
        runner.cuda_graph = True
        found = []
        # New prompts of about one length; others, behind what is cached, and of as many tokens.
        for first, lengths in (
            ((), (14, 16)),
            ((), (16, 9)),
            ((30,), (34,)),
            ((40,), (50,)),
            ((90,), (96,)),
            ((30, 8), (33, 9)),
            ((), (13, 15)),
        ):
            for each in (runner, other):
                if first:
                    each.prefill([replace(r, choose=False) for r in reads_of(*first)])
                each.prefill([continued(r, n) for r, n in zip(reads_of(*lengths), first or (0, 0), strict=True)])
                found.append(each.decoding.tokens[: len(lengths)].clone())
        return found

    found = on_one_rank(main, one_layer, fused=True)
    assert all(torch.equal(*pair) for pair in zip(found[::2], found[1::2], strict=True))
    new, continuing = (Shape.of_new(2, 16), Kind.NUCLEUS), (Shape(16, 1), Kind.NUCLEUS)
    assert captured == [new, continuing, new]
    captured.clear()
    assert on_one_rank(main, one_layer) and captured == [new] * 2, "unfused attention knows its sequences on the host"


def test_graphs_of_prompts_are_kept_for_the_shapes_that_came_last(byte_model, monkeypatch):
    monkeypatch.setattr(Graphs, "run", lambda self, key, run: (self._graphs.setdefault(key, len(key)), run()))
    monkeypatch.setattr(prompts_module, "MOST_SHAPES", 2)

    def main(model):
        runner, kept = new_runner(model), []
        runner.cuda_graph = True
        runner.graphs._graphs[4, Kind.GREEDY] = "of a decode step"
        for tokens in (16, 16, 32, 32, 16, 64, 64, 32, 32):
            runner.prefill(reads_of(tokens))
            assert len(runner.prompts._recent) == len(runner.graphs) - 1
            kept.append([shape.length for shape in runner.prompts._recent])
        return kept, (4, Kind.GREEDY) in runner.graphs

    kept, still = on_one_rank(main, byte_model)
    # 32 went when 64 came, since 16 had come again; and is launched as it is before it is captured again.
    assert kept == [[], [16], [16], [16, 32], [32, 16], [32, 16], [16, 64], [16, 64], [64, 32]] and still


@pytest.mark.parametrize("fused", [False, True])
def test_empty_slots_of_a_bucket_change_nothing(one_layer, fused):
    reads = reads_of(5, 16, 9)

    def main(model):
        found = []
        for bucket in (3, 4, 8):
            runner = new_runner(model)
            runner.prefill(reads)
            runner.slots.send(
                {
                    read.slot: SlotState(position=len(read.tokens), pages=read.pages, params=read.params)
                    for read in reads
                }
            )
            tokens = []
            for _ in range(2):
                runner.replay(bucket, Kind.NUCLEUS)
                tokens.append(runner.decoding.tokens[:3].clone())
            found.append((torch.stack(tokens), runner.slots.positions.clone(), runner.cache.data[:, :, 1:]))
        return found

    exact, *padded = on_one_rank(main, one_layer, fused)
    for tokens, positions, cache in padded:
        assert torch.equal(tokens, exact[0])
        assert positions.tolist() == [7, 18, 11] + [-1] * 5
        torch.testing.assert_close(cache, exact[2], rtol=1e-4, atol=1e-4)


def test_a_page_table_in_another_order_gives_the_same_tokens(byte_model):
    def main(model):
        found = []
        for order in (lambda pages: pages, lambda pages: pages[::-1], lambda pages: pages[3:] + pages[:3]):
            runner = new_runner(model)
            [read] = reads_of(40)
            pages = order(read.pages)
            runner.prefill(
                [PrefillChunk(slot=0, tokens=read.tokens, before=0, pages=pages, params=SAMPLE, choose=True)]
            )
            tokens = []
            for step in range(20):
                if step == 0:
                    runner.slots.send({0: SlotState(position=40, pages=pages, params=SAMPLE)})
                runner.decode(1, SAMPLE.kind)
                tokens.append(runner.decoding.tokens[0].item())
            found.append(tokens)
        return found

    first, *others = on_one_rank(main, byte_model)
    assert all(other == first for other in others) and len(set(first)) > 5


def test_buckets_are_powers_of_two_and_the_whole_batch(byte_model):
    def main(model):
        runner = new_runner(model, max_batch=6)
        return runner.buckets.sizes, [runner.buckets.of(batch) for batch in (1, 2, 3, 5, 6)]

    assert on_one_rank(main, byte_model) == ([1, 2, 4, 6], [1, 2, 4, 6, 6])


def test_padding_is_read_in_sizes_up_to_a_full_chunk_and_only_page_0_changes(byte_model):
    def main(model):
        runner, sizes = new_runner(model), []
        runner.pipeline.model.hidden = lambda tokens, *rest: sizes.append(len(tokens)) or hidden(tokens, *rest)
        hidden = Qwen3ForCausalLM.hidden.__get__(model)
        before = runner.cache.data.clone()
        runner.run_padding(300)
        return sizes, (runner.cache.data != before).flatten(3).any(3).any(0).any(0)

    sizes, changed = on_one_rank(main, byte_model)
    assert sizes == [256, 300]
    assert changed.nonzero().tolist() == [[0]]


def test_memory_that_torch_holds_unused_counts_for_the_cache(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(9_000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000 + sum(emptied), 1 << 40))
    team = SimpleNamespace(device=torch.device("cuda"), exchange=lambda pages: [pages, 1_000])
    assert affordable_pages(ONE_PAGE, EngineConfig(memory_fraction=0.8), team, 0, 0) == 20


def test_all_ranks_have_the_pages_that_fit_where_least_is_free(monkeypatch):
    free = [70_000, 30_000, 50_000]
    monkeypatch.setattr(sizes_module, "memory_of", lambda device: (free[device.index], 1 << 40))

    def main(team, fraction):
        on_gpu = SimpleNamespace(device=torch.device("cuda", team.rank), exchange=team.exchange)
        return affordable_pages(ONE_PAGE, EngineConfig(memory_fraction=fraction), on_gpu, 0, 0)

    # Of 400 bytes each.
    assert weft.simulate(main, 3, args=(1.0,)) == [75] * 3
    assert weft.simulate(main, 3, args=(0.4,)) == [30] * 3


def test_the_cache_is_no_larger_than_memory_or_all_slots_can_fill(byte_model, monkeypatch):
    def main(model):
        page = model.new_cache(1, 16).data.nbytes
        found = []
        for memory in (10 * page - 1, 10 * page, 1000 * page):
            monkeypatch.setattr(sizes_module, "VIRTUAL_CACHE_BYTES", memory)
            found.append(Runner(model, EngineConfig(max_batch=3, page_size=16, max_seq_len=90)).cache.pages)
        return found

    assert on_one_rank(main, byte_model) == [9, 10, 1 + 3 * 6]  # 90 tokens take six pages


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="max_batch=0 is not a positive integer"):
        EngineConfig(max_batch=0)
    with pytest.raises(ValueError, match="pages=1 is less than 2"):
        EngineConfig(pages=1)
    with pytest.raises(ValueError, match="algorithm_cache=3 is not the path of a file"):
        EngineConfig(algorithm_cache=3)
    with pytest.raises(ValueError, match=r"memory_fraction=1.5 is not in \(0, 1\]"):
        EngineConfig(memory_fraction=1.5)
    for page_size in (24, 0, -16):
        with pytest.raises(ValueError, match=f"page_size={page_size} is not one of 16, 32, 64, 128, 256"):
            EngineConfig(page_size=page_size)


def test_layouts_of_experts_are_checked_before_a_model_is_made(byte_model):
    for layout in ("whole", "slices", (2, 4), None):
        assert EngineConfig(expert_layout=layout).expert_layout == layout
    assert [layout_of(text) for text in ("2x4", "slices", None)] == [(2, 4), "slices", None]
    for layout, message in (
        ("2x", "expert_layout='2x' is not one of 'whole', 'slices' or"),
        ((2, 0), "is not \\(ep, tp\\)"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(expert_layout=layout)

    def main(team):
        with pytest.raises(ValueError, match="expert_layout='whole', but this model has no experts; leave it out"):
            Qwen3ForCausalLM.from_pretrained(byte_model, team, expert_layout="whole")

    weft.simulate(main, 1)


def test_options_are_the_config_s_and_unknown_ones_are_named(byte_model):
    config = EngineConfig(mode="torch", max_batch=3, page_size=16)

    def main(team):
        engine = weft.Engine(byte_model, team, config=config, max_batch=2)
        assert engine.config == replace(config, max_batch=2, max_seq_len=96)  # the model's
        with pytest.raises(TypeError, match="max_bacth= is not an option .*; the options are invariant, mode, dtype, "):
            weft.Engine(byte_model, team, max_bacth=2)

    weft.simulate(main, 1)
    with pytest.raises(TypeError, match="max_bacth= is not an option"):
        weft.LLM(byte_model, 1, device="sim", max_bacth=2)
    with pytest.raises(ValueError, match="config='fast' is not an EngineConfig"):
        weft.LLM(byte_model, 1, device="sim", config="fast")
