"""An answer for which no token can be chosen ends with an error that says why, and the others go on."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from tests.engine.test_sampling import choose
from weft.engine import Engine, SamplingParams, StructuredOutputsParams
from weft.engine.answers import join_pieces
from weft.engine.kv_cache import PagePool
from weft.engine.params import Kind
from weft.ops.vocab.sample_argmax import EXCLUDED, NOT_FINITE

INF, NAN = float("inf"), float("nan")
# Behind this token the overflowing model's logits are NaN.
BREAKS = 7


@pytest.fixture(scope="session")
def overflowing(one_layer, tmp_path_factory):
    """The byte model of one layer in fp16, with finite weights: of token BREAKS alone the MLP's activations overflow."""
    directory = shutil.copytree(one_layer, tmp_path_factory.mktemp("overflowing") / "copy")
    config = json.loads((directory / "config.json").read_text()) | {"torch_dtype": "float16"}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    layer = "model.layers.0"
    embedding = tensors["model.embed_tokens.weight"]
    # The first feature is that of the token, which the layer changes in no other.
    embedding[:, 0] = 0.0
    embedding[BREAKS, 0] = 50.0
    tensors[f"{layer}.self_attn.o_proj.weight"][0] = 0.0
    tensors[f"{layer}.mlp.down_proj.weight"][0] = 0.0
    tensors["lm_head.weight"][:, 0] = 0.0
    for name in ("gate_proj", "up_proj"):
        tensors[f"{layer}.mlp.{name}.weight"][:, 0] = 1000.0
    tensors = {name: tensor.half() for name, tensor in tensors.items() if "layers.1" not in name}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    save_file(tensors, directory / "model.safetensors")
    return directory


def rows():
    """Logits of which some rows have nothing to choose, and what each gives; None: as without those rows."""
    logits = torch.randn(8, 101, generator=torch.Generator().manual_seed(1)) * 3
    logits[1, 70], logits[2, 5], logits[3, 100] = NAN, -NAN, INF
    logits[4] = -INF
    logits[5] = NAN
    logits[6, :50] = logits[6, 51:] = -INF
    logits[6, 50] = NAN
    return logits, [None, *[NOT_FINITE.value] * 3, EXCLUDED.value, *[NOT_FINITE.value] * 2, None]


@pytest.mark.parametrize(("world_size", "fused"), [(1, False), (3, False), (2, True)])
def test_rows_without_a_token_to_choose_are_told_apart_in_every_kind(world_size, fused):
    """Of NaN either sign, also where the other ranks have none and where truncation would leave it out."""
    logits, expected = rows()
    words = {"top_p": 0.9, "top_k": 20, "min_p": 0.1}
    seeds = torch.arange(8)
    for kind in (Kind.GREEDY, Kind.SAMPLED, Kind.NUCLEUS, Kind.TRUNCATED):
        found = choose(logits, 0.7, **words, seed=seeds, kind=kind, world_size=world_size, fused=fused).tolist()
        healthy = torch.where(logits.isfinite(), logits, 0.0)
        plain = choose(healthy, 0.7, **words, seed=seeds, kind=kind).tolist()
        assert found == [other if one is None else one for one, other in zip(expected, plain, strict=True)]


def answers_on(team, directory, prompts, params, engine):
    """Completions, and that of the first prompt asked for again, when none of its pages may be shared; no page is lost."""
    made = Engine(directory, team, **{"mode": "reference", "page_size": 16, **engine})
    first = join_pieces(made.answer(prompts, params), len(prompts))
    again = join_pieces(made.answer(prompts[:1], params[:1]), 1)
    assert again[0].error is None or made.stats.hit_tokens == 0
    assert made.batch.scheduler.pool.free == made.batch.scheduler.pool.capacity
    return first, again


def answered(directory, world_size, prompts, params, engine):
    """What `answers_on` finds on every rank alike, in processes on GPUs if the engine has CUDA graphs."""
    given = directory, prompts, params, engine
    if "cuda_graph" in engine:
        results = weft.launch(answers_on, world_size, "cuda", args=given)
    else:
        results = weft.simulate(answers_on, world_size, args=given)
    assert all(result == results[0] for result in results)
    return results[0]


HEALTHY = ["a prompt", [10, 20, 30]]
PLAIN = SamplingParams(max_tokens=4, ignore_eos=True)


def broken():
    """Prompts and parameters of requests whose logits are not finite, and how many tokens come before."""
    ends = {"max_tokens": 4, "ignore_eos": True}
    forced = {**ends, "logit_bias": {BREAKS: 100.0}}
    yield [*range(20, 50), BREAKS], PLAIN, 0
    yield [3, 4], SamplingParams(**forced), 1
    yield [3, 4], SamplingParams(**forced, temperature=1.0, top_p=0.9, logprobs=2), 1
    yield [3, 4], SamplingParams(**forced, temperature=1.0, top_k=5), 1
    yield [3, BREAKS], SamplingParams(**ends, logprobs=1, temperature=0.5), 0
    yield [BREAKS, 3], SamplingParams(**ends, prompt_logprobs=1), 0
    yield [3, BREAKS], SamplingParams(**ends, structured_outputs=StructuredOutputsParams(regex="[a-z]+")), 0


@pytest.mark.parametrize(
    ("world_size", "first", "engine"),
    [
        (1, 0, {"max_batch": 3}),
        (2, 0, {"pipeline_parallel": 2, "max_batch": 16}),
        (1, 3, {"mode": "replicated", "max_batch": 16, "fused": True}),
        *(
            pytest.param(world_size, 0, {"mode": mode, "cuda_graph": True}, marks=pytest.mark.gpu(world_size))
            for world_size in (1, 2)
            for mode in ("replicated", "sequence_parallel")
        ),
    ],
    ids=lambda value: value.get("mode", "stages") if isinstance(value, dict) else str(value),
)
def test_logits_that_are_not_finite_end_their_answer_alone(overflowing, byte_model, world_size, first, engine):
    """Their prompts' first token, one behind it, and those of the prompt; with all kinds of sampling in one batch."""
    directory = overflowing
    requests = list(broken())[first:][: 7 if first == 0 else 2]
    if "cuda_graph" in engine:
        requests.pop()  # machines with GPUs may lack llguidance
    prompts, params, tokens = ([one[part] for one in requests] for part in range(3))
    prompts, params = [*prompts, *HEALTHY], [*params, PLAIN, PLAIN]
    if "pipeline_parallel" in engine:
        directory = byte_model.parent / "overflowing stages"
        two_layers(overflowing, directory)
    found, again = answered(directory, world_size, prompts, params, engine)
    alone, _ = answered(directory, world_size, HEALTHY, [PLAIN, PLAIN], engine)
    assert [(one.token_ids, one.finish_reason) for one in found[-2:]] == [(one.token_ids, "length") for one in alone]
    for answer, count in zip(found, tokens, strict=False):
        assert (answer.finish_reason, answer.token_ids) == ("error", [BREAKS] * count)
        assert not answer.error.of_request and answer.error.message.startswith("the model's logits are not finite")
        assert "\n" not in answer.error.message and answer.prompt_logprobs is None
        assert answer.logprobs is None or all(one.logprob > -INF for place in answer.logprobs for one in place.values())
    assert again == found[:1]


def two_layers(directory, to):
    """The checkpoint with its layer twice, so that there are two stages."""
    shutil.copytree(directory, to, dirs_exist_ok=True)
    config = json.loads((to / "config.json").read_text()) | {"num_hidden_layers": 2}
    (to / "config.json").write_text(json.dumps(config))
    tensors = load_file(to / "model.safetensors")
    second = {name.replace("layers.0", "layers.1"): x.clone() for name, x in tensors.items() if "layers.0" in name}
    save_file(tensors | second, to / "model.safetensors")


# Parameters of which the constraints exclude every token that could begin an answer of the built-in model, and their names.
# Its tokens are <pad>, <eos>, <unk>, 0 .. 9, + and =.
NEVER = [
    ({"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 2},
     "allowed_token_ids and stop_token_ids and min_tokens=2"),
    ({"allowed_token_ids": (4, 5), "bad_words": ("1", "2")}, "allowed_token_ids and bad_words"),
    *[({"allowed_token_ids": (1,), "min_tokens": 1, **sampling}, "allowed_token_ids and min_tokens=1")
      for sampling in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "top_k": 3},
                       {"temperature": 1.0, "min_p": 0.1})],
    ({"structured_outputs": StructuredOutputsParams(choice=("12",)), "allowed_token_ids": (5,)},
     "allowed_token_ids and structured_outputs (choice)"),
    ({"structured_outputs": StructuredOutputsParams(choice=("12", "21")), "bad_words": ("1", "2")},
     "bad_words and structured_outputs (choice)"),
    ({"structured_outputs": StructuredOutputsParams(grammar="start: /[0-9]+/"), "allowed_token_ids": (1, 13)},
     "allowed_token_ids and structured_outputs (grammar)"),
]  # fmt: skip
# Parameters that come to exclude every token, the tokens before, and the names.
AT_LAST = [
    ({"structured_outputs": StructuredOutputsParams(choice=("12",)), "allowed_token_ids": (4, 5)}, [4, 5],
     "allowed_token_ids and structured_outputs (choice)"),
    ({"allowed_token_ids": (4,), "bad_words": ("11",)}, [4], "allowed_token_ids and bad_words"),
    ({"allowed_token_ids": (4, 1), "bad_words": ("11",), "min_tokens": 2, "temperature": 1.0, "top_k": 2}, [4],
     "allowed_token_ids and bad_words and min_tokens=2"),
    ({"allowed_token_ids": (4,), "bad_words": ("11",), "temperature": 1.0, "top_p": 0.5, "logprobs": 1}, [4],
     "allowed_token_ids and bad_words"),
]  # fmt: skip


def test_constraints_that_exclude_every_token_are_refused_or_end_the_answer():
    def main(team):
        made = Engine(None, team, mode="reference")
        for wrong, names in NEVER:
            with pytest.raises(ValueError) as error:
                made.generate("1+1=", max_tokens=3, **wrong)
            assert str(error.value) == f"no token can begin the answer: {names} exclude all; loosen one of them"
        params = [SamplingParams(max_tokens=5, **asked) for asked, *_ in AT_LAST]
        return join_pieces(made.answer(["1+1="] * (1 + len(params)), [SamplingParams(), *params]), 1 + len(params))

    results = weft.simulate(main, 2)
    assert results[0] == results[1]
    (plain, *found), expected = results[0], AT_LAST
    assert (plain.text, plain.finish_reason, plain.error) == ("2", "eos", None)
    for answer, (_, tokens, names) in zip(found, expected, strict=True):
        assert (answer.token_ids, answer.finish_reason) == (tokens, "error") and answer.error.of_request
        place = f"no token is left for place {len(tokens)} of the answer: {names} exclude all; loosen one of them"
        assert answer.error.message == place and answer.text == "".join({4: "1", 5: "2"}[token] for token in tokens)


def test_what_leaves_a_token_is_no_mistake():
    """Of two allowed tokens one is left, and an end may come where the others are excluded."""

    def main(team):
        made = Engine(None, team, mode="reference")
        right = [
            {"allowed_token_ids": (4, 5), "bad_words": ("1",), "max_tokens": 2},
            {"allowed_token_ids": (1,)},
            {"structured_outputs": StructuredOutputsParams(choice=("12", "21")), "bad_words": ("1",), "max_tokens": 1},
        ]
        return [made.generate("1+1=", **asked)[0].token_ids for asked in right]

    assert weft.simulate(main, 1) == [[[5, 5], [1], [5]]]


def test_withdrawn_pages_are_found_no_more():
    pool = PagePool(5, 4)
    pages = pool.take(2)
    for page, digest in zip(pages, (b"a", b"b"), strict=True):
        pool.publish(page, digest)
    assert pool.find([b"a", b"b"]) == pages
    pool.withdraw([pages[1], 0])
    assert pool.find([b"a", b"b"]) == pages[:1]
    pool.give_back(pages)
    assert pool.free == pool.capacity and pool.find([b"a"]) == pages[:1]
