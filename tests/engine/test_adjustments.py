"""Changed logits are those of transformers' processors, over any number of ranks; answers follow them also when read again."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import weft
from tests.engine.test_engine import PROMPTS, SMALL
from tests.engine.test_sampling import choose
from weft.engine import Engine, SamplingParams
from weft.engine.params import Kind, joint_kind
from weft.engine.slots import LONGEST_BAD_WORD, Adjusted, Adjustments, Entry

VOCAB = 40
ENDS = [3, 39]
BAD_WORDS = [[5], [7, 8], [9, 7, 11], [1] * LONGEST_BAD_WORD]
PARAMS = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.5, frequency_penalty=-1.25),
    SamplingParams(logit_bias={0: 4.0, 17: -100, 39: 2.5}, repetition_penalty=0.7),
    SamplingParams(allowed_token_ids=[2, 30, 39], logit_bias={30: 1.0}),
    SamplingParams(bad_words=["a", "b", "c", "d"]),
    SamplingParams(min_tokens=8, frequency_penalty=2.0),
    SamplingParams(),
]
PROMPT, ANSWER = [5, 7, 7, 20, 39], [30, 9, 7, 30, 7]


def entry(params, prompt, answer):
    if not params.adjusted:
        return None
    words = BAD_WORDS if params.bad_words else []
    return Entry(adjusted=Adjusted(params=params, ends=ENDS, bad_words=words), prompt=prompt, answer=answer)


def expected(params, logits, prompt, answer):
    """By transformers' processors, one after the other; the penalties of the answer alone by their definition."""
    transformers = pytest.importorskip("transformers")
    ids, own = torch.tensor([prompt + answer]), torch.tensor([answer], dtype=torch.long)
    x = logits.float()[None].clone()
    if params.allowed_token_ids is not None:
        x = transformers.PrefixConstrainedLogitsProcessor(lambda *_: list(params.allowed_token_ids), 1)(ids, x)
    if params.bad_words:
        x = transformers.NoBadWordsLogitsProcessor(BAD_WORDS)(own, x)
    if params.min_tokens:
        x = transformers.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ENDS)(ids, x)
    if params.logit_bias:
        x = transformers.SequenceBiasLogitsProcessor([[[t], b] for t, b in params.logit_bias.items()])(own, x)
    x = transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, x)
    for token, count in Counter(answer).items():
        x[0, token] = x[0, token] - params.frequency_penalty * count - params.presence_penalty
    return x[0]


def over_ranks(world_size, run):
    """`run(adjustments, columns)` for each rank's share of the vocabulary, joined."""
    size, parts = -(-VOCAB // world_size), []
    for start in range(0, size * world_size, size):
        head = SimpleNamespace(weight=torch.zeros(1), start=start, local_size=size)
        parts.append(run(Adjustments(head, len(PARAMS)), slice(start, start + size)))
    return torch.cat(parts, dim=-1)[..., :VOCAB]


def test_a_slot_has_nothing_of_the_sequence_before_that_asked_for_nothing():
    """Its tokens are noted too, where another of the batch has penalties."""
    asks, plain = PARAMS[1], SamplingParams()
    logits, position = torch.zeros(1, VOCAB), torch.tensor([len(PROMPT) + len(ANSWER)])

    def run(adjustments, columns):
        for tokens in ((), ANSWER):
            adjustments.enter(0, entry(asks, PROMPT, []))
            adjustments.enter(1, entry(plain, PROMPT, []))
            for number, token in enumerate(tokens):
                adjustments.note(slice(2), torch.tensor([token, token]), torch.full((2,), len(PROMPT) + number))
        adjustments.enter(1, entry(asks, [9], [30]))
        return adjustments.adjust(logits[:, columns], slice(1, 2), position)

    torch.testing.assert_close(over_ranks(1, run)[0], expected(asks, logits[0], [9], [30]), rtol=0, atol=0)


def test_a_bad_word_of_too_many_tokens_is_named_with_their_number():
    with pytest.raises(ValueError, match=rf"bad_words: .* has {LONGEST_BAD_WORD + 1} tokens; pass words of up to"):
        Adjusted(params=SamplingParams(bad_words=["a"]), ends=[], bad_words=[[1], [2] * (LONGEST_BAD_WORD + 1)])


@pytest.mark.parametrize("world_size", [1, 3])
def test_logits_are_those_of_transformers_processors_at_every_token(world_size):
    """Rows are filled behind 0 to 3 tokens of the answer, as after a preemption; the other tokens are noted one by one."""
    logits = torch.randn(len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    padded = torch.nn.functional.pad(logits, (0, 8), value=-torch.inf)
    for known in range(4):

        def run(adjustments, columns, known=known):
            for slot, params in enumerate(PARAMS):
                adjustments.enter(slot, entry(params, PROMPT, ANSWER[:known]))
            found = []
            for at in range(known, len(ANSWER) + 1):
                position = torch.full((len(PARAMS),), len(PROMPT) + at)
                found.append(adjustments.adjust(padded[:, columns], slice(len(PARAMS)), position))
                if at < len(ANSWER):
                    adjustments.note(slice(len(PARAMS)), torch.full((len(PARAMS),), ANSWER[at]), position)
            return torch.stack(found)

        for at, found in enumerate(over_ranks(world_size, run), known):
            for row, params in enumerate(PARAMS):
                assert torch.equal(found[row], expected(params, logits[row], PROMPT, ANSWER[:at])), (at, params)


def test_rows_by_index_and_moved_rows_are_the_same_and_a_left_one_changes_nothing():
    logits, position = torch.randn(1, VOCAB).bfloat16(), torch.tensor([len(PROMPT) + 2])

    def run(adjustments, columns):
        adjustments.enter(4, entry(PARAMS[1], PROMPT, ANSWER[:2]))
        adjustments.move([(4, 2)])
        found = [adjustments.adjust(logits[:, columns], torch.tensor([2]), position)]
        adjustments.note(torch.tensor([2]), torch.tensor([ANSWER[2]]), position)
        adjustments.note(torch.tensor([2]), torch.tensor([0]), torch.tensor([0]))  # of an empty slot
        found.append(adjustments.adjust(logits[:, columns], slice(2, 3), position + 1))
        adjustments.enter(2, None)
        return torch.stack((*found, adjustments.adjust(logits[:, columns], slice(2, 3), position)))

    for at, found in zip((2, 3), over_ranks(1, run), strict=False):
        assert torch.equal(found[0], expected(PARAMS[1], logits[0], PROMPT, ANSWER[:at]))
    assert torch.equal(over_ranks(1, run)[2], logits.float())


def test_draws_are_as_frequent_as_after_transformers_processors():
    """Pearson's chi-squared, five standard deviations allowed; over two ranks, with top_p behind the penalties.

    The kernels draw the same tokens.
    """
    params = SamplingParams(
        repetition_penalty=1.5, frequency_penalty=0.3, logit_bias={4: 3.0}, temperature=1.5, top_p=0.9
    )
    logits, draws = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2, 10_000
    after = expected(params, logits, PROMPT, ANSWER)
    kept = pytest.importorskip("transformers").TopPLogitsWarper(params.top_p)(None, after[None] / params.temperature)
    wanted = draws * kept[0].double().softmax(-1)

    def drawn(draws, fused):
        def adjustments(head):
            made = Adjustments(head, 1)
            made.enter(0, entry(params, PROMPT, ANSWER))
            return made, torch.zeros(draws, dtype=torch.int64)

        words = {"temperature": params.temperature, "top_p": params.top_p, "position": len(PROMPT + ANSWER)}
        words |= {"seed": torch.arange(draws), "kind": params.kind, "world_size": 2, "fused": fused}
        return choose(logits.expand(draws, -1), **words, adjustments=adjustments)

    tokens = drawn(draws, False)
    assert torch.equal(drawn(5, True), tokens[:5])
    found = torch.bincount(tokens, minlength=VOCAB)
    assert (found[wanted == 0] == 0).all()
    often = wanted > 5
    statistic, freedom = ((found - wanted)[often].square() / wanted[often]).sum(), int(often.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 1


ASKED = [
    SamplingParams(max_tokens=14, repetition_penalty=1.4, ignore_eos=True),
    SamplingParams(
        max_tokens=14, temperature=0.7, seed=3, frequency_penalty=1.5, bad_words=["e", "xy"], ignore_eos=True
    ),
    SamplingParams(max_tokens=14, ignore_eos=True),
    SamplingParams(max_tokens=14, allowed_token_ids=range(60, 90), presence_penalty=2.0, ignore_eos=True),
]


def answers(directory, world_size=1, fused=False, **engine):
    def main(team):
        made = Engine(directory, team, mode="replicated" if fused else "reference", **engine)
        pieces = made.answer([*PROMPTS, "and a last one"], ASKED)
        found = [[] for _ in ASKED]
        for piece in pieces:
            found[piece.prompt].append(piece.token_id)
        return found, made.stats.preemptions

    results = weft.simulate(main, world_size)
    assert all(result == results[0] for result in results)
    return results[0]


def test_answers_are_as_asked_for_in_slots_chunks_and_after_preemption(byte_model):
    plenty, _ = answers(byte_model)
    assert max(Counter(plenty[3]).values()) <= 2 and set(plenty[3]) <= set(range(60, 90))
    for engine in (SMALL[1], SMALL[3]):
        found, preemptions = answers(byte_model, **engine)
        assert found == plenty and (preemptions > 0) == ("pages" in engine)
    assert answers(byte_model, 2)[0] == plenty


def test_kernels_give_the_answers_of_the_torch_operations():
    asked = [
        SamplingParams(max_tokens=2, repetition_penalty=1.4, min_tokens=2, bad_words=["5"]),
        SamplingParams(max_tokens=2, temperature=1.0, seed=3, presence_penalty=1.0),
    ]

    def main(team):
        return [Engine(None, team, fused=fused).answer(["1+1=", "20+22="], asked) for fused in (False, True)]

    def tokens(team):
        return [[(piece.prompt, piece.token_id) for piece in pieces] for pieces in main(team)]

    [(by_torch, by_kernels)] = weft.simulate(tokens, 1)
    assert by_torch == by_kernels and len(by_torch) == 4


def test_every_kind_serves_those_within_it():
    kinds = [one.kind for one in ASKED]
    assert joint_kind(ASKED) == Kind.SAMPLED | Kind.ADJUSTED and kinds[2] == Kind.GREEDY
    assert Kind.NUCLEUS in Kind.TRUNCATED and Kind.SAMPLED in Kind.NUCLEUS and Kind.ADJUSTED not in Kind.TRUNCATED
