"""Drafts by heads over hidden states: they are those of plain torch, and answers are those without speculation."""

import pytest
import torch
from torch.nn import functional as F

import weft
from tests.engine.conftest import CONFIG
from tests.engine.draft_heads import (
    PlainEagle3,
    PlainMtp,
    Target,
    deeper,
    deepseek,
    drafts_after,
    glm,
    save_eagle3,
    save_mtp,
    sparse,
)
from tests.engine.test_speculative import PROMPTS, Oracle, sequences_of
from tests.fp8_checkpoints import dequantized, quantized, rounded
from weft.engine import Engine, SamplingParams
from weft.models import Qwen3Config
from weft.models.mtp_layouts import LAYOUTS
from weft.runtime.arithmetic import cdiv

K = 3


@pytest.fixture(scope="module")
def target(byte_model, tmp_path_factory):
    return deeper(byte_model, tmp_path_factory.mktemp("deep") / "model", 3)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return save_eagle3(tmp_path_factory.mktemp("head") / "eagle3")


def eagle3(head, **options):
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": K, "adaptive": False} | options


class Watched:
    """A drafter whose drafts are noted, and replaced by an Oracle's, so that runs of any length are accepted."""

    def __init__(self, engine, answers, wrong):
        self.batch, self.verifying = engine.batch, engine.batch.runner.verifying
        self.drafter, self.noted = self.verifying.drafter, []
        self.oracle = None if answers is None else Oracle(self.verifying.graph, answers, wrong)

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, batch, drafts):
        proposed = self.drafter.propose(batch, drafts)
        for slot, sequence in self.batch._drafting.items():
            if sequence is not None and slot < batch and (at := int(self.verifying.graph.slots.positions[slot])) >= 0:
                # Drafts that are verified: a sequence has pages up to its last position.
                self.noted.append((sequence, at, proposed[slot, : max(sequence.last - at, 0)].tolist()))
        return proposed if self.oracle is None else self.oracle.propose(batch, drafts)

    def enter(self, slot, tokens):
        self.drafter.enter(slot, tokens)
        if self.oracle is not None:
            self.oracle.enter(slot, tokens)

    def move(self, moves):
        self.drafter.move(moves)
        if self.oracle is not None:
            self.oracle.move(moves)


def draft(directory, prompts, params, world_size=1, *, speculative=None, answers=None, wrong=5, plant=None, **engine):
    """(completions, drafts noted as (tokens, params, drafts), counts, stats) of every rank."""

    def main(team):
        made = Engine(directory, team, **{"mode": "torch", "page_size": 16, "speculative": speculative, **engine})
        verifying = made.batch.runner.verifying
        if speculative is not None:
            if plant is not None:
                plant(made)
            verifying.drafter = Watched(made, answers, wrong)
        pieces = made.answer(prompts, params)
        completions = weft.engine.answers.join_pieces(pieces, len(prompts))
        while made.has_work:
            made.step()
        if speculative is None:
            return completions, None, None, made.stats
        noted = []
        for sequence, at, proposed in verifying.drafter.noted:
            known = sequence.prompt + sequence.tokens
            if at < len(known):
                noted.append((known[: at + 1], sequence.params, proposed))
        return completions, noted, made.batch.draft_length.counts, made.stats

    return weft.simulate(main, world_size)


def assert_drafted(noted, plain, target):
    """All drafts noted are those of the plain head."""
    assert noted
    for tokens, params, proposed in noted:
        assert proposed == drafts_after(plain, target, tokens, len(proposed), params)


SAMPLING = {"greedy": {}, "temperature": {"temperature": 1.0, "seed": 7}}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_drafts_are_those_of_a_plain_head(target, head, sampling):
    params = [SamplingParams(max_tokens=12, **sampling)] * len(PROMPTS)
    [(plain, *_)] = draft(target, PROMPTS, params)
    answers, reference = sequences_of(PROMPTS, plain), Target(target)
    results = draft(target, PROMPTS, params, speculative=eagle3(head), answers=answers)
    for completions, noted, counts, _ in results:
        assert completions == plain and counts.accepted_tokens > 0
        assert_drafted(noted, PlainEagle3(head, reference), reference)


RECIPES = [
    (2, {}),
    (4, {}),
    (2, {"mode": "sequence_parallel", "fused": False}),
    (2, {"mode": "replicated", "fused": False, "context_parallel": True}),
    (1, {"mode": "auto"}),
    (2, {"mode": "replicated"}),
]


@pytest.mark.parametrize(("world_size", "engine"), RECIPES, ids=str)
def test_all_ranks_and_recipes_draft_alike(target, head, world_size, engine):
    prompts, params = PROMPTS[:2], [SamplingParams(max_tokens=6, temperature=0.7, seed=3)] * 2
    [(plain, *_)] = draft(target, prompts, params)
    answers, reference = sequences_of(prompts, plain), Target(target)
    results = draft(target, prompts, params, world_size, speculative=eagle3(head), answers=answers, **engine)
    for completions, noted, counts, _ in results:
        assert completions == plain and counts.accepted_tokens > 0
        assert_drafted(noted, PlainEagle3(head, reference), reference)
    assert all(noted == results[0][1] for _, noted, *_ in results)


MTP = {"method": "mtp", "num_speculative_tokens": K, "adaptive": False}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.families[0])
def test_drafts_are_those_of_an_mtp_layer_of_transformers(target, tmp_path, layout):
    params = [SamplingParams(max_tokens=9, temperature=0.5, seed=3)] * len(PROMPTS)
    [(plain, *_)] = draft(target, PROMPTS, params)
    head, answers = save_mtp(tmp_path / "with_head", target, layout), sequences_of(PROMPTS, plain)
    reference = Target(target)
    for world_size in (1, 2, 4):
        results = draft(tmp_path / "with_head", PROMPTS, params, world_size, speculative=MTP, answers=answers)
        for completions, noted, counts, _ in results:
            assert completions == plain and counts.accepted_tokens > 0
            assert_drafted(noted, PlainMtp(reference, head), reference)


class PlainMtpInFp8(PlainMtp):
    """Chooses by the model's head in blocks of fp8, which begin at each rank's first token id."""

    def __init__(self, target, tensors, world_size):
        super().__init__(target, tensors)
        parts = target.head.split(cdiv(len(target.head), world_size))
        self.head = torch.cat([dequantized(*quantized(part, "block"), "block") for part in parts])

    def rows(self, tokens, hidden):
        x, _ = super().rows(tokens, hidden)
        return x, F.linear(rounded(x, 128, None), self.head).float()


@pytest.mark.parametrize(("world_size", "prompts", "engine"), [(1, 4, {}), (2, 1, {"mode": "replicated"})])
def test_an_mtp_head_drafts_by_a_copy_of_the_head_in_fp8(target, tmp_path, world_size, prompts, engine):
    prompts, params = PROMPTS[:prompts], [SamplingParams(max_tokens=9, temperature=0.5, seed=3)] * prompts
    [(plain, *_)] = draft(target, prompts, params)
    tensors, answers = save_mtp(tmp_path / "with_head", target, LAYOUTS[0]), sequences_of(prompts, plain)
    reference, given = Target(target), {"speculative": MTP | {"draft_head": "fp8"}, "answers": answers, **engine}
    head, of_model = PlainMtpInFp8(reference, tensors, world_size), PlainMtp(reference, tensors)
    for completions, noted, counts, _ in draft(tmp_path / "with_head", prompts, params, world_size, **given):
        assert completions == plain and counts.accepted_tokens > 0
        assert_drafted(noted, head, reference)
        by_model = [drafts_after(of_model, reference, tokens, len(of), one) for tokens, one, of in noted]
        assert world_size > 1 or by_model != [of for _, _, of in noted], "some drafts are others"


@pytest.mark.parametrize(("quantization", "scheme"), [(None, None), ("fp8", "block"), ("fp8_per_channel", "channel")])
def test_an_mtp_layer_is_quantized_as_it_is_read(target, tmp_path, quantization, scheme):
    tensors = save_mtp(tmp_path / "model", target, LAYOUTS[0])

    def main(team):
        options = {"mode": "reference", "page_size": 16, "quantization": quantization}
        engines = [Engine(tmp_path / "model", team, speculative=one, **options) for one in (None, MTP)]
        answers = [[one.token_ids for one in engine.generate([[5, 9, 200]] * 2, max_tokens=9)] for engine in engines]
        return answers, engines[1].batch.runner.verifying.drafter.head.body.layers[0].mlp.weights.down

    for (plain, drafting), down in weft.simulate(main, 1):
        wanted = tensors["mtp_block.mlp.down_proj.weight"]
        if scheme is not None:
            assert down.data.dtype == torch.float8_e4m3fn
            wanted, down = dequantized(*quantized(wanted, scheme), scheme).float(), down.dequantized(torch.float32)
        assert plain == drafting and torch.equal(down, wanted)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_random_mtp_layer_has_the_format_of_the_models_layers(quantization):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = Qwen3Config.from_dict(CONFIG | sizes | {"head_dim": 64, "torch_dtype": "bfloat16"})

    def main(team):
        options = {"mode": "reference", "page_size": 16, "quantization": quantization}
        answers, heads = [], []
        for speculative in (None, MTP):
            engine = Engine(model, team, speculative=speculative, **options)
            answers.append([one.token_ids for one in engine.generate([[5, 9, 200]] * 2, max_tokens=6)])
            heads.append(engine.batch.runner.verifying and engine.batch.runner.verifying.drafter.head)
        return answers, [x.dtype for x in heads[1].body.parameters() if x.ndim == 2], heads[1].eh_proj.dtype

    for (plain, drafting), matrices, joining in weft.simulate(main, 2):
        assert plain == drafting and joining == torch.bfloat16
        assert (torch.float8_e4m3fn in matrices) == (quantization == "fp8")
        assert (torch.bfloat16 in matrices) == (quantization is None)


@pytest.mark.parametrize(
    ("family", "world_size", "engine"),
    [
        (sparse, 2, {"mode": "sequence_parallel", "fused": False}),
        (sparse, 2, {"mode": "replicated"}),
        (sparse, 4, {}),
        (glm, 2, {}),
        (deepseek, 2, {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_mtp_heads_of_mixtures_of_experts(byte_model, tmp_path, family, world_size, engine):
    directory = family(byte_model, tmp_path / "bare")
    prompts, params = PROMPTS[:2], [SamplingParams(max_tokens=5, temperature=0.5, seed=3)] * 2
    [(plain, *_)] = draft(directory, prompts, params)
    head, answers = save_mtp(tmp_path / "head", directory, LAYOUTS[0]), sequences_of(prompts, plain)
    reference = Target(directory)
    results = draft(tmp_path / "head", prompts, params, world_size, speculative=MTP, answers=answers, **engine)
    for completions, noted, counts, _ in results:
        assert completions == plain and counts.accepted_tokens > 0
        assert_drafted(noted, PlainMtp(reference, head), reference)
