"""Models whose layers are split over stages answer as one rank does, whatever the requests ask for."""

import itertools

import pytest
import torch

import weft
from tests.against_transformers import prompt
from tests.sampled import sampled
from weft.engine import Engine, SamplingParams
from weft.engine.answers import join_pieces
from weft.models.builtin import PATHS

LENGTHS = (3, 41, 17, 1, 30)
DRAWN = {"max_tokens": 4, "temperature": 1.0, "ignore_eos": True}
ASKED = [
    SamplingParams(max_tokens=6, ignore_eos=True),
    SamplingParams(seed=1, top_p=0.9, logprobs=2, **DRAWN),
    SamplingParams(max_tokens=4, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(seed=2, top_k=20, repetition_penalty=1.3, logit_bias={7: 2.0}, **DRAWN),
    SamplingParams(seed=3, min_p=0.05, presence_penalty=0.5, min_tokens=3, **DRAWN),
]
# Fewer batch slots than prompts, chunks that end within them, and microbatches that do so too.
FEW = {"max_batch": 3, "page_size": 16, "chunk_tokens": 24, "microbatch_tokens": 1}


def answers(team, directory, options):
    engine = Engine(directory, team, **FEW | options)
    prompts = [prompt(1, length, seed=length)[0].tolist() for length in LENGTHS]
    found = join_pieces(engine.answer(prompts, ASKED), len(prompts))
    # Once more, behind pages that the first round has left.
    again = engine.generate(prompts[1], max_tokens=4, ignore_eos=True)
    if engine.config.prefix_caching:
        assert engine.batch.scheduler.hit_tokens == 2 * 16
    return len(engine.model.layers), [of(one) for one in (*found, *again)]


def of(completion):
    """Token ids, and numbers of log-probabilities."""
    rows = [*(completion.logprobs or ()), *(completion.prompt_logprobs or ())]
    numbers = [one.logprob for row in rows if row is not None for one in row.values()]
    return completion.token_ids, torch.tensor(numbers)


def check(directory, world_size, node_size, options):
    [(layers, alone)] = weft.simulate(answers, 1, args=(directory, {"mode": "replicated", "chunk_tokens": 4096}))
    for count, found in weft.simulate(answers, world_size, node_size=node_size, args=(directory, options)):
        assert 0 < count < layers
        for (tokens, numbers), (expected, theirs) in zip(found, alone, strict=True):
            assert tokens == expected
            torch.testing.assert_close(numbers, theirs, rtol=1e-4, atol=1e-4)


MODELS = {
    "qwen3": {},
    "llama-tied": {"family": "Llama", "tied": True},
    "experts": {"family": "Qwen3Moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
}
# (ranks, ranks of a node, stages): a stage is a rank, a node, two nodes, half of a node.
SHAPES = [(2, 1, 2), (4, 2, 2), (4, 1, 2), (4, 4, 2), (3, 1, 3), (4, 1, 4)]
SAMPLE = [
    ("qwen3", (4, 2, 2), "replicated"),
    ("llama-tied", (2, 1, 2), "auto"),
    ("qwen3", (4, 1, 4), "replicated"),
    ("experts", (2, 2, 2), "sequence_parallel"),
]


MODES = ("replicated", "sequence_parallel", "reference")


@pytest.mark.parametrize(
    ("model", "shape", "mode"),
    sampled(dict.fromkeys((*SAMPLE, *itertools.product(MODELS, SHAPES, MODES))), lambda *one: one in SAMPLE),
)
def test_stages_answer_as_one_rank(make_checkpoint, plain_ops, model, shape, mode):
    world_size, node_size, stages = shape
    directory, _ = make_checkpoint(**MODELS[model], num_hidden_layers=max(stages, 3))
    check(directory, world_size, node_size, {"pipeline_parallel": stages, "mode": mode})


@pytest.mark.sweep
def test_a_spread_cache_in_each_stage_answers_as_one_rank(make_checkpoint, plain_ops):
    directory, _ = make_checkpoint()
    options = {"pipeline_parallel": 2, "mode": "replicated", "context_parallel": True, "prefix_caching": False}
    check(directory, 4, 2, options)


@pytest.mark.sweep
@pytest.mark.parametrize("shape", [(2, 1, 2), (4, 2, 2)])
def test_sequences_are_preempted_on_all_stages_alike(make_checkpoint, plain_ops, shape):
    """Pages for one prompt and little more."""
    directory, _ = make_checkpoint()
    options = {"pipeline_parallel": shape[2], "mode": "replicated", "prefix_caching": False}
    few = options | {"pages": 6}
    check(directory, *shape[:2], few)

    def preemptions(team):
        engine = Engine(directory, team, **FEW | few)
        engine.generate([[1] * 30, [2] * 30], max_tokens=12, ignore_eos=True)
        return engine.load.preemptions

    assert set(weft.simulate(preemptions, shape[0], node_size=shape[1])) == {1}


def added(team, name, options):
    found = Engine(PATHS[name], team, **options).generate(("123+456=", "7+8="), max_tokens=5)
    return [completion.token_ids for completion in found]


@pytest.mark.sweep
@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("mode", ["replicated", "sequence_parallel"])
@pytest.mark.parametrize("fused", [True, False])
def test_every_recipe_answers_over_two_stages(name, mode, fused):
    [alone] = weft.simulate(added, 1, args=(name, {"mode": "replicated", "fused": False}))
    options = {"mode": mode, "fused": fused, "pipeline_parallel": 2, "microbatch_tokens": 8}
    assert weft.simulate(added, 4, node_size=2, args=(name, options)) == [alone] * 4
