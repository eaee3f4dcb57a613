"""Under load no answer differs and no page is lost: 150 requests, a third of them cancelled, preemptions."""

import json
import random
import shutil

import pytest

import weft
from weft.engine import Engine, SamplingParams
from weft.engine.answers import join_pieces

REQUESTS = 150
# For 40 sequences of a page, or two of hundreds of tokens: then the youngest give way.
SMALL = {"page_size": 16, "pages": 41, "max_batch": 24, "chunk_tokens": 64}


@pytest.fixture(scope="module")
def long_model(one_layer, tmp_path_factory):
    """The byte model of one layer, which reads up to 640 tokens."""
    directory = shutil.copytree(one_layer, tmp_path_factory.mktemp("long") / "copy")
    config = json.loads((directory / "config.json").read_text()) | {"max_position_embeddings": 640}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def kinds():
    """Requests of which those under load are copies: prompts that share their begins, and long and short answers."""
    stem = list(range(40, 80))
    for length in (1, 3, 8, 20, 45):
        ends = {"max_tokens": length, "ignore_eos": True}
        yield stem[:length], SamplingParams(**ends)
        yield [*stem, length], SamplingParams(**ends, temperature=1.0, top_p=0.9 if length < 5 else 1.0, seed=length)
        yield stem[::-1], SamplingParams(**ends, logprobs=1, frequency_penalty=0.3)
    yield [5, 6], SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, top_k=20, repetition_penalty=1.2)
    yield stem, SamplingParams(max_tokens=200, ignore_eos=True)
    yield [7, 8], SamplingParams(max_tokens=240, ignore_eos=True, temperature=1.0, seed=3)
    yield [9], SamplingParams(max_tokens=220, ignore_eos=True, temperature=1.0, presence_penalty=0.5)
    # No token may follow "d", and only the next letter the others: an error.
    words = tuple(one + other for one in "abcd" for other in "abcd" if ord(other) != ord(one) + 1)
    allowed = tuple(range(64, 68))  # a, b, c, d
    yield stem[:9], SamplingParams(max_tokens=9, ignore_eos=True, allowed_token_ids=allowed, bad_words=words)


def arrivals(seed):
    """By step: (number, kind) of requests that come, and numbers of those that are cancelled."""
    draw, count = random.Random(seed), len(list(kinds()))
    coming, leaving = {}, {}
    for number in range(REQUESTS):
        # One in ten is long, or ends with an error.
        kind = draw.randrange(count - 4, count) if draw.random() < 0.1 else draw.randrange(count - 4)
        at = draw.randrange(120)
        coming.setdefault(at, []).append((number, kind))
        if number % 3 == 0:
            leaving.setdefault(at + draw.randrange(1, 60), []).append(number)
    return coming, leaving


def under_load(engine, seed):
    """Kind, and pieces of each request by its number."""
    asked, (coming, leaving) = list(kinds()), arrivals(seed)
    kind_of, pieces = {}, {number: [] for number in range(REQUESTS)}
    step = 0
    while step <= max(coming) or engine.has_work:
        for number, kind in coming.get(step, ()):
            kind_of[number] = kind
            engine.submit(*asked[kind], number=number)
        for number in leaving.get(step, ()):
            engine.cancel(number)
        for piece in engine.step() if engine.has_work else ():
            pieces[piece.prompt].append(piece)
        step += 1
    return kind_of, pieces


def test_under_load_no_answer_differs_and_no_page_is_lost(long_model):
    def main(team):
        roomy = Engine(long_model, team, mode="reference", max_batch=64)
        asked = list(kinds())
        expected = join_pieces(roomy.answer(*map(list, zip(*asked, strict=True))), len(asked))
        engine = Engine(long_model, team, mode="reference", **SMALL)
        kind_of, pieces = under_load(engine, 1)
        pool, scheduler = engine.batch.scheduler.pool, engine.batch.scheduler
        assert scheduler.idle and not engine._submitted and pool.free == pool.capacity
        return expected, kind_of, pieces, scheduler.preemptions, scheduler.hit_tokens

    [(expected, kind_of, pieces, preemptions, hit_tokens)] = weft.simulate(main, 1)
    ended = [number for number, ones in pieces.items() if ones and ones[-1].finish_reason]
    for number, ones in pieces.items():
        answer, tokens = expected[kind_of[number]], [piece.token_id for piece in ones if piece.token_id is not None]
        if number in ended:
            assert (tokens, ones[-1].finish_reason) == (answer.token_ids, answer.finish_reason)
            assert "".join(piece.text for piece in ones) == answer.text and ones[-1].error == answer.error
        else:
            assert number % 3 == 0 and tokens == answer.token_ids[: len(tokens)]
    assert {expected[kind_of[number]].finish_reason for number in ended} == {"length", "error"}
    assert preemptions > 5 and hit_tokens > 1000 and REQUESTS * 2 // 3 <= len(ended) < REQUESTS * 5 // 6
    assert sum(len(pieces[number]) >= 200 for number in ended) >= 5
