"""Snapshots of states beside the pages of prefix caching: answers are those of prompts that are read whole, bit for bit."""

import pytest
import torch

import weft
from tests.against_transformers import DELTA_NETS
from tests.engine.test_speculative import NGRAM
from weft.engine import Engine, SamplingParams
from weft.engine.answers import join_pieces
from weft.parallel.delta_states import DeltaStates

# Dense layers: an answer does not depend on ties of routers.
DENSE = {"family": "Qwen3Next", **DELTA_NETS, "mlp_only_layers": [0, 1, 2], "initializer_range": 0.2}
BEGIN = torch.randint(257, (80,), generator=torch.Generator().manual_seed(0)).tolist()
# Begins of each other, the same again, and one that goes on otherwise in its third page.
PROMPTS = [BEGIN[:40], BEGIN[:40], BEGIN, BEGIN[:35] + [7, 8, 9], BEGIN[:17], [1, 2, 3], BEGIN[:79]]
PARAMS = [SamplingParams(max_tokens=6, temperature=index % 2, seed=index, logprobs=1) for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def made(make_checkpoint):
    directory, _ = make_checkpoint(**DENSE)
    return directory


def ask(directory, prompts=PROMPTS, params=PARAMS, world_size=1, together=False, late=0, **options):
    """(completions, hit tokens of each prompt, counts of snapshots, preemptions) of every rank; late: as on GPUs."""

    def main(team):
        engine = Engine(directory, team, **{"mode": "torch", "page_size": 16, "max_seq_len": 96} | options)
        engine.batch._steps_late = late
        completions, hits = [], []
        groups = [range(len(prompts))] if together else [[index] for index in range(len(prompts))]
        for group in groups:
            pieces = engine.answer([prompts[index] for index in group], [params[index] for index in group])
            completions += join_pieces(pieces, len(group))
            hits.append(engine.stats.hit_tokens)
        scheduler = engine.batch.scheduler
        while engine.has_work:
            engine.step()
        assert scheduler.idle and scheduler.pool.free == scheduler.pool.capacity
        return completions, hits, engine.load.snapshots, engine.load.preemptions

    return weft.simulate(main, world_size)


@pytest.fixture(scope="module")
def plain(made):
    [(completions, hits, counts, _)] = ask(made, prefix_caching=False)
    assert not any(hits) and counts is None
    return completions


def tokens_of(completions):
    return [one.token_ids for one in completions]


def test_answers_are_those_of_prompts_that_are_read_whole(made, plain):
    """Snapshots stand at the ends of prompts, by pages."""
    for world_size in (1, 2):
        for completions, hits, counts, _ in ask(made, world_size=world_size, state_snapshot_bytes=1 << 20):
            assert tokens_of(completions) == tokens_of(plain)
            # The second prompt begins at token 32, the third too; the last at the end of the third's last full page but one.
            assert hits == [0, 32, 32, 32, 0, 0, 64]
            # The last answer fills a page.
            assert (counts.saved, counts.used, counts.dropped, counts.held) == (4, 4, 0, 4)


def test_a_hit_gives_the_same_bits_as_no_hit(made):
    """A prompt's rest is read in a pass of equal rows: all log-probabilities are equal, not only close."""
    [(completions, hits, _, _)] = ask(made, [BEGIN] * 2, [PARAMS[0]] * 2, state_snapshot_bytes=1 << 20)
    assert hits == [0, 64] and completions[0].logprobs == completions[1].logprobs


def test_snapshots_within_prompts(made, plain):
    options = {"state_snapshot_bytes": 1 << 20, "state_snapshot_tokens": 20}
    [(completions, hits, counts, _)] = ask(made, PROMPTS[2:], PARAMS[2:], **options)
    assert tokens_of(completions) == tokens_of(plain[2:])
    assert hits == [0, 32, 16, 0, 64] and counts.held == 5


SMALL = [
    {"state_snapshot_bytes": 100_000},
    {"chunk_tokens": 7, "state_snapshot_tokens": 16},
    {"max_batch": 2, "chunk_tokens": 40},
    {"pages": 1 + 7, "max_batch": 3, "chunk_tokens": 21, "state_snapshot_tokens": 16},
    {"state_snapshot_bytes": 0},
    {"speculative": NGRAM, "pages": 1 + 7},
    {"mode": "replicated", "fused": False, "world_size": 2},
]


@pytest.mark.parametrize(("together", "late"), [(False, 0), (True, 1), (False, 1)])
@pytest.mark.parametrize("options", SMALL, ids=str)
def test_few_places_chunks_and_preemption(made, plain, plain_ops, options, together, late):
    """With drafts, too."""
    given = {"state_snapshot_bytes": 1 << 20, "late": late, **options}
    for completions, hits, counts, preemptions in ask(made, together=together, **given):
        assert tokens_of(completions) == tokens_of(plain)
        assert (sum(hits) > 0) == (given["state_snapshot_bytes"] > 0) == (counts is not None)
        if "chunk_tokens" not in options and together and "pages" in options:
            assert preemptions > 0
    if options == SMALL[0]:
        assert counts.places == 1 and counts.dropped > 0


def test_answers_of_one_prompt_read_it_once(made):
    params = SamplingParams(max_tokens=4, n=4, temperature=1.0, seed=3)
    [(plain, *_)] = ask(made, [BEGIN], [params], prefix_caching=False)
    [(completions, hits, counts, _)] = ask(made, [BEGIN], [params], state_snapshot_bytes=1 << 20)
    assert tokens_of(completions) == tokens_of(plain) and hits == [3 * 64] and counts.saved == 1


def test_a_prompt_goes_on_after_an_answer(made):
    """The next turn of a conversation begins after the last full page of the answer; with drafts after the prompt."""
    params = [SamplingParams(max_tokens=20, ignore_eos=True)] * 2
    [([first], *_)] = ask(made, [BEGIN[:40]], params[:1], prefix_caching=False)
    turns = [BEGIN[:40], BEGIN[:40] + first.token_ids + [5, 6]]
    [(plain, *_)] = ask(made, turns, params, prefix_caching=False)
    ways = ({}, 48), ({"late": 1}, 48), ({"speculative": NGRAM}, 32), ({"state_snapshot_bytes": 100_000}, 32)
    for options, found in ways:
        [(completions, hits, _, _)] = ask(made, turns, params, **{"state_snapshot_bytes": 1 << 20} | options)
        assert tokens_of(completions) == tokens_of(plain) and hits == [0, found]


def test_salts_keep_snapshots_apart(made):
    params = [SamplingParams(max_tokens=2, cache_salt=salt) for salt in ("a", "b", "a")]
    [(_, hits, _, _)] = ask(made, [BEGIN] * 3, params)
    assert hits == [0, 0, 64]


def test_after_a_failed_step_none_is_found(made):
    def main(team):
        engine = Engine(made, team, mode="torch", page_size=16)
        answers = [engine.generate([BEGIN], max_tokens=4)[0].token_ids]
        read = engine.batch.runner.prompts.read

        def fail(*given, **options):
            raise RuntimeError("planted")

        engine.batch.runner.prompts.read = fail
        with pytest.raises(RuntimeError, match="planted"):
            engine.generate([BEGIN[:50]], max_tokens=4)
        engine.batch.runner.prompts.read = read
        answers.append(engine.generate([BEGIN], max_tokens=4)[0].token_ids)
        return answers, engine.stats.hit_tokens

    [(answers, hits)] = weft.simulate(main, 1)
    assert answers[0] == answers[1] and hits == 0


def nothing(self, first, second): ...


def save_the_next(self, slots, snapshots):
    save(self, slots, (snapshots + 1) % 3)


save = DeltaStates.save


@pytest.mark.parametrize(
    ("name", "planted"),
    [("restore", nothing), ("save", nothing), ("save", save_the_next)],
    ids=lambda one: str(one)[:20],
)
def test_a_planted_bug_is_found(made, plain, monkeypatch, name, planted):
    """A slot keeps the states of the sequence before it; a snapshot has states of another prompt, or none."""
    monkeypatch.setattr(DeltaStates, name, planted)
    [(completions, hits, _, _)] = ask(made, state_snapshot_bytes=1 << 20)
    assert sum(hits) > 0 and tokens_of(completions) != tokens_of(plain)


def test_bytes_that_hold_no_state_are_refused(made):
    def main(team):
        with pytest.raises(ValueError, match=r"state_snapshot_bytes=100 holds no state, which has \d+ bytes on a rank"):
            Engine(made, team, mode="torch", state_snapshot_bytes=100)

    weft.simulate(main, 1)
