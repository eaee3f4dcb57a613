"""Engine: text in, text out, the same on every rank, over any number of ranks, alone or in a batch."""

import dataclasses
import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import weft
from tests.sampled import sampled
from weft.engine import Engine, SamplingParams
from weft.engine.answers import join_pieces
from weft.engine.graphs import Graphs
from weft.engine.params import Kind, as_prompts
from weft.engine.prompts import Shape
from weft.errors import CheckpointError
from weft.models import Checkpoint, Qwen3Config
from weft.text.tokenizer import load_tokenizer

PROMPTS = ["a prompt", "x", "another, longer prompt"]


KINDS = {
    "greedy": {},
    "temperature": {"temperature": 1.0, "seed": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
}


def generate(directory, prompts, world_size=1, *, mode="torch", eos=(), engine=None, **options):
    """Every rank's completions. `engine`: what else the engine is made of."""

    def main(team):
        made = Engine(directory, team, mode=mode, **(engine or {}))
        made.requests.ends |= frozenset(eos)
        return made.generate(prompts, **options)

    return weft.simulate(main, world_size)


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
def test_tokens_are_the_same_on_every_rank_and_for_every_world_size(byte_model, sampling):
    [alone] = generate(byte_model, PROMPTS, 1, max_tokens=24, **sampling)
    for world_size in (2, 4):
        for completions in generate(byte_model, PROMPTS, world_size, max_tokens=24, **sampling):
            assert completions == alone
    assert all(len(found.token_ids) == 24 or found.finish_reason == "eos" for found in alone)
    assert len(set(sum((found.token_ids for found in alone), []))) > 20  # not one token again and again


def test_prompts_in_a_batch_are_answered_as_alone(byte_model):
    [together] = generate(byte_model, PROMPTS, max_tokens=16)
    assert together == [generate(byte_model, prompt, max_tokens=16)[0][0] for prompt in PROMPTS]


SMALL = [
    {"max_batch": 2},
    {"chunk_tokens": 5},
    {"page_size": 16, "pages": 1 + 4},
    {"page_size": 16, "pages": 1 + 4, "max_batch": 3, "chunk_tokens": 7},
]


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("engine", SMALL, ids=str)
def test_slots_chunks_and_preemption_do_not_change_an_answer(byte_model, engine, sampling):
    prompts = [*PROMPTS, "a prompt", "the last of them, and not the shortest one"]
    [plenty] = generate(byte_model, prompts, max_tokens=16, **sampling)

    def main(team):
        made = Engine(byte_model, team, mode="torch", **engine)
        return made.generate(prompts, max_tokens=16, **sampling), made.stats.preemptions, made.batch.scheduler.pool

    [(found, preemptions, pool)] = weft.simulate(main, 1)
    assert found == plenty
    assert (preemptions > 0) == ("pages" in engine)
    assert pool.free == pool.capacity


def test_requests_join_and_leave_between_steps_and_are_answered_as_alone(byte_model):
    params = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=3, temperature=1.0, seed=5),
        SamplingParams(max_tokens=20, temperature=0.8, top_p=0.8, seed=9),
        SamplingParams(max_tokens=7),
    ]
    prompts = [*PROMPTS, [5, 6, 7]]

    def together(team):
        engine = Engine(byte_model, team, mode="torch")
        tokens, numbers, steps = {}, [], 0
        while engine.has_work or len(numbers) < 4:
            if steps % 3 == 0 and len(numbers) < 4:
                numbers.append(engine.submit(prompts[len(numbers)], params[len(numbers)]))
            for piece in engine.step():
                tokens.setdefault(piece.prompt, []).append(piece.token_id)
            steps += 1
        return [tokens[number] for number in numbers]

    def alone(team):
        engine = Engine(byte_model, team, mode="torch")
        return [[piece.token_id for piece in engine.answer([p], [q])] for p, q in zip(prompts, params, strict=True)]

    [expected] = weft.simulate(alone, 1)
    assert [len(tokens) for tokens in expected] == [12, 3, 20, 7]
    for world_size in (1, 2):
        for found in weft.simulate(together, world_size):
            assert found == expected


def test_a_long_prompt_holds_up_no_stream_that_runs(byte_model):
    """Each step brings a token to each stream, while the prompt of 60 tokens is read in eight chunks."""

    def main(team):
        engine = Engine(byte_model, team, mode="torch", chunk_tokens=32, mixed_chunk_tokens=8)
        streams = [engine.submit([stream, 5, 6], SamplingParams(max_tokens=12)) for stream in range(4)]
        assert [piece.prompt for piece in engine.step()] == streams * 2
        long = engine.submit("y" * 60, SamplingParams(max_tokens=2))
        steps = []
        while engine.has_work:
            steps.append([piece.prompt for piece in engine.step()])
        assert all(step == streams for step in steps[:7]) and steps[7] == [long, *streams, long]

    weft.simulate(main, 1)


@pytest.fixture(scope="module")
def eight_tokens(byte_model):
    """The answers to PROMPTS."""
    return generate(byte_model, PROMPTS, max_tokens=8)[0]


def assert_nothing_is_left(engine):
    scheduler = engine.batch.scheduler
    assert scheduler.idle and scheduler.pool.free == scheduler.pool.capacity
    assert sorted(scheduler._free_slots) == list(range(scheduler.max_batch))
    assert not engine._held and not engine._submitted and not scheduler._running and not scheduler._unread


# Behind one piece of a step and behind its last, while prompts are read, while they wait for slots or for pages.
@pytest.mark.parametrize(
    ("drawn", "late"),
    sampled(
        itertools.product((0, 1, 2, 3, 7, 40), (0, 1)),
        lambda drawn, late: (drawn, late) in ((0, 0), (1, 1), (3, 0), (7, 1)),
    ),
)
@pytest.mark.parametrize("made", [{}, *SMALL], ids=str)
def test_a_stream_that_is_closed_leaves_nothing_behind(byte_model, eight_tokens, made, drawn, late):
    def main(team):
        engine = Engine(byte_model, team, mode="torch", **made)
        engine.batch._steps_late = late
        steps = counted(engine.batch)
        pieces = engine.stream(PROMPTS, max_tokens=30)
        for _ in range(drawn):
            next(pieces)
        ran = len(steps)
        pieces.close()
        assert_nothing_is_left(engine)
        assert next(pieces, None) is None and len(steps) == ran
        found = engine.generate(PROMPTS, max_tokens=8)
        assert_nothing_is_left(engine)
        return found, not engine.has_work

    assert weft.simulate(main, 1) == [(eight_tokens, True)]


def counted(batch):
    """Grows with each of its steps."""
    steps, step = [], batch.advance

    def counting():
        steps.append(None)
        return step()

    batch.advance = counting
    return steps


def test_a_stream_that_all_ranks_close_alike_leaves_them_alike(byte_model, eight_tokens):
    def main(team):
        engine = Engine(byte_model, team, mode="torch", chunk_tokens=5)
        engine.batch._steps_late = 1
        steps = counted(engine.batch)
        for drawn in (1, 4, 9):
            pieces = engine.stream(PROMPTS, max_tokens=30)
            for _ in range(drawn):
                next(pieces)
            del pieces
            assert_nothing_is_left(engine)
        return engine.generate(PROMPTS, max_tokens=8), len(steps)

    (found, steps), other = weft.simulate(main, 2)
    assert found == eight_tokens and other == (found, steps)
    # Of each stream only the steps up to the last piece drawn: whole, they would be 30 each and more.
    assert steps < 3 * 30


def test_an_answer_closed_while_prompts_are_read_runs_no_further_step(byte_model):
    def main(team):
        engine = Engine(byte_model, team, mode="torch", chunk_tokens=2)
        steps = counted(engine.batch)
        answer = engine.answer_in_steps([PROMPTS[2]], [SamplingParams(max_tokens=4)])
        assert [next(answer) for _ in range(3)] == [[], [], []] and len(steps) == 3
        assert engine.batch.scheduler.pool.free < engine.batch.scheduler.pool.capacity
        answer.close()
        assert_nothing_is_left(engine)
        whole = list(engine.answer_in_steps([PROMPTS[2]], [SamplingParams(max_tokens=4)]))
        assert len(steps) == 3 + len(whole)
        return [len(pieces) for pieces in whole]

    # Of 22 tokens two a step; a step that has read the last goes on by one more.
    assert weft.simulate(main, 1) == [[0] * 10 + [2, 1, 1]]


@pytest.mark.parametrize("late", [0, 1])
def test_a_closed_stream_does_not_disturb_another(byte_model, eight_tokens, late):
    def main(team):
        engine = Engine(byte_model, team, mode="torch")
        engine.batch._steps_late = late
        kept, left = engine.stream(PROMPTS, max_tokens=8), engine.stream(PROMPTS[::-1], max_tokens=30)
        begun = [next(kept) for _ in range(4)]
        for _ in range(5):
            next(left)
        begun += [next(kept) for _ in range(12)]  # whose steps bring pieces of the other too
        assert not engine._held  # but the other stream's
        left.close()
        found = begun + list(kept)
        assert_nothing_is_left(engine)
        return [[piece.token_id for piece in found if piece.prompt == index] for index in range(3)]

    assert weft.simulate(main, 1) == [[one.token_ids for one in eight_tokens]]


def test_streams_drawn_in_turn_and_submitted_requests_get_their_own_pieces(byte_model):
    def main(team):
        engine = Engine(byte_model, team, mode="torch")
        number = engine.submit(PROMPTS[2], SamplingParams(max_tokens=6))
        one, other = (engine.stream(prompt, max_tokens=8) for prompt in PROMPTS[:2])
        drawn = [(a.token_id, b.token_id) for a, b in zip(one, other, strict=True)]
        submitted = []
        while engine.has_work:
            submitted += engine.step()
        assert all(piece.prompt == number for piece in submitted)
        return [list(tokens) for tokens in zip(*drawn, strict=True)] + [[piece.token_id for piece in submitted]]

    [found] = weft.simulate(main, 1)
    alone = [generate(byte_model, prompt, max_tokens=8)[0][0].token_ids for prompt in PROMPTS]
    assert found == [*alone[:2], alone[2][:6]]


def test_sequences_that_fill_a_page_each_run_together():
    """The built-in model's 64 positions are one page."""

    def main(team):
        engine = Engine(None, team, mode="torch", max_batch=2)
        for prompt in ("1+1=", "20+22="):
            engine.submit(prompt, SamplingParams(max_tokens=2))
        return sorted(piece.prompt for piece in engine.step())

    assert weft.simulate(main, 1) == [[0, 0, 1, 1]]


def test_first_tokens_are_awaited_in_their_step_unless_prompts_wait(byte_model):
    def main(team, late, max_batch):
        engine = Engine(byte_model, team, mode="torch", max_batch=max_batch)
        engine.batch._steps_late = late
        numbers = [engine.submit(prompt, SamplingParams(max_tokens=4)) for prompt in PROMPTS[:2]]
        steps, tokens = [], {number: [] for number in numbers}
        while engine.has_work:
            steps.append([piece.prompt for piece in pieces] if (pieces := engine.step()) else [])
            for piece in pieces:
                tokens[piece.prompt].append(piece.token_id)
        return steps, tokens

    def found(late, max_batch):
        return weft.simulate(main, 1, args=(late, max_batch))[0]

    # A step reads a prompt and decodes. What was launched last comes with the next step.
    assert found(0, 2)[0] == [[0, 1, 0, 1], [0, 1], [0, 1]]
    assert found(1, 2)[0] == [[0, 1], [0, 1], [0, 1], [0, 1]]
    # With one slot the second prompt waits, and is read before the host looks.
    assert found(1, 1)[0] == [[], [0, 0], [0], [0], [1], [1], [1], [1]]
    assert found(0, 2)[1] == found(1, 2)[1] == found(1, 1)[1]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("where", ["prefill", "send", "decode"])
def test_after_a_step_that_fails_all_requests_go_on_without_a_gap(byte_model, where, late):
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3)

    def main(team, failing):
        engine = Engine(byte_model, team, mode="torch")
        engine.batch._steps_late = late
        runner = engine.batch.runner.slots if where == "send" else engine.batch.runner
        made, done = getattr(runner, where), []

        def step(*arguments, **options):
            done.append(where)
            if len(done) in failing:
                raise MemoryError(where)
            return made(*arguments, **options)

        setattr(runner, where, step)
        numbers = [engine.submit(prompt, params) for prompt in PROMPTS[:2]]
        tokens, failed, steps = {}, 0, 0
        while engine.has_work or len(numbers) < 3:
            if steps == 3:
                numbers.append(engine.submit(PROMPTS[2], params))
            steps += 1
            assert steps < 100
            try:
                pieces = engine.step()
            except MemoryError:
                failed += 1
                continue
            for piece in pieces:
                tokens.setdefault(piece.prompt, []).append(piece.token_id)
        assert failed == len(failing)
        return [tokens[number] for number in numbers]

    assert weft.simulate(main, 1, args=((1, 2, 4),)) == weft.simulate(main, 1, args=((),))


def test_a_request_that_can_never_fit_is_refused_and_the_engine_goes_on(byte_model):
    def main(team):
        engine = Engine(byte_model, team, mode="torch", page_size=16, pages=1 + 3)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"prompts\[1\] of 30 tokens and .* up to 20 need 4 KV pages"):
                engine.generate(["ok", "y" * 30], max_tokens=20)
        with pytest.raises(ValueError, match="prompt of 30 tokens and an answer of up to 20 need 4 KV pages"):
            engine.submit("y" * 30, SamplingParams(max_tokens=20))
        assert engine.submit("ok", SamplingParams(max_tokens=1)) == 0  # the first that was not refused
        while engine.has_work:
            engine.step()
        return engine.generate("ok", max_tokens=8)

    assert weft.simulate(main, 1) == generate(byte_model, "ok", max_tokens=8)


def test_numpy_s_integers_are_integers(byte_model):
    sizes = {"max_batch": 2, "page_size": 16, "pages": 9, "chunk_tokens": 4, "max_seq_len": 32}
    params = {"max_tokens": 5, "seed": 3, "stop_token_ids": [7]}

    def main(team, integer):
        made = Engine(byte_model, team, mode="torch", **{name: integer(value) for name, value in sizes.items()})
        words = {**params, "max_tokens": integer(5), "seed": integer(3), "stop_token_ids": [integer(7)]}
        prompt = [integer(token) for token in (5, 6, 7)]
        [found] = join_pieces(made.answer(as_prompts(prompt), [SamplingParams(temperature=1.0, **words)]), 1)
        return found

    assert weft.simulate(main, 1, args=(np.int32,)) == weft.simulate(main, 1, args=(int,))


def test_ignore_eos_goes_on(byte_model):
    def main(team):
        engine = Engine(byte_model, team, mode="torch")
        [free] = engine.generate("x", max_tokens=10)
        engine.requests.ends = frozenset(free.token_ids[:1])
        counts = []
        for ignore_eos in (False, True):
            pieces = list(engine.answer(["x"], [SamplingParams(max_tokens=10, ignore_eos=ignore_eos)]))
            counts.append((len(pieces), pieces[-1].finish_reason))
        return counts

    assert weft.simulate(main, 1) == [[(1, "eos"), (10, "length")]]


def test_a_stop_token_ends_an_answer_and_is_not_in_its_text(byte_model):
    def main(team):
        engine = Engine(byte_model, team, mode="torch")
        [free] = engine.generate("x", max_tokens=10)
        token = free.token_ids[4]
        end = free.token_ids.index(token)
        [ended] = join_pieces(engine.answer(["x"], [SamplingParams(max_tokens=10, stop_token_ids=[token])]), 1)
        assert (ended.finish_reason, ended.token_ids) == ("stop", free.token_ids[: end + 1])
        assert ended.text == engine.tokenizer.decode(free.token_ids[:end])
        vocab_size = engine.model.config.vocab_size
        with pytest.raises(ValueError, match=f"stop_token_ids holds {vocab_size}, outside 0 .. {vocab_size - 1}"):
            engine.answer(["x"], [SamplingParams(stop_token_ids=[vocab_size])])

    weft.simulate(main, 1)


@pytest.mark.parametrize("mode", ["ag_rs", "gemm_ar"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_fused_kernels_give_the_tokens_of_the_unfused_forms(byte_model, mode, world_size):
    prompts, steps = [PROMPTS[1], "four"], 5
    [plain] = generate(byte_model, prompts, max_tokens=steps)
    engine = {"fused": True, "max_seq_len": 32, "page_size": 16}
    for found in generate(byte_model, prompts, world_size, mode=mode, engine=engine, max_tokens=steps):
        assert found == plain


def test_a_fused_step_of_a_large_bucket_gives_the_tokens_of_the_unfused_form(one_layer):
    """More rows than the kernels for few take."""
    prompts = [[31 * index % 251] for index in range(72)]

    def main(team, mode, fused):
        engine = Engine(one_layer, team, mode=mode, fused=fused, max_batch=len(prompts), max_seq_len=16, page_size=16)
        completions = engine.generate(prompts, max_tokens=2, ignore_eos=True)
        return [found.token_ids for found in completions], engine.batch.runner.buckets.largest

    [(plain, _)] = weft.simulate(main, 1, args=("torch", False))
    assert len({last for _, last in plain}) > 32
    assert weft.simulate(main, 2, args=("gemm_ar", True)) == [(plain, len(prompts))] * 2


def test_random_weights_answer_in_token_ids_and_have_no_text(byte_model):
    config = dataclasses.replace(Qwen3Config.named("qwen3-0.6b"), vocab_size=64, hidden_size=32, intermediate_size=64,
                                 num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                                 max_position_embeddings=64, dtype=torch.float32)  # fmt: skip

    def main(team):
        engine = Engine(config, team)
        with pytest.raises(ValueError, match="this model has no tokenizer; pass token ids"):
            engine.generate("text")
        with pytest.raises(ValueError, match="needs text, and this model has no tokenizer"):
            engine.generate([1, 2], stop="x")
        return engine.generate([[1, 2, 3], [4]], max_tokens=6)

    first, again = (weft.simulate(main, 1)[0] for _ in range(2))
    assert first == again
    assert [(len(one.token_ids), one.text, one.finish_reason) for one in first] == [(6, None, "length")] * 2


def test_the_seed_decides_what_is_drawn(byte_model):
    drawn = [generate(byte_model, "x", temperature=1.0, seed=seed, max_tokens=16)[0][0].token_ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_without_a_seed_every_answer_is_another_one_and_the_same_on_all_ranks(byte_model):
    drawn = {"temperature": 2.0, "seed": None, "max_tokens": 12}
    first, second = generate(byte_model, ["a", "a"], 2, **drawn)
    assert first == second
    [again] = generate(byte_model, ["a", "a"], **drawn)
    assert len({tuple(found.token_ids) for found in first + again}) == 4


def test_without_max_tokens_an_answer_goes_on_to_the_model_s_limit(byte_model):
    def main(team):
        engine = Engine(byte_model, team, mode="torch", max_seq_len=40)
        return engine.answer(["abc"], [SamplingParams(max_tokens=None, ignore_eos=True)])

    [[answer]] = weft.simulate(lambda team: join_pieces(main(team), 1), 1)
    assert (len(answer.token_ids), answer.finish_reason) == (37, "length")


def test_truncation_holds_for_a_prompt_s_first_token_too(byte_model):
    """One likely token is left: the greedy one."""
    [greedy] = generate(byte_model, PROMPTS, max_tokens=8)
    for truncated in ({"top_k": 1}, {"min_p": 1.0}):
        assert generate(byte_model, PROMPTS, 2, max_tokens=8, temperature=3.0, **truncated)[1] == greedy


def test_the_end_of_sequence_token_ends_one_answer_and_not_the_others(byte_model):
    [[free, other]] = generate(byte_model, PROMPTS[:2], max_tokens=20)
    eos = next(token for token in free.token_ids[3:] if token not in other.token_ids)
    end = free.token_ids.index(eos)
    for world_size in (1, 2):
        for ended, unchanged in generate(byte_model, PROMPTS[:2], world_size, max_tokens=20, eos=[eos]):
            assert ended.token_ids == free.token_ids[: end + 1]
            assert ended.finish_reason == "eos"
            assert free.text.startswith(ended.text.rstrip("\ufffd"))
            assert unchanged == other


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(byte_model):
    [[free]] = generate(byte_model, PROMPTS[0], max_tokens=20)
    at = len(free.text) // 2
    stop = free.text[at : at + 2]
    for given in (stop, [stop], ("never there", stop)):
        [[stopped]] = generate(byte_model, PROMPTS[0], max_tokens=20, stop=given)
        assert stopped.finish_reason == "stop"
        assert stopped.text == free.text[: free.text.index(stop)]
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
        assert len(stopped.token_ids) < 20


def test_streamed_pieces_are_the_completions(byte_model):
    def main(team):
        engine = Engine(byte_model, team, mode="torch")
        pieces = list(engine.stream(PROMPTS, max_tokens=12))
        return pieces, engine.generate(PROMPTS, max_tokens=12), engine.stats

    for pieces, completions, stats in weft.simulate(main, 2):
        assert [piece.prompt for piece in pieces] == [0, 1, 2] * 12
        for index, completion in enumerate(completions):
            own = [piece for piece in pieces if piece.prompt == index]
            assert "".join(piece.text for piece in own) == completion.text
            assert [piece.token_id for piece in own] == completion.token_ids
            assert [piece.finish_reason for piece in own] == [None] * 11 + ["length"]
        assert (stats.prompt_tokens, stats.new_tokens) == (sum(map(len, PROMPTS)), 36)
        assert stats.load_seconds > 0 and stats.time_to_first_token > 0 and stats.tokens_per_second > 0


def test_an_engine_answers_again_as_a_new_one_would(byte_model):
    calls = [(PROMPTS, 12), ([PROMPTS[2]] * 3, 30), (["y"], 3), (PROMPTS, 12)]

    def main(team):
        engine = Engine(byte_model, team, mode="torch")
        return [engine.generate(prompts, max_tokens=steps) for prompts, steps in calls]

    [found] = weft.simulate(main, 1)
    assert found == [generate(byte_model, prompts, max_tokens=steps)[0] for prompts, steps in calls]


def test_an_answer_ends_where_the_model_does(byte_model):
    """max_position_embeddings is 96; the shorter prompt goes on beside one that has reached it."""
    [[short, long]] = generate(byte_model, ["x", "y" * 90], max_tokens=20)
    assert (len(short.token_ids), len(long.token_ids), long.finish_reason) == (20, 6, "length")
    assert short == generate(byte_model, "x", max_tokens=20)[0][0]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", r"prompts\[0\]='' is empty"),
        (["x", ""], r"prompts\[1\]='' is empty"),
        ([], "prompts is empty"),
        ("\ud800", r"prompts\[0\] is not text that UTF-8 can hold"),
        ([3.0], r"prompts\[0\]=3.0 is not a string or a list of token ids"),
        (
            [torch.tensor([1, 2])],
            r"prompts\[0\]=<Tensor of shape \(2,\) and dtype torch.int64> is not a string or a list",
        ),
        (
            torch.tensor([1, 2]),
            r"prompts=<Tensor of shape \(2,\) and dtype torch.int64> is not a string, a list",
        ),
        ([True, False], r"prompts\[0\]\[0\]=True is not a token id"),
        ([1] * 20_000 + [2.5], r"^prompts\[0\]\[20000\]=2.5 is not a token id$"),
        (
            [bytes(60_000)],
            r"^prompts\[0\]=b.{159}\.\.\. \(240,003 characters\) \.\.\..{15} is not a string or a list",
        ),
        (b"bytes", r"prompts\[0\]=b'bytes' is not a string or a list of token ids"),
        ({"prompt": "x"}, r"prompts=\{'prompt': 'x'\} is not a string"),
        ([[1, 257, -1]], r"prompts\[0\]\[1\]=257 is a token id outside 0 .. 256"),
        ("y" * 96, r"prompts\[0\] has 96 tokens .* max_seq_len=96; shorten it to 95 tokens"),
    ],
)
def test_prompts_without_an_answer_are_refused(byte_model, prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(byte_model, prompts, 2)


def test_max_seq_len_bounds_prompt_and_answer(byte_model):
    def main(team, max_seq_len):
        return Engine(byte_model, team, mode="torch", max_seq_len=max_seq_len).generate("abc", max_tokens=50)

    [[completion]] = weft.simulate(main, 1, args=(10,))
    assert len(completion.token_ids) == 7
    with pytest.raises(ValueError, match="max_seq_len=97 is not in 2 .. max_position_embeddings=96"):
        weft.simulate(main, 1, args=(97,))


def test_positions_without_end_cost_nothing_where_max_seq_len_is_given(byte_model, tmp_path):
    copied = shutil.copytree(byte_model, tmp_path / "copy")
    config = json.loads((copied / "config.json").read_text()) | {"max_position_embeddings": 10**12}
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="^max_seq_len=1000000000000 is more than 16777216, .*; pass a smaller one$"):
        generate(copied, "x")
    options = {"max_tokens": 8, "engine": {"max_seq_len": 96}}
    assert generate(copied, "x", **options) == generate(byte_model, "x", **options)


def test_ranks_that_ask_for_different_things_are_told_so(byte_model):
    def main(team):
        engine = Engine(byte_model, team, mode="torch")
        with pytest.raises(
            ValueError, match="rank 1 asked for SamplingParams.*seed=1.*rank 0 for .*seed=0.*must pass the same"
        ):
            engine.stream("x", seed=team.rank)
        with pytest.raises(ValueError, match="^rank 1 asked for 'y', rank 0 for None; all ranks must pass the same$"):
            engine.stream(["x" * 90, "y"][: 1 + team.rank])

    weft.simulate(main, 2)


def test_a_tokenizer_larger_than_the_model_is_refused(byte_model, tmp_path):
    copied = shutil.copytree(byte_model, tmp_path / "copy")
    tokenizer = load_tokenizer(copied)
    tokenizer.add_tokens(["one too many"])
    tokenizer.save(str(copied / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="tokenizer.json has 258 tokens, but config.json says vocab_size=257"):
        generate(copied, "x")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"mode": "fast"}, "mode='fast' is unknown"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is not supported"),
        ({"chunk_tokens": 0}, "chunk_tokens=0 is not a positive integer"),
        ({"max_batch": 0}, "max_batch=0 is not a positive integer"),
        ({"page_size": 20}, "page_size=20 is not one of"),
        ({"pages": 1}, "pages=1 is less than 2"),
        ({"memory_fraction": 5}, r"memory_fraction=5 is not in \(0, 1\]"),
        ({"memory_fraction": "1"}, r"memory_fraction='1' is not in \(0, 1\]"),
        ({"max_batch": 10**9}, "max_batch=1000000000 is more than 65536"),
        ({"max_batch": "4"}, "max_batch='4' is not a positive integer"),
        ({"pages": 10**12}, r"pages=1000000000000 are more than the \d+ of 64 tokens that rank 0 has memory for"),
        ({"pages": 4.0}, "pages=4.0 is not a positive integer"),
        ({"page_size": 16.0}, "page_size=16.0 is not an integer"),
        ({"page_size": "16"}, "page_size='16' is not an integer"),
        ({"chunk_tokens": True}, "chunk_tokens=True is not a positive integer"),
        ({"max_seq_len": 10.0}, "max_seq_len=10.0 is not a positive integer"),
        ({"max_seq_len": 10**9}, "max_seq_len=1000000000 is not in 2 .. max_position_embeddings=96"),
        ({}, "tokenizer.json: not a readable tokenizer"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_before_the_weights_are_read(byte_model, tmp_path, monkeypatch, engine, message):
    copied = shutil.copytree(byte_model, tmp_path / "copy")
    if not engine:
        (copied / "tokenizer.json").write_text("{")
    monkeypatch.setattr(Checkpoint, "load", lambda *given: pytest.fail("the weights are read"))
    with pytest.raises(ValueError, match=message):
        weft.simulate(lambda team: Engine(copied, team, **engine), 1)


@pytest.mark.parametrize("mode", ["torch", "ag_rs", "gemm_ar"])
def test_the_built_in_model_adds_in_every_mode(mode):
    for [completion] in generate(None, "123+456=", 2, mode=mode, max_tokens=8):
        assert (completion.text, completion.finish_reason) == ("579", "eos")


@pytest.mark.parametrize(("world_size", "mode"), [pytest.param(1, "gemm_ar", marks=pytest.mark.sweep), (2, "ag_rs")])
def test_padded_passes_give_the_tokens_of_those_as_they_are(one_layer, monkeypatch, world_size, mode):
    """As on GPUs, but that a graph's replay is the pass itself: new prompts, parts of some with the begin of others."""
    keys = set()

    def capture(graphs, key, run):
        # Of a decode step, of new prompts of one length, and of sequences of any.
        keys.add(key[0].length is None if isinstance(key[0], Shape) else None)
        graphs._graphs[key] = SimpleNamespace(replay=run)

    monkeypatch.setattr(Graphs, "capture", capture)
    monkeypatch.setattr("weft.engine.prompts.RAGGED_FIRST", 1)
    prompts = ["a prompt of more tokens than are read at once", "x", "another, longer prompt", "one more, of 25 tokens"]

    def main(team, padded, times):
        engine = Engine(one_layer, team, mode=mode, dtype=torch.float32, fused=True, chunk_tokens=16, max_batch=3)
        engine.batch.runner.cuda_graph = padded
        return [engine.generate(prompts, max_tokens=3, temperature=1.0, seed=2) for _ in range(times)]

    expected = weft.simulate(main, world_size, args=(False, 1))
    assert not keys
    assert weft.simulate(main, world_size, args=(True, 2)) == [2 * once for once in expected]
    assert keys == {None, False, True}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_after_a_warm_up_nothing_is_captured_or_launched_kernel_by_kernel(one_layer, monkeypatch, whole):
    """A graph's replay is the pass itself, as above, or nothing. Prompts are new, continued, many, and greedy or not."""
    keys, replayed, progress = [], [], []

    def capture(graphs, key, run):
        keys.append(key)
        graphs._graphs[key] = SimpleNamespace(replay=lambda: (replayed.append(key), run() if whole else None))

    monkeypatch.setattr(Graphs, "capture", capture)
    prompts = ["a prompt of more tokens than are read at once", "x", "another one", "a prompt of more tokens than that"]
    sampling = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 2}}
    options = {"mode": "gemm_ar", "dtype": torch.float32, "fused": True, "chunk_tokens": 24, "max_batch": 3}

    def main(team, warm):
        engine = Engine(one_layer, team, page_size=16, **options)
        runner = engine.batch.runner
        if warm:
            runner.cuda_graph = True
            runner.warm_up(lambda *counts: progress.append(counts))
            assert replayed == keys
        with monkeypatch.context() as patch:
            if warm:
                patch.setattr("weft.engine.prompts.prefill_eagerly", lambda *given: pytest.fail("kernel by kernel"))
            calls = [(asked, params) for params in sampling.values() for asked in (prompts, prompts[:2], prompts[:1])]
            return [engine.generate(asked, max_tokens=3, **params) for asked, params in calls]

    found = weft.simulate(main, 1, args=(True,))
    assert not whole or found == weft.simulate(main, 1, args=(False,))
    assert progress == [(done, 10) for done in range(1, 11)]
    sizes = [Shape(32, 3), Shape(16, 3), 3, 2, 1]
    assert keys == [(size, kind) for size in sizes for kind in (Kind.GREEDY, Kind.TRUNCATED)]
    assert set(replayed[10:]) == set(keys)
