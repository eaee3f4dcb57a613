"""Padded prompts of models with gated delta nets, as CUDA graphs read them: keys, states, tokens are those of plain passes."""

from dataclasses import replace

import pytest
import torch

import weft
from tests.against_transformers import DELTA_NETS
from weft.engine import EngineConfig, SamplingParams
from weft.engine.params import Kind
from weft.engine.pipeline import Pipeline
from weft.engine.prefill import PrefillChunk, Shape, StaticPrefill
from weft.engine.runner import Runner
from weft.models import Decoder

TWO_LAYERS = {"family": "Qwen3Next", **DELTA_NETS, "layer_types": ["linear_attention", "full_attention"]}
TWO_LAYERS |= {"num_hidden_layers": 2, "mlp_only_layers": [0, 1], "initializer_range": 0.2}


def read_of(slot, length):
    generator = torch.Generator().manual_seed(slot)
    tokens = torch.randint(257, (length,), generator=generator).tolist()
    pages = [1 + 3 * slot, 2 + 3 * slot, 3 + 3 * slot]
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=slot)
    return PrefillChunk(slot=slot, tokens=tokens, before=0, pages=pages, params=params, choose=True)


@pytest.mark.parametrize(
    ("lengths", "befores", "shape"),
    [
        ((20, 1, 9), (17, 0, 0), Shape(16, 4)),
        ((5, 12), (0, 0), Shape.of_new(2, 16)),
    ],
    ids=str,
)
def test_padded_prompts_leave_the_states_of_their_tokens(make_checkpoint, monkeypatch, lengths, befores, shape):
    """What comes first is read into both caches as it is. New tensors are NaN."""
    directory, _ = make_checkpoint(**TWO_LAYERS)
    reads = [read_of(slot, length) for slot, length in enumerate(lengths)]
    first = [replace(r, tokens=r.tokens[:n], choose=False) for r, n in zip(reads, befores, strict=True) if n]
    rest = [replace(r, tokens=r.tokens[n:], before=n) for r, n in zip(reads, befores, strict=True)]
    empty = torch.Tensor.new_empty

    def poisoned(x, *sizes, **options):
        made = empty(x, *sizes, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)

    def main(team):
        model = Decoder.from_pretrained(directory, team, mode="replicated", fused=True)
        config = EngineConfig(max_batch=4, page_size=16, pages=16, max_seq_len=48)
        exact, padded = (Runner(model, config) for _ in range(2))
        for runner in (exact, padded):
            if first:
                runner.prefill(first)
        exact.prefill(rest)
        prefill = StaticPrefill(Pipeline.whole(model), padded.cache, shape, max_pages=3)
        prefill.load([])  # as for a capture, which runs it
        prefill.run(Kind.NUCLEUS)
        prefill.load(rest)
        prefill.run(Kind.NUCLEUS)
        return exact.decoding.tokens[: len(rest)], prefill.chosen[: len(rest)], exact.cache, padded.cache

    [(expected, found, exact, padded)] = weft.simulate(main, 1)
    assert torch.equal(found, expected)
    torch.testing.assert_close(padded.data[:, :, 1:], exact.data[:, :, 1:], rtol=1e-4, atol=1e-4)
    for states, those in zip(padded.states.kept, exact.states.kept, strict=True):
        torch.testing.assert_close(states[:, : len(rest)], those[:, : len(rest)], rtol=1e-4, atol=1e-4)
        assert states[:, len(rest) : 4].abs().max() == 0 and states.isfinite().all()


def test_a_capture_leaves_states_as_they_are(make_checkpoint, monkeypatch):
    """It runs the pass several times, on padding; the prompt is loaded for the replay alone."""
    directory, _ = make_checkpoint(**TWO_LAYERS)
    calls = []
    monkeypatch.setattr(StaticPrefill, "load", lambda self, chunks: calls.append(("load", len(chunks))))
    monkeypatch.setattr(StaticPrefill, "run", lambda self, kind, adjustments=None: calls.append("run"))

    def main(team):
        model = Decoder.from_pretrained(directory, team, mode="replicated", fused=True)
        runner = Runner(model, EngineConfig(max_batch=4, page_size=16, pages=16, max_seq_len=48))
        graphs = runner.graphs

        def capture(key, run):
            run()
            graphs._graphs[key] = run

        monkeypatch.setattr(graphs, "capture", capture)
        monkeypatch.setattr(graphs, "replay", lambda key: calls.append("replay"))
        shape = Shape(16, 1)
        runner.prompts._launched[shape] = 9
        for _ in range(2):
            runner.prompts.read([replace(read_of(0, 7), before=16)], cuda_graph=True)
        return calls, runner.prompts.shape_of([read_of(0, 16)]), runner._warm_sizes()

    [(found, shape, sizes)] = weft.simulate(main, 1)
    assert found == [("load", 0), "run", ("load", 1), "replay", ("load", 1), "replay"]
    assert shape == Shape.of_new(1, 16)
    assert max(size.tokens for size, _ in sizes if isinstance(size, Shape)) == 256  # four sequences of 48 tokens


def test_without_kernels_prompts_have_no_graphs(make_checkpoint):
    directory, _ = make_checkpoint(**TWO_LAYERS)

    def main(team):
        model = Decoder.from_pretrained(directory, team, mode="replicated", fused=False)
        runner = Runner(model, EngineConfig(max_batch=2, page_size=16, pages=16, max_seq_len=48))
        return runner.prompts.shape_of([read_of(0, 16)]), [size for size, _ in runner._warm_sizes()]

    [(shape, sizes)] = weft.simulate(main, 1)
    assert shape is None and {*map(type, sizes)} == {int}
