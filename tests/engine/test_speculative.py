"""Speculative decoding: answers are those without it, whatever is drafted, over ranks, batches and features."""

import dataclasses
from functools import partial

import pytest
import torch

import weft
from weft.engine import Engine, EngineConfig, SamplingParams
from weft.engine.speculation import times as times_of_steps
from weft.engine.speculation.drafting import TRIAL_STEPS, DraftLength
from weft.engine.speculation.options import SpeculativeConfig
from weft.engine.speculation.verify import VerifyGraph
from weft.ops.vocab.ngram_drafts import look_up

PROMPTS = ["a prompt", "x", "abcabcabcabc", "another, longer prompt"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}


class Oracle:
    """Drafter that knows the answers, and gives some wrong tokens and short drafts, by place."""

    def __init__(self, graph, answers, wrong=5, short=7):
        self.graph, self.answers, self.wrong, self.short = graph, answers, wrong, short
        self.sequences = {}

    def read(self, chunks, rows):
        pass

    def propose(self, batch, drafts):
        proposed = torch.full((batch, drafts), -1)
        for slot in range(batch):
            position = int(self.graph.slots.positions[slot])
            if position < 0 or slot not in self.sequences:
                continue
            for place in range(drafts):
                at = position + 1 + place
                if at >= len(self.sequences[slot]) or at % self.short == 0:
                    break
                proposed[slot, place] = (self.sequences[slot][at] + (at % self.wrong == 0)) % 257
        return proposed

    def accept(self, batch, tokens, counts):
        pass

    def enter(self, slot, tokens):
        self.sequences[slot] = next(list(whole) for whole in self.answers if list(whole[: len(tokens)]) == tokens)

    def move(self, moves):
        for source, target in moves:
            if source in self.sequences:
                self.sequences[target] = self.sequences.pop(source)


def ask(directory, prompts, params, world_size=1, *, answers=None, speculative=None, late=0, wrong=5, **engine):
    """(completions, counts of speculation) of every rank; `answers`: token ids of prompts with answers, for an Oracle."""

    def main(team):
        options = {"mode": "torch", "page_size": 16, "speculative": speculative, **engine}
        made = Engine(directory, team, **options)
        made.batch._steps_late = late
        if answers is not None:
            verifying = made.batch.runner.verifying
            verifying.drafter = Oracle(verifying.graph, answers, wrong)
        pieces = made.answer(prompts, params)
        completions = weft.engine.answers.join_pieces(pieces, len(prompts))
        scheduler = made.batch.scheduler
        while made.has_work:
            made.step()
        assert scheduler.idle and scheduler.pool.free == scheduler.pool.capacity
        return completions, None if speculative is None else made.batch.draft_length.counts, made.stats

    return weft.simulate(main, world_size)


def assert_alike(completions, plain):
    """Equal, with log-probabilities as close as passes of other numbers of rows round."""
    bare = partial(dataclasses.replace, logprobs=None, prompt_logprobs=None)
    assert list(map(bare, completions)) == list(map(bare, plain))
    for one, other in zip(completions, plain, strict=True):
        for places, expected in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert (places is None) == (expected is None)
            for by_id, expected_by_id in zip(places or (), expected or (), strict=True):
                assert (by_id and by_id.keys()) == (expected_by_id and expected_by_id.keys())
                for token, (logprob, rank, text) in (by_id or {}).items():
                    assert (rank, text) == expected_by_id[token][1:]
                    assert logprob == pytest.approx(expected_by_id[token].logprob, abs=1e-4)


def sequences_of(prompts, completions):
    """Token ids of prompts (bytes) with all their answers."""
    prompts = [list(prompt.encode()) if isinstance(prompt, str) else prompt for prompt in prompts]
    encoded = [[LETTERS[byte] for byte in prompt] for prompt in prompts]
    return [tokens + one.token_ids for tokens in encoded for one in completions]


def letters():
    """Token id of each byte of the byte model."""
    from tokenizers import pre_tokenizers

    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {byte: alphabet[level.pre_tokenize_str(chr(byte))[0][0]] for byte in range(32, 127)}


LETTERS = letters()
SAMPLING = {
    "greedy": {},
    "temperature": {"temperature": 1.0, "seed": 7},
    "top_p": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_a_seed_gives_the_same_answer_with_and_without_drafts(byte_model, sampling):
    params = [SamplingParams(max_tokens=24, **sampling)] * len(PROMPTS)
    [(plain, _, _)] = ask(byte_model, PROMPTS, params)
    for world_size, late in ((1, 1), (2, 0)):
        for completions, counts, _ in ask(byte_model, PROMPTS, params, world_size, speculative=NGRAM, late=late):
            assert completions == plain
            assert counts.draft_tokens > 0
            assert sum(counts.accepted_per_pos) == counts.accepted_tokens


FEATURES = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "truncated": {"temperature": 1.0, "top_k": 30, "min_p": 0.01, "top_p": 0.95, "seed": 5},
    "logprobs": {"logprobs": 3, "temperature": 1.0, "seed": 5},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "bad words": {"bad_words": ("ab", "c"), "logit_bias": {65: 3.0}, "temperature": 1.0, "seed": 5},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 180, 3))},
    "stop strings": {"stop": ("a", "e", "i", "o"), "temperature": 1.0, "seed": 2},
    "n": {"n": 3, "temperature": 1.0, "seed": 5},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 1},
}


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_features_of_requests_beside_drafts_that_are_accepted(byte_model, feature, late):
    prompts = PROMPTS[:2]
    params = [SamplingParams(max_tokens=17, **feature)] * 2
    [(plain, _, _)] = ask(byte_model, prompts, params)
    answers = sequences_of(prompts, plain)
    for completions, counts, _ in ask(byte_model, prompts, params, answers=answers, speculative=NGRAM, late=late):
        assert_alike(completions, plain)
        assert counts.accepted_tokens > 0


@pytest.mark.parametrize(
    ("world_size", "engine"),
    [
        (1, {"mode": "auto"}),
        (2, {"mode": "replicated"}),
        (2, {"mode": "sequence_parallel"}),
        (2, {"mode": "replicated", "context_parallel": True}),
        (2, {"mode": "replicated", "context_parallel": True, "fused": False}),
    ],
    ids=str,
)
def test_kernels_and_recipes_verify_drafts(one_layer, world_size, engine):
    prompts, params = PROMPTS[:2], [SamplingParams(max_tokens=10, temperature=0.7, seed=3)] * 2
    [(plain, _, _)] = ask(one_layer, prompts, params)
    answers = sequences_of(prompts, plain)
    for completions, counts, _ in ask(
        one_layer, prompts, params, world_size, answers=answers, speculative=NGRAM, **engine
    ):
        assert completions == plain
        assert counts.accepted_tokens > 0


def looked_up_slowly(tokens, drafts, least, most):
    """Drafts after `tokens`, by the words of NgramDrafter."""
    for length in range(min(most, len(tokens) - 1), least - 1, -1):
        for first in range(len(tokens) - length - 1, -1, -1):
            if tokens[first : first + length] == tokens[len(tokens) - length :]:
                followed = tokens[first + length :]
                return [followed[place % len(followed)] for place in range(drafts)]
    return [-1] * drafts


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 5), (3, 3)])
def test_look_up_takes_the_longest_and_last_n_gram(least, most):
    generator = torch.Generator().manual_seed(least + most)
    tokens = torch.randint(0, 3, (40, 31), generator=generator, dtype=torch.int32)
    positions = torch.randint(-1, 30, (40,), generator=generator)
    newest = tokens.gather(1, positions.clamp(min=0)[:, None])[:, 0].long()
    drafts = look_up(tokens.clone(), newest, positions, 4, least, most).tolist()
    for row, position, given in zip(tokens.tolist(), positions.tolist(), drafts, strict=True):
        assert given == looked_up_slowly(row[: position + 1], 4, least, most)


def test_draft_length_follows_acceptance_and_the_batch():
    config = SpeculativeConfig(num_speculative_tokens=6)
    assert config.lengths == [0, 1, 2, 4, 6]
    good, bad = DraftLength(config), DraftLength(config)
    for _ in range(200):
        good.note(6, [6] * 4, [6, 7, 7, 5])
        bad.note(6, [6] * 4, [1] * 4)
    assert [good.choose(batch, int) for batch in (1, 16)] == [6, 6]
    assert good.choose(1024, int) == 0  # bound by compute
    lengths = [bad.choose(1, int) for _ in range(2 * TRIAL_STEPS)]
    assert lengths.count(0) == len(lengths) - 2 and lengths[TRIAL_STEPS - 1] == 1
    for _ in range(3000):  # later drafts are right again, of which a shorter one tells nothing
        length = bad.choose(1, int)
        bad.note(length, [length] * 4, [1 + length] * 4)
    assert bad.choose(1, int) == 6
    assert good.counts.accepted_per_pos[0] == 800 and good.counts.draft_tokens == 200 * 24


def test_counts_leave_out_sequences_that_have_ended():
    length = DraftLength(SpeculativeConfig(num_speculative_tokens=3, adaptive=False))
    length.note(3, [3, 3, 0, 2, 3], [4, 0, 1, 2, 1])
    assert length.counts[:4] == (3, 8, 4, (2, 1, 1))
    assert length._kept == pytest.approx(
        [0.95 * 0.7**place + 0.05 * part for place, part in ((1, 0.5), (2, 0.25), (3, 0.25))]
    )


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_all_ranks_have_the_times_of_their_buckets(byte_model, monkeypatch, method):
    speculative = {"method": method, "num_speculative_tokens": 3, "adaptive": True}
    speculative |= {"model": str(byte_model)} if method == "draft_model" else {}

    def main(team):
        runner = (engine := Engine(byte_model, team, mode="torch", max_batch=6, speculative=speculative)).batch.runner
        return runner.buckets.sizes, engine.batch.draft_length._times

    for buckets, times in (by_rank := weft.simulate(main, 2)):
        assert times == by_rank[0][1] and list(times) == buckets == [1, 2, 4, 6]
        assert all(begin > 0 and slope > 0 for lines in times.values() for begin, slope in lines)
        assert all(len(lines) == 4 for lines in times.values())
    monkeypatch.setattr(times_of_steps, "is_known", lambda gpu: False)
    assert weft.simulate(main, 1)[0][1] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"method": "ngram"}', "has no num_speculative_tokens"),
        ("{", "is not JSON"),
        (3, "is not an object"),
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens=0 is not an integer in 1 \.\. 8"),
        ({"num_speculative_tokens": 9}, "num_speculative_tokens=9"),
        ({"num_speculative_tokens": 2, "method": "medusa"}, "method='medusa' is not one of ngram"),
        ({"num_speculative_tokens": 2, "num_drafts": 1}, "'num_drafts' is not one of"),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "is more than prompt_lookup_max=3",
        ),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": 17}, "prompt_lookup_max=17 is more than 16"),
        (NGRAM | {"rejection_sample_method": "synthetic"}, "go together"),
        (
            NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5},
            r"synthetic_acceptance_length=5 is not in 1 \.\. num_speculative_tokens \+ 1 = 4",
        ),
        ({"num_speculative_tokens": 2, "adaptive": 1}, "adaptive=1 is not True or False"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_line(given, message):
    with pytest.raises(ValueError, match=message) as error:
        EngineConfig(speculative=given)
    assert "\n" not in str(error.value)


def test_stages_and_drafts_are_refused_together():
    with pytest.raises(ValueError, match="speculative with pipeline_parallel=2"):
        EngineConfig(speculative=NGRAM, pipeline_parallel=2)


SMALL = [
    {"max_batch": 2},
    {"chunk_tokens": 5},
    {"pages": 1 + 4},
    {"pages": 1 + 4, "max_batch": 3, "chunk_tokens": 7},
    {"prefix_caching": False},
]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("engine", SMALL, ids=str)
def test_slots_chunks_and_preemption_beside_drafts(byte_model, engine, late):
    prompts = [*PROMPTS, "abcabcabcabc"]
    params = [SamplingParams(max_tokens=8 + 3 * index, temperature=1.0, seed=index) for index in range(5)]
    [(plain, _, _)] = ask(byte_model, prompts, params)
    answers = [whole for index, one in enumerate(plain) for whole in sequences_of([prompts[index]], [one])]
    [(completions, counts, stats)] = ask(
        byte_model, prompts, params, answers=answers, speculative=NGRAM, late=late, **engine
    )
    assert completions == plain
    assert (stats.preemptions > 0) == ("pages" in engine)
    assert counts.accepted_tokens > 0


@pytest.mark.parametrize("late", [0, 1])
def test_windows_beside_drafts(byte_model, tmp_path, late):
    """A sequence gives back pages that its window has left, and the pages of rejected drafts."""
    import json
    import shutil

    directory = shutil.copytree(byte_model, tmp_path / "windowed")
    config = json.loads((directory / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}
    (directory / "config.json").write_text(json.dumps(config))
    params = [SamplingParams(max_tokens=60, temperature=1.0, seed=index) for index in range(2)]
    [(plain, _, _)] = ask(directory, PROMPTS[:2], params)
    answers = [whole for prompt, one in zip(PROMPTS, plain, strict=False) for whole in sequences_of([prompt], [one])]
    for pages in (None, 1 + 4):
        [(completions, counts, _)] = ask(
            directory, PROMPTS[:2], params, answers=answers, speculative=NGRAM, late=late, pages=pages
        )
        assert completions == plain
        assert counts.accepted_tokens > 20


@pytest.mark.parametrize("late", [0, 1])
def test_requests_that_come_leave_and_move_are_answered_as_alone(byte_model, late):
    """With cancelled requests between, batches shrink, so that sequences move to lower slots while steps are in flight."""
    params = [SamplingParams(max_tokens=length, temperature=1.0, seed=length) for length in (40, 5, 23, 9, 31, 14)]
    prompts = [*PROMPTS, [5, 6, 7], [8, 9]]
    [(plain, _, _)] = ask(byte_model, prompts, params)
    answers = []
    for prompt, one in zip(prompts, plain, strict=True):
        answers += sequences_of([prompt], [one]) if isinstance(prompt, str) else [prompt + one.token_ids]

    def main(team):
        engine = Engine(byte_model, team, mode="torch", page_size=16, speculative=NGRAM)
        engine.batch._steps_late = late
        verifying = engine.batch.runner.verifying
        verifying.drafter = Oracle(verifying.graph, answers)
        tokens, numbers, steps, moved = {}, [], 0, []
        move = engine.batch.runner.move
        engine.batch.runner.move = lambda moves: (moved.append(moves), move(moves))
        while engine.has_work or len(numbers) < 6:
            if len(numbers) < 6:
                numbers.append(engine.submit(prompts[len(numbers)], params[len(numbers)]))
            if steps == 7:
                engine.cancel(numbers[3])
            for piece in engine.step():
                tokens.setdefault(piece.prompt, []).append(piece.token_id)
            steps += 1
        assert moved
        scheduler = engine.batch.scheduler
        assert scheduler.pool.free == scheduler.pool.capacity
        return [tokens[number] for number in numbers]

    [answered] = weft.simulate(main, 1)
    for index, (given, one) in enumerate(zip(answered, plain, strict=True)):
        assert given == one.token_ids[: len(given)] and (index == 3 or len(given) == len(one.token_ids))


def test_a_prompt_finds_the_pages_of_an_answer_with_drafts(byte_model):
    """Prefix caching: pages of accepted tokens hold the keys of these, not of rejected drafts."""
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=1, ignore_eos=True)
    [([plain], _, _)] = ask(byte_model, PROMPTS[:1], [params])
    whole = sequences_of(PROMPTS[:1], [plain])[0]
    later = SamplingParams(max_tokens=20, temperature=1.0, seed=4)
    [([expected], _, _)] = ask(byte_model, [whole], [later])

    def main(team):
        engine = Engine(byte_model, team, mode="torch", page_size=16, speculative=NGRAM)
        verifying = engine.batch.runner.verifying
        verifying.drafter = Oracle(verifying.graph, [whole, whole + expected.token_ids])
        assert list(engine.answer([PROMPTS[0]], [params]))
        tokens = [piece.token_id for piece in engine.answer([whole], [later])]
        return tokens, engine.stats.hit_tokens

    [(tokens, hits)] = weft.simulate(main, 1)
    assert tokens == expected.token_ids and hits >= 48


def test_grammars_allow_the_token_after_each_draft(one_layer):
    """Masks of accepted drafts are those of their places, and other requests' rows stay as they are."""
    pytest.importorskip("llguidance")
    from tests.engine.test_guided import ASKED

    prompts = [*PROMPTS, "y"]
    asked = [ASKED[0], ASKED[1], SamplingParams(max_tokens=40, frequency_penalty=1.0), ASKED[3], ASKED[4]]
    [(plain, _, _)] = ask(one_layer, prompts, asked)
    answers = [whole for prompt, one in zip(prompts, plain, strict=True) for whole in sequences_of([prompt], [one])]
    for world_size, late, wrong in ((1, 0, 5), (1, 1, 3), (2, 0, 99)):
        for completions, counts, _ in ask(
            one_layer, prompts, asked, world_size, answers=answers, speculative=NGRAM, late=late, wrong=wrong
        ):
            assert_alike(completions, plain)
            assert counts.accepted_tokens > 60


def step_by_step(directory, after_step, plant=lambda engine: None, world_size=1):
    """Token ids of five requests of two slots, with `after_step` called after each step."""
    prompts, params = [*PROMPTS, "abcabc"], SamplingParams(max_tokens=14, temperature=0.3, seed=3)

    def main(team):
        engine = Engine(directory, team, mode="torch", page_size=16, max_batch=2, speculative=NGRAM)
        plant(engine)
        tokens = {engine.submit(prompt, params): [] for prompt in prompts}
        while engine.has_work:
            for piece in engine.step():
                tokens[piece.prompt].append(piece.token_id)
            after_step(engine)
        return list(tokens.values())

    return weft.simulate(main, world_size)


def assert_histories_are_the_sequences(engine):
    """A slot's history is prompt and answer of the sequence in it, not of the one before."""
    batch, history = engine.batch, engine.batch.runner.verifying.drafter.history
    for sequence in batch.scheduler._running:
        known = sequence.prompt + sequence.tokens
        if batch._drafting.get(sequence.slot) is sequence:
            assert history.tokens[sequence.slot, : len(known) - 1].tolist() == known[:-1]


def test_a_slot_has_the_history_of_its_own_sequence(byte_model):
    plain = step_by_step(byte_model, assert_histories_are_the_sequences)

    def keep_the_last_history(engine):
        engine.batch.runner.verifying.drafter.enter = lambda slot, tokens: None

    with pytest.raises(AssertionError):
        step_by_step(byte_model, assert_histories_are_the_sequences, keep_the_last_history)
    # Drafts of another sequence do not change an answer.
    assert step_by_step(byte_model, lambda engine: None, keep_the_last_history) == plain


def test_a_rank_that_accepts_one_token_more_is_found(byte_model, monkeypatch):
    """Planted: the counts of rank 1 are one more where a draft was rejected."""
    params = [SamplingParams(max_tokens=14)] * 2
    [(plain, _, _)] = ask(byte_model, PROMPTS[:2], params)
    choose = VerifyGraph._choose

    def choose_one_more(self, size, kind, logits, rows, position):
        before = self.graph.slots.positions.clone()
        choose(self, size, kind, logits, rows, position)
        if self.graph.pipeline.team.rank == 1:
            more = ((before >= 0) & (self.results[:, -2] <= self.results[:, -1])).long()
            self.results[:, -2] += more
            self.graph.slots.positions += more

    monkeypatch.setattr(VerifyGraph, "_choose", choose_one_more)
    try:
        results = ask(byte_model, PROMPTS[:2], params, 2, answers=sequences_of(PROMPTS[:2], plain), speculative=NGRAM)
    except weft.errors.WeftError:
        return
    assert [completions for completions, _, _ in results] != [plain, plain]


def test_a_key_of_a_rejected_draft_that_is_read_later_is_found(byte_model, monkeypatch):
    """Planted: the newest token's key is not written, so the rejected draft's stays in its place."""
    from weft.models import Decoder

    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=2, ignore_eos=True)] * 2
    [(plain, _, _)] = ask(byte_model, PROMPTS[:2], params)
    answers, verify_step = sequences_of(PROMPTS[:2], plain), Decoder.verify_step

    def without_first_key(self, positions, pages, page_size, states):
        step = verify_step(self, positions, pages, page_size, states)
        page, offset = step.cells
        first = torch.arange(len(page)) % positions.shape[1] == 0
        return dataclasses.replace(step, cells=(page.masked_fill(first, 0), offset))

    [(good, counts, _)] = ask(byte_model, PROMPTS[:2], params, answers=answers, speculative=NGRAM, wrong=2)
    assert good == plain and counts.accepted_tokens < counts.draft_tokens
    monkeypatch.setattr(Decoder, "verify_step", without_first_key)
    [(bad, _, _)] = ask(byte_model, PROMPTS[:2], params, answers=answers, speculative=NGRAM, wrong=2)
    assert bad != plain


DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False}


@pytest.mark.parametrize(
    ("world_size", "engine"),
    [
        (1, {}),
        (2, {}),
        # Two minutes; test_kernels_and_recipes_verify_drafts has drafts over a cache that is spread.
        pytest.param(2, {"context_parallel": True, "mode": "replicated", "fused": False}, marks=pytest.mark.sweep),
        (1, {"pages": 1 + 5, "max_batch": 3, "chunk_tokens": 7}),
    ],
    ids=str,
)
def test_a_model_as_its_own_draft_has_all_drafts_accepted(byte_model, world_size, engine):
    """Keys of the draft are those of accepted tokens, also after preemption, chunks and full acceptance."""
    params = [SamplingParams(max_tokens=21 + index, temperature=0.6, seed=index) for index in range(4)]
    [(plain, _, _)] = ask(byte_model, PROMPTS, params)
    speculative = DRAFT_MODEL | {"model": str(byte_model)}
    for late in (0, 1):
        for completions, counts, stats in ask(
            byte_model, PROMPTS, params, world_size, speculative=speculative, late=late, **engine
        ):
            assert completions == plain
            assert counts.draft_tokens > 40 and counts.accepted_tokens == counts.draft_tokens
            assert (stats.preemptions > 0) == ("pages" in engine)


def take_lengths_in_turn(monkeypatch):
    """Let steps have all draft lengths in turn, 0 too, in place of those that pay: of models as small as these none does."""

    def choose(self, batch, context):
        longer = [length for length in self._lengths if length > self._length]
        self._length = longer[0] if longer else self._lengths[0]
        return self._length

    monkeypatch.setattr(DraftLength, "choose", choose)


def test_a_smaller_model_drafts(byte_model, one_layer, monkeypatch):
    take_lengths_in_turn(monkeypatch)
    params = [SamplingParams(max_tokens=20, temperature=0.5, seed=3)] * 4
    [(plain, _, _)] = ask(byte_model, PROMPTS, params)
    for world_size in (1, 2):
        speculative = DRAFT_MODEL | {"model": str(one_layer), "adaptive": True}
        for completions, counts, _ in ask(byte_model, PROMPTS, params, world_size, speculative=speculative):
            assert completions == plain
            assert counts.draft_tokens > 0


def test_drafts_that_do_not_fit_the_model_are_refused(byte_model, tmp_path):
    import shutil

    from weft.models.builtin import PATH

    other = shutil.copytree(byte_model, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(
        text.replace('"!":', '"swap":').replace('"#":', '"!":').replace('"swap":', '"#":')
    )
    for model, message in ((other, "is token id .* pass one of the same tokenizer"), (PATH, "positions|tokenizer")):
        with pytest.raises(ValueError, match=message) as error:
            ask(byte_model, PROMPTS[:1], [SamplingParams()], speculative=DRAFT_MODEL | {"model": str(model)})
        assert "\n" not in str(error.value)
    for options, message in (
        ({"method": "draft_model", "num_speculative_tokens": 2}, "needs model"),
        (NGRAM | {"model": "x"}, "model='x' is for method=\"draft_model\""),
        (DRAFT_MODEL | {"model": "x", "prompt_lookup_min": 2}, 'prompt_lookup_min=2 is for method="ngram"'),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(speculative=options)


def test_drafts_that_do_not_fit_the_memory_are_named_in_one_line(byte_model, monkeypatch):
    """The byte model has 0.28 MB of weights: into 0.5 MB it fits alone, and not beside another one."""
    ask_for = partial(ask, byte_model, PROMPTS[:1], [SamplingParams(max_tokens=2)])
    drafting = DRAFT_MODEL | {"model": str(byte_model)}

    def too_large(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nA second line")

    def refused(name, value, message):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=message) as error:
            patch.setattr(name, value)
            ask_for(speculative=drafting)
        assert "\n" not in str(error.value) and "ngram" in str(error.value)

    beside = rf"speculative: model={byte_model} does not fit beside the model: "
    memory = "weft.models.memory.memory_of_this_machine"
    refused(
        memory, lambda: 500_000, beside + r"rank 0: .* GB of weights in float32 on each of 1 ranks do not fit into the"
    )
    refused("weft.engine.speculation.loading._load_model", too_large, beside + "CUDA out of memory")
    refused(
        "weft.engine.sizes.VIRTUAL_CACHE_BYTES", 30_000, "the draft of method='draft_model' leaves no memory for two"
    )
    monkeypatch.setattr(memory, lambda: 600_000)
    ask_for(speculative=drafting)


@pytest.mark.parametrize("length", [1.0, 2.5, 4.0])
def test_a_synthetic_acceptance_gives_the_stated_tokens_a_step(byte_model, length):
    """Also where nothing was drafted, and equally on both ranks."""
    speculative = NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    params = [SamplingParams(max_tokens=61, ignore_eos=True)] * 2
    results = ask(byte_model, PROMPTS[:2], params, 2, speculative=speculative)
    assert results[0][0] == results[1][0]
    counts = results[0][1]
    assert all(len(one.token_ids) == 61 for one in results[0][0])
    assert counts.tokens_per_draft == pytest.approx(length, abs=0.15)
