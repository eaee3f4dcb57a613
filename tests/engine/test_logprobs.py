"""Log-probabilities are those of log_softmax over the whole vocabulary, of answers and prompts, on every rank alike."""

import pytest
import torch

import weft
from tests.engine.test_engine import PROMPTS, SMALL
from weft.engine import Engine, SamplingParams
from weft.engine.answers import Logprob, Piece, columns_of, join_pieces, logprobs_of, pieces_of_columns
from weft.engine.params import MOST_LOGPROBS
from weft.engine.sampling import WIDTH, token_logprobs
from weft.parallel.vocabulary import VocabParallelHead
from weft.runtime.codec import decode, encode


@pytest.mark.parametrize(
    ("world_size", "vocab_size", "mode"), [(1, 50, "reference"), (3, 50, "reference"), (2, 51, "replicated")]
)
def test_rows_are_those_of_log_softmax(world_size, vocab_size, mode):
    """Of 50 ids three ranks have 17 each, fewer than a row lists; equal logits share the rank of the last of them."""
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    logits[1, [2, 30]] = logits[1].max() + 1
    logits[3] = logits[3].bfloat16().float()
    tokens = torch.tensor([3, 30, 49, int(logits[3].argmax()), 17])

    def main(team):
        head = VocabParallelHead(vocab_size, 8, team=team, mode=mode, dtype=torch.float32)
        mine = torch.full((5, head.local_size), -torch.inf)
        mine[:, : head.real_size] = logits[:, head.start : head.start + head.real_size]
        return token_logprobs(head, mine, tokens)

    results = weft.simulate(main, world_size)
    assert all(torch.equal(found, results[0]) for found in results) and results[0].shape == (5, WIDTH)
    exact = logits.log_softmax(dim=-1)
    own = exact.gather(1, tokens[:, None])
    torch.testing.assert_close(results[0][:, :1], own)
    assert results[0][:, 1].tolist() == (logits >= logits.gather(1, tokens[:, None])).sum(1).tolist()
    top = exact.topk(MOST_LOGPROBS)
    torch.testing.assert_close(results[0][:, 2 : 2 + MOST_LOGPROBS], top.values)
    assert set(results[0][1, 2 + MOST_LOGPROBS :][:2].long().tolist()) == {2, 30}
    assert results[0][0, 2 + MOST_LOGPROBS :].tolist() == top.indices[0].tolist()


def test_a_row_becomes_the_tokens_own_and_the_likeliest_ones():
    row = [-3.0, 7.0, -0.5, -1.5, *[-torch.inf] * 18, 4.0, 9.0, *[0.0] * 18]
    own, first, second = Logprob(-3.0, 7, "5"), Logprob(-0.5, 1, "4"), Logprob(-1.5, 2, "9")
    assert logprobs_of(row, 5, 3, str) == {5: own, 4: first, 9: second}
    assert logprobs_of(row, 5, 0, str) == {5: own}
    piece = Piece(0, "a", 5, None, {5: own}, [None, {4: first, 9: second}], 2)
    pieces = [piece, Piece(3, None, 7), Piece(0, "b", 8, "eos")]
    for some in ([], pieces[:1], pieces[1:2], pieces, [Piece(1, "ä", 2, None, None, None, 1)] * 9):
        assert pieces_of_columns(decode(encode(columns_of(some)))) == some
    assert decode(encode(piece)) == piece and decode(encode(piece)).logprobs[5].rank == 7
    assert logprobs_of([-0.5, 1.0, *row[2:]], 4, 2, str) == {4: first, 9: second}


def answers(directory, prompts, params, world_size=1, **engine):
    def main(team):
        made = Engine(directory, team, mode="reference", **engine)
        return join_pieces(made.answer(prompts, params), len(prompts)), made.stats.preemptions

    results = weft.simulate(main, world_size)
    assert all(result == results[0] for result in results)
    return results[0]


def close(found, expected):
    """Equal but for rounding of the log-probabilities."""
    assert [None if one is None else list(one) for one in found] == [
        None if one is None else list(one) for one in expected
    ]
    for one, other in zip(found, expected, strict=True):
        for token in one or ():
            assert one[token][1:] == other[token][1:] and abs(one[token].logprob - other[token].logprob) < 1e-4


def test_answers_and_prompts_have_the_same_ones_however_they_are_read(byte_model):
    """An answer's are those that it has as a part of a prompt: also in chunks, after preemption, and over ranks."""
    prompts = [*PROMPTS, "a prompt", "the last of them, and not the shortest one"]
    asked = {"logprobs": 3, "prompt_logprobs": 2, "repetition_penalty": 1.2}
    each = [{"logprobs": 0}, {}, {}, {}, asked]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, **one) for one in each]
    alone, _ = answers(byte_model, prompts, params)
    last, plain, *_, first = alone
    assert plain.logprobs is plain.prompt_logprobs is plain.cumulative_logprob is last.prompt_logprobs is None
    assert [list(one) for one in last.logprobs] == [[token] for token in last.token_ids]
    assert first.cumulative_logprob == sum(
        one[token].logprob for one, token in zip(first.logprobs, first.token_ids, strict=True)
    )
    for world_size, engine in ((1, SMALL[3]), (2, {"chunk_tokens": 5})):
        found, preemptions = answers(byte_model, prompts, params, world_size, **engine)
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]
        assert (preemptions > 0) == ("pages" in engine)
        close(found[-1].prompt_logprobs, first.prompt_logprobs)
        close(found[-1].logprobs, first.logprobs)
    assert len(first.prompt_logprobs) == len(prompts[-1]) and first.prompt_logprobs[0] is None


def test_an_answer_has_the_log_probabilities_that_it_has_as_a_prompt(byte_model):
    prompt = [10, 20, 30]
    [[answer], _] = answers(byte_model, [prompt], [SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True)])
    once = SamplingParams(max_tokens=1, prompt_logprobs=2)
    [[read], _] = answers(byte_model, [prompt + answer.token_ids], [once])
    close(read.prompt_logprobs[3:], answer.logprobs)
    assert read.prompt_logprobs[0] is None and list(read.prompt_logprobs[1])[:1] == [20]
    text = {token: one.decoded_token for token, one in answer.logprobs[0].items()}
    assert all(isinstance(value, str) for value in text.values())


def test_a_prompt_whose_pages_are_cached_is_scored_whole(byte_model):
    once, plain = SamplingParams(max_tokens=1, prompt_logprobs=1), SamplingParams(max_tokens=1)
    [_, scored], _ = answers(byte_model, [list(range(40))] * 2, [plain, once], max_batch=1, page_size=16)
    assert [None if one is None else next(iter(one)) for one in scored.prompt_logprobs] == [None, *range(1, 40)]
