"""Drafts of models with gated delta nets: a slot goes on after the last accepted token."""

import pytest
import torch

import weft
from tests.against_transformers import DELTA_NETS
from tests.engine.test_speculative import NGRAM, Oracle, ask, assert_alike, take_lengths_in_turn
from weft.engine import Engine, SamplingParams
from weft.parallel.delta_states import DeltaStates

# Dense layers: an answer does not depend on ties of routers.
DENSE = {"family": "Qwen3Next", **DELTA_NETS, "mlp_only_layers": [0, 1, 2], "initializer_range": 0.2}
LENGTHS = (5, 17, 1, 23)
PARAMS = [SamplingParams(max_tokens=15 + 3 * index, temperature=index % 2, seed=index) for index in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def made(make_checkpoint):
    """(directory, prompts, completions without drafts, prompts with their answers)"""
    directory, _ = make_checkpoint(**DENSE)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(257, (length,), generator=generator).tolist() for length in LENGTHS]
    [(plain, _, _)] = ask(directory, prompts, PARAMS)
    return directory, prompts, plain, [prompt + one.token_ids for prompt, one in zip(prompts, plain, strict=True)]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    ("world_size", "engine"),
    [
        (1, {}),
        (2, {}),
        (1, {"max_batch": 2}),
        (1, {"chunk_tokens": 5}),
        (1, {"pages": 1 + 4, "max_batch": 3, "chunk_tokens": 7, "max_seq_len": 64}),
    ],
    ids=str,
)
def test_drafts_change_no_answer(made, world_size, engine, late):
    """Runs of drafts of all lengths are accepted, and rejected at each place."""
    directory, prompts, plain, answers = made
    options = {"answers": answers, "speculative": NGRAM, "late": late, **engine}
    for completions, counts, stats in ask(directory, prompts, PARAMS, world_size, **options):
        assert completions == plain
        assert min(counts.accepted_per_pos) > 0 and counts.accepted_tokens < counts.draft_tokens
        assert (stats.preemptions > 0) == ("pages" in engine)


@pytest.mark.parametrize(
    ("world_size", "engine"),
    [
        (2, {"mode": "replicated"}),
        (2, {"mode": "replicated", "context_parallel": True}),
        (4, {"mode": "sequence_parallel", "context_parallel": False}),
    ],
    ids=str,
)
def test_recipes_verify_drafts(made, plain_ops, world_size, engine):
    directory, prompts, plain, answers = made
    params = [SamplingParams(max_tokens=6, temperature=index % 2, seed=index) for index in range(2)]
    options = {"answers": answers, "speculative": NGRAM, "fused": False, **engine}
    for completions, counts, _ in ask(directory, prompts[:2], params, world_size, **options):
        assert [one.token_ids for one in completions] == [one.token_ids[:6] for one in plain[:2]]
        assert counts.accepted_tokens > 0


def test_looked_up_drafts_of_all_lengths(made, monkeypatch):
    take_lengths_in_turn(monkeypatch)
    directory, prompts, plain, _ = made
    speculative = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    for completions, counts, _ in ask(directory, prompts, PARAMS, 2, speculative=speculative):
        assert completions == plain and counts.draft_tokens > 0


FEATURES = {
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "n": {"n": 3, "temperature": 1.0, "seed": 5},
}


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_features_of_requests(made, feature):
    directory, prompts, *_ = made
    params = [SamplingParams(max_tokens=14, **feature)]
    [(plain, _, _)] = ask(directory, prompts[:1], params)
    answers = [prompts[0] + one.token_ids for one in plain]
    [(completions, counts, _)] = ask(directory, prompts[:1], params, answers=answers, speculative=NGRAM)
    assert_alike(completions, plain)
    assert counts.accepted_tokens > 0


def come_and_go(made, plant=lambda engine: None):
    """Tokens of requests of which one is cancelled, so that sequences move to lower slots; and the moves."""
    directory, prompts, _, answers = made

    def main(team):
        engine = Engine(directory, team, mode="torch", page_size=16, speculative=NGRAM)
        plant(engine)
        runner, moved, tokens, numbers, steps = engine.batch.runner, [], {}, [], 0
        runner.verifying.drafter = Oracle(runner.verifying.graph, answers)
        move = runner.move
        runner.move = lambda moves: (moved.extend(moves), move(moves))
        while engine.has_work or len(numbers) < len(prompts):
            if len(numbers) < len(prompts):
                numbers.append(engine.submit(prompts[len(numbers)], PARAMS[len(numbers)]))
            if steps == 5:
                engine.cancel(numbers[0])
            for piece in engine.step():
                tokens.setdefault(piece.prompt, []).append(piece.token_id)
            steps += 1
        return [tokens[number] for number in numbers], moved

    [result] = weft.simulate(main, 1)
    return result


def test_states_move_with_their_sequences(made):
    tokens, moved = come_and_go(made)
    expected = [one.token_ids for one in made[2]]
    assert moved and tokens[1:] == expected[1:] and tokens[0] == expected[0][: len(tokens[0])]


def accept_one_more(self, counts):
    accept(self, torch.where(counts > 0, (counts + 1).clamp(max=4), 0))


def accept_the_first(self, counts):
    accept(self, counts.clamp(max=1))


def accept_none(self, counts): ...


def move_without_the_pending(self, sources, targets):
    self._copy(sources, targets)
    self.begin(targets)


accept = DeltaStates.accept


@pytest.mark.parametrize("planted", [accept_one_more, accept_the_first, accept_none], ids=lambda one: one.__name__)
def test_a_state_of_another_token_is_found(made, monkeypatch, planted):
    """Planted: a rejected token is taken into the state later, or an accepted one is not."""
    directory, prompts, plain, answers = made
    monkeypatch.setattr(DeltaStates, "accept", planted)
    [(completions, _, _)] = ask(directory, prompts[:2], PARAMS[:2], answers=answers, speculative=NGRAM)
    assert completions != plain[:2]


def test_a_slot_that_goes_on_from_the_sequence_before_is_found(made, monkeypatch):
    """Planted: tokens of the sequence before are pending after a prompt."""
    directory, prompts, plain, answers = made
    monkeypatch.setattr(DeltaStates, "begin", lambda self, slots: None)
    options = {"answers": answers, "speculative": NGRAM, "max_batch": 1}
    [(completions, _, _)] = ask(directory, prompts, PARAMS, **options)
    assert completions[0] == plain[0] and completions != plain


def test_a_move_of_another_tokens_state_is_found(made, monkeypatch):
    monkeypatch.setattr(DeltaStates, "move", move_without_the_pending)
    tokens, moved = come_and_go(made)
    assert moved and tokens[1:] != [one.token_ids for one in made[2]][1:]


def test_kernels_verify_drafts(make_checkpoint):
    """One layer of each kind, in weft's kernels, which begin with the pending tokens."""
    directory, _ = make_checkpoint(
        **DENSE | {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    )
    prompts, params = [[5, 9, 200]], [SamplingParams(max_tokens=7)]
    engine = {"mode": "replicated", "fused": True, "max_batch": 1}
    [(plain, _, _)] = ask(directory, prompts, params, **engine)
    answers = [prompts[0] + plain[0].token_ids]
    [(completions, counts, _)] = ask(directory, prompts, params, answers=answers, speculative=NGRAM, **engine)
    assert completions == plain and 0 < counts.accepted_tokens < counts.draft_tokens
