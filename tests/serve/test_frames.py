"""A grammar of calls lets a model write what its parser reads as calls of these functions, whatever tokens it chooses."""

import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from weft.serve.parsing import SPECIAL_MARKS, Parser
from weft.serve.parsing.frames import CHANNEL, FRAMES, Thinking, Tokens, grammar_of
from weft.serve.parsing.reasoning import HARMONY, MARKS
from weft.text.untrusted import compile_grammar, read_tokenizer

CALLS = {
    "get.weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 0, "maximum": 20},
            "unit": {"$ref": "#/$defs/Unit"},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"Unit": {"enum": ["</tool_call>", 'a "b"', "<|call|>"]}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each byte and each mark."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(sorted(letters))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(mark, special=mark[0] == "[") for mark in sorted(SPECIAL_MARKS)])
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return read_tokenizer(tokenizer, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<eos>")])


def written(tokenizer, vocabulary, grammar, draw):
    """Text of random tokens that the grammar allows."""
    matcher, text, end = compile_grammar(vocabulary, "grammar", grammar), [], tokenizer.token_to_id("<eos>")
    while not matcher.is_stopped():
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(tokenizer.get_vocab_size()) if bits >> token & 1]
        assert allowed, tokenizer.decode(text, skip_special_tokens=False)
        token = end if end in allowed and draw.random() < 0.5 else draw.choice(allowed)
        if token == end:
            break
        text.append(token)
        matcher.consume_token(token)
    return tokenizer.decode(text, skip_special_tokens=False)


def tokens_of(tokenizer):
    added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    return Tokens(added, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<eos>")])


@pytest.mark.parametrize("name", FRAMES)
def test_what_a_grammar_of_calls_allows_parses_as_calls(tokenizer, vocabulary, name):
    marks = CHANNEL if name == "openai" else MARKS["qwen3"]
    thinking = Thinking(begin=marks.begin, end=marks.end, opened=False, budget=6)
    for seed in range(8):
        draw = random.Random(seed)
        grammar = grammar_of(tokens_of(tokenizer), thinking, FRAMES[name], CALLS, parallel=seed % 2 == 0)
        text = written(tokenizer, vocabulary, grammar, draw)
        parser = Parser(name, HARMONY if name == "openai" else "qwen3", CALLS)
        deltas = [*parser.feed(text), *parser.feed("", last=True)]
        assert not [one for one in deltas if one.kind == "content"], text
        calls = {}
        for one in deltas:
            if one.kind == "call":
                calls.setdefault(one.index, [one.name, ""])[1] += one.text
        assert calls and (seed % 2 == 0 or len(calls) == 1), text
        for called, arguments in calls.values():
            arguments = json.loads(arguments)
            assert {*CALLS[called].get("required", [])} <= {*arguments} <= {*CALLS[called]["properties"]}, text


def test_an_answer_or_calls_where_both_are_given(tokenizer, vocabulary):
    said = set()
    for seed in range(40):
        grammar = grammar_of(tokens_of(tokenizer), None, FRAMES["hermes"], CALLS, answer='%json {"type": "integer"}')
        parser = Parser("hermes", None, CALLS)
        parser.feed(written(tokenizer, vocabulary, grammar, random.Random(seed)), last=True)
        said.add(parser.called)
    assert said == {True, False}


@pytest.mark.parametrize("name", ["qwen3", HARMONY])
def test_reasoning_ends_within_its_budget_whether_the_prompt_or_the_answer_begins_it(tokenizer, vocabulary, name):
    """Random tokens hardly end it by themselves."""
    marks, frame = (CHANNEL, FRAMES["openai"]) if name == HARMONY else (MARKS[name], None)
    after = "<|channel|>final<|message|>" if name == HARMONY else "<tool_call>x<think>"
    for budget, opened in ((0, False), (3, False), (3, name != HARMONY)):
        grammar = grammar_of(
            tokens_of(tokenizer), Thinking(begin=marks.begin, end=marks.end, opened=opened, budget=budget), frame
        )
        matcher = compile_grammar(vocabulary, "grammar", grammar)

        def allowed(text, matcher=matcher):
            """Number of tokens of a text that the grammar allows, each by its mask; drafts before them change nothing."""
            matcher.reset()
            ids = tokenizer.encode(text).ids
            for count, token in enumerate(ids):
                if taken := matcher.try_consume_tokens(ids[count : count + 2]):
                    matcher.rollback(taken)
                if not int.from_bytes(matcher.compute_bitmask(), "little") >> token & 1:
                    return count, len(ids)
                matcher.consume_token(token)
            return len(ids), len(ids)

        begun = "" if opened else marks.begin
        count, size = allowed(f"{begun}{'abcdef'[:budget]}{marks.end}{after}")
        assert count == size, (budget, opened)
        count, size = allowed(f"{begun}{'abcdef'[: budget + 1]}")
        assert count == size - 1, (budget, opened)
        count, size = allowed("<|channel|>final<|message|>" if name == HARMONY else "ab<think>")
        assert opened or count == size
