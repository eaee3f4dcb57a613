"""Heads over hidden states beside the engine's features; planted bugs; heads that do not fit."""

import json
import shutil

import pytest
import torch

import weft
from tests.engine.draft_heads import PlainEagle3, PlainMtp, Target, deeper, save_eagle3, save_mtp
from tests.engine.test_hidden_drafts import MTP, assert_drafted, draft, eagle3
from tests.engine.test_speculative import PROMPTS, assert_alike, sequences_of, take_lengths_in_turn
from weft.engine import Engine, EngineConfig, SamplingParams
from weft.models.mtp_layouts import LAYOUTS


@pytest.fixture(scope="module")
def made(byte_model, tmp_path_factory):
    """(model with an MTP head, EAGLE-3 head, plain heads by method, plain model)."""
    directory = tmp_path_factory.mktemp("heads")
    bare = deeper(byte_model, directory / "bare", 3)
    tensors = save_mtp(directory / "model", bare, LAYOUTS[0])
    head, target = save_eagle3(directory / "eagle3"), Target(bare)
    plain = {"eagle3": PlainEagle3(head, target), "mtp": PlainMtp(target, tensors)}
    return directory / "model", head, plain, target


def asked_of(method, head):
    return eagle3(head) if method == "eagle3" else MTP


METHODS = ["eagle3", "mtp"]
FEATURES = {
    "logprobs": {"logprobs": 3, "temperature": 1.0, "seed": 5},
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "n": {"n": 3, "temperature": 1.0, "seed": 5},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 1},
    "stop strings": {"stop": ("a", "e", "i", "o"), "temperature": 1.0, "seed": 2},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_features_of_requests(made, feature, method):
    directory, head, *_ = made
    prompts, params = PROMPTS[:2], [SamplingParams(max_tokens=11, **feature)] * 2
    [(plain, *_)] = draft(directory, prompts, params)
    for answers in (None, sequences_of(prompts, plain)):
        [(completions, _, counts, _)] = draft(
            directory, prompts, params, speculative=asked_of(method, head), answers=answers
        )
        assert_alike(completions, plain)
        assert counts.draft_tokens > 0 and (answers is None or counts.accepted_tokens > 0)


SMALL = [
    {"max_batch": 2, "chunk_tokens": 5},
    {"pages": 1 + 4, "max_batch": 3, "chunk_tokens": 7},
    {"prefix_caching": False},
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", SMALL, ids=str)
def test_chunks_slots_and_preemption_draft_alike(made, engine, method):
    """Rows of a head come after its model's in chunks, in slots that move, and again after a preemption."""
    directory, head, heads, target = made
    prompts = [*PROMPTS, "abcabc"]
    lengths = [11 + 3 * index for index in range(5)]
    params = [SamplingParams(max_tokens=n, temperature=1.0, seed=n, ignore_eos=True) for n in lengths]
    [(plain, *_)] = draft(directory, prompts, params)
    answers = [whole for index, one in enumerate(plain) for whole in sequences_of([prompts[index]], [one])]
    [(completions, noted, counts, stats)] = draft(
        directory, prompts, params, speculative=asked_of(method, head), answers=answers, **engine
    )
    assert completions == plain and counts.accepted_tokens > 0
    assert (stats.preemptions > 0) == ("pages" in engine)
    assert_drafted(noted, heads[method], target)


@pytest.mark.parametrize("method", METHODS)
def test_adaptive_lengths_and_windows(made, tmp_path, monkeypatch, method):
    take_lengths_in_turn(monkeypatch)
    directory, head, *_ = made
    windowed = shutil.copytree(directory, tmp_path / "windowed")
    config = json.loads((windowed / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}
    (windowed / "config.json").write_text(json.dumps(config))
    params = [SamplingParams(max_tokens=40, temperature=1.0, seed=index) for index in range(2)]
    for where, options in ((directory, {"adaptive": True}), (windowed, {})):
        [(plain, *_)] = draft(where, PROMPTS[:2], params)
        speculative = asked_of(method, head) | options
        for pages in (None, 1 + 5):
            [(completions, _, counts, _)] = draft(
                where, PROMPTS[:2], params, speculative=speculative, pages=pages, max_seq_len=70
            )
            assert completions == plain and counts.draft_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_prompts_find_rows_of_the_head_with_the_models_pages(made, method):
    """A prompt that goes on as an answer did is drafted for as if all was read; one that turns off is answered alike."""
    directory, head, heads, target = made
    first = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
    [([plain], *_)] = draft(directory, PROMPTS[:1], [first])
    whole = sequences_of(PROMPTS[:1], [plain])[0]
    other = [*whole[:32], (whole[32] + 1) % 256, 7]
    later = SamplingParams(max_tokens=8, temperature=1.0, seed=4, ignore_eos=True)
    [(expected, *_)] = draft(directory, [whole, other], [later] * 2)

    def main(team):
        from tests.engine.test_hidden_drafts import Watched

        engine = Engine(directory, team, mode="torch", page_size=16, speculative=asked_of(method, head))
        assert list(engine.answer(PROMPTS[:1], [first]))
        watched = engine.batch.runner.verifying.drafter = Watched(engine, None, 0)
        tokens = [[], []]
        for prompt, given in enumerate((whole, other)):
            tokens[prompt] = [piece.token_id for piece in engine.answer([given], [later])]
        noted = [
            ((one.prompt + one.tokens)[: at + 1], one.params, drafts)
            for one, at, drafts in watched.noted
            if one.prompt == whole and at < len(one.prompt + one.tokens)
        ]
        return tokens, noted, engine.stats.hit_tokens

    [(tokens, noted, hits)] = weft.simulate(main, 1)
    assert tokens == [one.token_ids for one in expected] and hits >= 32
    assert_drafted(noted, heads[method], target)


@pytest.mark.parametrize("method", METHODS)
def test_cancelled_requests_leave_the_drafts_of_the_rest(made, method):
    directory, head, heads, target = made
    params = [SamplingParams(max_tokens=length, temperature=1.0, seed=length) for length in (24, 5, 17, 9)]
    [(plain, *_)] = draft(directory, PROMPTS, params)

    def main(team):
        from tests.engine.test_hidden_drafts import Watched

        engine = Engine(directory, team, mode="torch", page_size=16, speculative=asked_of(method, head))
        engine.batch._steps_late = 1
        answers = [whole for prompt, one in zip(PROMPTS, plain, strict=True) for whole in sequences_of([prompt], [one])]
        watched = engine.batch.runner.verifying.drafter = Watched(engine, answers, 5)
        tokens, numbers, steps = {}, [], 0
        while engine.has_work or len(numbers) < 4:
            if len(numbers) < 4:
                numbers.append(engine.submit(PROMPTS[len(numbers)], params[len(numbers)]))
            if steps == 5:
                engine.cancel(numbers[0])
            for piece in engine.step():
                tokens.setdefault(piece.prompt, []).append(piece.token_id)
            steps += 1
        noted = [
            ((one.prompt + one.tokens)[: at + 1], one.params, drafts)
            for one, at, drafts in watched.noted
            if at < len(one.prompt + one.tokens)
        ]
        return [tokens[number] for number in numbers], noted

    [(answered, noted)] = weft.simulate(main, 1)
    assert [given == one.token_ids for given, one in zip(answered, plain, strict=True)][1:] == [True] * 3
    assert_drafted(noted, heads[method], target)


def of_another_layer(engine):
    """The middle hidden state in place of the low one."""
    tap = engine.model.tap
    engine.model.tap = tap._replace(take=lambda states, step: tap.take([states[1], *states[1:]], step))


def of_the_token_after(engine):
    drafter = engine.batch.runner.verifying.drafter
    tap = engine.model.tap

    def take(states, step):
        tap.take(states, step)
        drafter.hidden[: step.tokens].copy_(drafter.hidden[: step.tokens].roll(-1, 0))

    engine.model.tap = tap._replace(take=take)


def without_map(engine):
    head = engine.batch.runner.verifying.drafter.head
    head.take_ids(torch.arange(len(head.ids)))


def with_rows_of_rejected_drafts(engine):
    """The first verified row is not written: what a draft left stays in its place."""
    body = engine.batch.runner.verifying.drafter.head.body
    verify_step = body.verify_step

    def without_first(positions, pages, page_size):
        import dataclasses

        step = verify_step(positions, pages, page_size)
        page, offset = step.cells
        first = torch.arange(len(page)) % positions.shape[1] == 0
        return dataclasses.replace(step, cells=(page.masked_fill(first, 0), offset))

    body.verify_step = without_first


def by_a_slice_of_the_head(engine):
    """Logits of this rank's tokens alone."""
    head = engine.batch.runner.verifying.drafter.head
    part = head.lm_head if hasattr(head, "lm_head") else engine.model.lm_head
    gather = part.gather

    def own(logits):
        whole, size = gather(logits), part.local_size
        kept = torch.full_like(whole, -torch.inf)
        here = slice(part.start, min(part.start + size, whole.shape[1]))
        kept[:, here] = whole[:, here]
        return kept

    part.gather = own


def with_the_token_before(engine):
    """Embeddings of token p in place of token p + 1, in verified rows."""
    drafter = engine.batch.runner.verifying.drafter
    accept = drafter.accept
    drafter.accept = lambda batch, tokens, counts: accept(batch, tokens.roll(1, 1), counts)


PLANTED = [
    ("eagle3", of_another_layer), ("eagle3", of_the_token_after), ("mtp", of_the_token_after), ("eagle3", without_map),
    ("eagle3", with_rows_of_rejected_drafts), ("mtp", with_rows_of_rejected_drafts), ("eagle3", by_a_slice_of_the_head),
    ("eagle3", with_the_token_before), ("mtp", with_the_token_before),
]  # fmt: skip


@pytest.mark.parametrize(("method", "plant"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_bug_is_found(made, method, plant):
    """It changes drafts, and no answer."""
    directory, head, heads, target = made
    params = [SamplingParams(max_tokens=10, temperature=1.0, seed=2, ignore_eos=True)] * 2
    [(plain, *_)] = draft(directory, PROMPTS[:2], params)
    world_size = 2 if plant is by_a_slice_of_the_head else 1
    results = draft(
        directory,
        PROMPTS[:2],
        params,
        world_size,
        speculative=asked_of(method, head),
        answers=sequences_of(PROMPTS[:2], plain),
        plant=plant,
    )
    for completions, noted, *_ in results:
        assert noted and completions == plain
        with pytest.raises(AssertionError):
            assert_drafted(noted, heads[method], target)


def refused(directory, speculative):
    with pytest.raises(ValueError) as error:
        draft(directory, PROMPTS[:1], [SamplingParams()], speculative=speculative)
    assert "\n" not in str(error.value)
    return str(error.value)


UNFIT = {
    "hidden size": ({"hidden_size": 64}, "hidden_size=64, and the model has 48; pass the head of this model"),
    "vocabulary": ({"vocab_size": 300}, "vocab_size=300, and the model has 257"),
    "layers": (
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 5]},
        "layers 0, 1, 5 are not 3 ascending ones of the model's 3",
    ),
    "two layers": ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "is not a list of 3 layers"),
    "depth": ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported; an EAGLE-3 head has 1"),
    "class": ({"architectures": ["LlamaForCausalLM"]}, "an EAGLE-3 head is 'LlamaForCausalLMEagle3'"),
    "target": ({"target_hidden_size": 64}, "target_hidden_size=64 is not hidden_size=48"),
    "drafts": ({"draft_vocab_size": 400}, "draft_vocab_size=400 is not an integer in 1 .. vocab_size=257"),
    "unknown": ({"fc_norm": True}, "fc_norm=True is a key that weft does not know"),
}


@pytest.mark.parametrize(("changed", "message"), UNFIT.values(), ids=UNFIT)
def test_heads_that_do_not_fit_are_refused_in_one_line(made, tmp_path, changed, message):
    head = save_eagle3(tmp_path / "head")
    config = json.loads((head / "config.json").read_text()) | changed
    (head / "config.json").write_text(json.dumps(config))
    assert message in refused(made[0], eagle3(head))


@pytest.mark.parametrize(
    "name", ["fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.hidden_norm.weight", "d2t"]
)
def test_missing_tensors_are_named(made, tmp_path, name):
    head = save_eagle3(tmp_path / "head", drop=(name,))
    assert f"tensor {name} is missing" in refused(made[0], eagle3(head))


def test_maps_that_do_not_fit_are_refused(made, tmp_path):
    far = save_eagle3(tmp_path / "far", add={"d2t": torch.full((100,), 200)})
    assert "d2t does not name 100 of 257 token ids" in refused(made[0], eagle3(far))
    short = save_eagle3(tmp_path / "short", add={"d2t": torch.zeros(5, dtype=torch.int64)})
    assert "d2t has shape (5,), but draft_vocab_size is 100" in refused(made[0], eagle3(short))


def test_models_without_an_mtp_head_are_refused(made, byte_model, tmp_path):
    assert "has no MTP head: no model.layers.2.eh_proj and no mtp.fc; leave out" in refused(byte_model, MTP)
    save_mtp(tmp_path / "damaged", byte_model, LAYOUTS[1], drop=("mtp.norm.weight",))
    assert "tensor mtp.norm.weight is missing" in refused(tmp_path / "damaged", MTP)
    for options, message in (
        (MTP | {"model": "x"}, 'model=\'x\' is for method="draft_model" or "eagle3"'),
        ({"method": "eagle3", "num_speculative_tokens": 2}, 'method="eagle3" needs model'),
        (MTP | {"num_speculative_tokens": 9}, "num_speculative_tokens=9"),
        (MTP | {"prompt_lookup_min": 2}, 'prompt_lookup_min=2 is for method="ngram"'),
        (MTP | {"draft_head": "bf16"}, "draft_head='bf16' is not one of"),
        (MTP | {"method": "ngram", "draft_head": "fp8"}, "draft_head='fp8' is for method=\"mtp\""),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(speculative=options)


@pytest.mark.parametrize(
    "changed",
    [
        {"layer": "layers.0"},
        {"norm_before_residual": True},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}, "eagle_aux_hidden_state_layer_ids": None},
        {"add": {"embed_tokens.weight": torch.randn(257, 48, generator=torch.Generator().manual_seed(0))}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_layouts_of_eagle3_checkpoints(made, tmp_path, changed):
    directory, _, _, target = made
    head, params = save_eagle3(tmp_path / "head", **changed), [SamplingParams(max_tokens=5)] * 2
    [(plain, *_)] = draft(directory, PROMPTS[:2], params)
    [(completions, noted, *_)] = draft(directory, PROMPTS[:2], params, speculative=eagle3(head))
    assert completions == plain
    assert_drafted(noted, PlainEagle3(head, target), target)
