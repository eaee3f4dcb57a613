"""What models write becomes the same content, reasoning and calls however it is cut into pieces."""

import json
import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.serve.parsing import (
    ALIASES,
    READERS,
    Parser,
    reasoning_parser_of,
    reasoning_parsers,
    tool_parser_of,
    tool_parsers,
)
from weft.serve.parsing.reasoning import MARKS, is_open

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": "string"}},
    }
}
PARIS = {"city": "Paris", "days": 3}
TRICKY = {"city": 'a "b" \\ {[</tool_call>', "days": [1, {"x": "}"}]}


class Example(NamedTuple):
    """Text of a model, its parsers, and what it says: content, reasoning, calls as (name, arguments)."""

    text: str
    calls: str | None = None
    reasoning: str | None = None
    content: str = ""
    thought: str = ""
    made: list = []
    opened: bool = False


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis \"x\"\nFrance\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=other>\n{\"a\": 1}\n</parameter>\n<parameter=note>\n5\n</parameter>\n</function>\n</tool_call>"
)  # fmt: skip
CODER_MADE = ("weather", {"city": 'Paris "x"\nFrance', "days": 3, "other": {"a": 1}, "note": "5"})
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Pa\\ris é</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)  # fmt: skip
DEEP = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```<｜tool▁call▁end｜>"
DEEP_31 = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
HARMONY = (
    "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + json.dumps(PARIS) + "<|call|>"
)  # fmt: skip
EXAMPLES = {
    "hermes": Example(hermes("weather", PARIS), "hermes", made=[("weather", PARIS)]),
    "hermes, two calls between content": Example(
        f"Let me see.\n{hermes('weather', TRICKY)}\n{hermes('now', {})}\n",
        "hermes", content="Let me see.", made=[("weather", TRICKY), ("now", {})],
    ),
    "hermes, after reasoning": Example(
        f"<think>\nA city < 3.\n</think>\n\nOk\n\n{hermes('weather', PARIS)}",
        "hermes", "qwen3", "Ok", "A city < 3.", [("weather", PARIS)],
    ),
    "hermes, arguments first and further keys": Example(
        '<tool_call>{"id": 5, "arguments": {"city": "Paris", "days": 3}, "type": "function", "name": "weather"}</tool_call>',
        "hermes", made=[("weather", PARIS)],
    ),
    "hermes, arguments in a string": Example(
        f'<tool_call>{json.dumps({"name": "weather", "arguments": json.dumps(PARIS)})}</tool_call>',
        "hermes", made=[("weather", PARIS)],
    ),
    "hermes, no arguments": Example('<tool_call>\n{"name": "now"}\n</tool_call>', "hermes", made=[("now", {})]),
    "hermes, no call": Example(
        "a\n <tool_call>\nnothing</tool_call> b\n", "hermes", content="a\n <tool_call>\nnothing</tool_call> b\n"
    ),
    "hermes, no name": Example(
        'a<tool_call>{"arguments": {}}</tool_call> <tool', "hermes", content='a<tool_call>{"arguments": {}}</tool_call> <tool'
    ),
    "hermes, a name that no answer can hold": Example(
        'a<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "hermes",
        content='a<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    ),
    "hermes, arguments in a string that no answer can hold": Example(
        '<tool_call>{"name": "weather", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>', "hermes",
        made=[("weather", '{"a": "\ud800"}')],
    ),
    "plain text": Example(" a < b <tool_call\n", "hermes", "qwen3", content=" a < b <tool_call\n"),
    "qwen3_coder": Example(f"I see.\n{CODER}\n{CODER}", "qwen3_coder", content="I see.", made=[CODER_MADE] * 2),
    "qwen3_coder without the outer tag": Example(
        CODER.removeprefix("<tool_call>\n"), "qwen3_coder", made=[CODER_MADE]
    ),
    "qwen3_coder, no arguments": Example(
        "<tool_call>\n<function=now>\n</function>\n</tool_call>", "qwen3_coder", made=[("now", {})]
    ),
    "llama3_json": Example(
        '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}', "llama3_json", made=[("weather", PARIS)]
    ),
    "llama3_json, two after a tag": Example(
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 3}}; {"name": "now", "parameters": {}}',
        "llama3_json", made=[("weather", PARIS), ("now", {})],
    ),
    "llama3_json, an object that is no call": Example(' {"answer": [1, 2]} ', "llama3_json", content=' {"answer": [1, 2]} '),
    "llama3_json, code": Example("<|python_tag|>print(1)", "llama3_json", content="<|python_tag|>print(1)"),
    "mistral": Example(
        f'Sure.[TOOL_CALLS][{{"name": "weather", "arguments": {json.dumps(PARIS)}}}, {{"name": "now", "arguments": {{}}}}]',
        "mistral", content="Sure.", made=[("weather", PARIS), ("now", {})],
    ),
    "mistral, version 13": Example(
        f"[TOOL_CALLS]weather[ARGS]{json.dumps(TRICKY)}[TOOL_CALLS]now[ARGS]{{}}", "mistral",
        made=[("weather", TRICKY), ("now", {})],
    ),
    "mistral, version 11": Example(
        f"[THINK]A b.[/THINK][TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{json.dumps(PARIS)}", "mistral", "mistral",
        thought="A b.", made=[("weather", PARIS)],
    ),
    "mistral, no mark before arguments": Example(
        f"[TOOL_CALLS]weather{json.dumps(PARIS)}", "mistral", made=[("weather", PARIS)]
    ),
    "mistral, no call": Example("[TOOL_CALLS] or not", "mistral", content="[TOOL_CALLS] or not"),
    "glm45": Example(
        f"<think>Hm</think>\n{GLM}\n{GLM}", "glm45", "glm45", thought="Hm",
        made=[("weather", {"city": "Pa\\ris é", "days": 3})] * 2,
    ),
    "glm45 without newlines": Example(
        GLM.replace("\n", ""), "glm45", made=[("weather", {"city": "Pa\\ris é", "days": 3})]
    ),
    "glm45, no arguments": Example("<tool_call>now</tool_call>", "glm45", made=[("now", {})]),
    "deepseek_v3": Example(
        f"Ok.<｜tool▁calls▁begin｜>{DEEP % json.dumps(PARIS)}\n{DEEP % json.dumps(TRICKY)}<｜tool▁calls▁end｜>",
        "deepseek_v3", "deepseek_v3", content="Ok.", made=[("weather", PARIS), ("weather", TRICKY)],
    ),
    "deepseek_v3, version 3.1": Example(
        f"why</think>Ok.<｜tool▁calls▁begin｜>{DEEP_31 % json.dumps(PARIS)}{DEEP_31 % '{}'}<｜tool▁calls▁end｜>",
        "deepseek_v3", "deepseek_r1", "Ok.", "why", [("weather", PARIS), ("weather", {})], True,
    ),
    "openai": Example(
        HARMONY, "openai", "openai_gptoss", content="Let me look.", thought="I need it.", made=[("weather", PARIS)]
    ),
    "openai, calls are not read": Example(
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>It is.<|return|>",
        None, "openai_gptoss", content="It is.", thought="So.",
    ),
    "openai, marks in arguments": Example(
        HARMONY.replace("Paris", "<|call|><|end|>"), "openai", "openai_gptoss", "Let me look.", "I need it.",
        [("weather", {"city": "<|call|><|end|>", "days": 3})],
    ),
    "openai, no arguments": Example(
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|><|call|>", "openai", made=[("now", {})]
    ),
    "json": Example(
        '[{"name": "weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "now", "arguments": {}}]', "json",
        made=[("weather", PARIS), ("now", {})],
    ),
    "reasoning that does not end": Example("<think>\nA b", None, "qwen3", thought="A b"),
    "reasoning that the prompt begins": Example("A <b\n</think>\n\nc\n", None, "qwen3", "c\n", "A <b", opened=True),
    "no reasoning": Example("<thin", None, "qwen3", content="<thin"),
}  # fmt: skip


def parsed(example, pieces):
    """(content, reasoning, calls) of a text in pieces, checked for the order of deltas."""
    parser = Parser(example.calls, example.reasoning, SCHEMAS, opened=example.opened)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.feed("", last=True)
    content, thought = ("".join(one.text for one in deltas if one.kind == kind) for kind in ("content", "reasoning"))
    calls: list[list] = []
    for one in deltas:
        if one.kind == "call":
            assert one.text or one.name, "a delta says something"
            if one.name is not None:
                assert one.index == len(calls) and one.id
                calls.append([one.name, ""])
            calls[one.index][1] += one.text
            assert one.index == len(calls) - 1
    assert parser.called == bool(calls)
    return content, thought, calls


def whole(example):
    content, thought, calls = parsed(example, [example.text])
    return content, thought, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_text_says_the_same_at_every_split_into_two_and_letter_by_letter(name):
    example = EXAMPLES[name]
    assert whole(example) == (example.content, example.thought, example.made)
    expected = parsed(example, [example.text])
    assert parsed(example, list(example.text)) == expected
    for at in range(len(example.text) + 1):
        assert parsed(example, [example.text[:at], example.text[at:]]) == expected, example.text[:at]


@given(st.sampled_from(sorted(EXAMPLES)), st.randoms(use_true_random=False), st.booleans())
def test_random_splits_of_texts_also_cut_and_mixed_say_the_same(name, draw: random.Random, mixed):
    example = EXAMPLES[name]
    text = example.text
    if mixed:  # of parts of this and another text, which are wrong calls mostly
        other = EXAMPLES[draw.choice(sorted(EXAMPLES))].text
        text = text[: draw.randrange(len(text) + 1)] + other[draw.randrange(len(other) + 1) :]
    text = text[: draw.randrange(len(text) + 1)] if draw.random() < 0.3 else text
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    cut = example._replace(text=text)
    assert parsed(cut, pieces) == parsed(cut, [text])


def test_arguments_stream_before_they_end():
    parser = Parser("hermes", None)
    deltas = [delta for letter in hermes("weather", PARIS) for delta in parser.feed(letter)]
    assert deltas[0].name == "weather" and [one.text for one in deltas[1:4]] == ["{", '"', "c"]
    coder = Parser("qwen3_coder", None, SCHEMAS)
    texts = [one.text for letter in "<function=weather><parameter=city>Par" for one in coder.feed(letter)]
    assert "".join(texts) == '{"city": "Par'


def test_a_call_that_is_cut_has_the_arguments_so_far():
    for name, text, arguments in (
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pa', '{"city": "Pa'),
        ("qwen3_coder", "<function=weather><parameter=city>Pa", '{"city": "Pa'),
        ("glm45", "<tool_call>weather<arg_key>days</arg_key><arg_value>3", '{"days": '),
    ):
        assert parsed(Example(text, name), [text])[2] == [["weather", arguments]], name


def test_a_text_of_many_marks_is_read_in_linear_time():
    text = "<tool_call>" * 20_000 + "{" * 20_000
    for name in READERS:
        parsed(Example(text, name), [text[at : at + 1000] for at in range(0, len(text), 1000)])


def test_ids_are_new_and_of_the_length_that_mistral_takes():
    def ids(name, text):
        return [one.id for one in Parser(name, None).feed(text, last=True) if one.id]

    text = EXAMPLES["mistral"].text
    first, second = ids("mistral", text)
    assert first != second and len(first) == 9 and first.isalnum()
    assert ids("hermes", EXAMPLES["hermes"].text)[0].startswith("call_")


def test_parsers_follow_the_chat_template():
    for template, calls, reasoning in (
        ("{{ messages[-1].content }}", None, None),
        ("<tool_call>{{ x | tojson }}</tool_call>", "hermes", None),
        ("<tool_call>\n<function= </think>", "qwen3_coder", "qwen3"),
        ("<tool_call> <arg_key> </think>", "glm45", "glm45"),
        ("<｜tool▁calls▁begin｜> <｜Assistant｜><think>\\n", "deepseek_v3", "deepseek_r1"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<|start|>assistant<|channel|>", "openai", "openai_gptoss"),
        ("Environment: ipython", "llama3_json", None),
    ):
        assert (tool_parser_of(template), reasoning_parser_of(template)) == (calls, reasoning), template
    assert {"hermes", "qwen3_coder", "llama3_json", "mistral", "glm45", "deepseek_v3", "openai"} == set(
        tool_parsers()
    ) - {*ALIASES}
    assert {"qwen3", "deepseek_r1", "glm45", "openai_gptoss"} < set(reasoning_parsers())
    assert is_open(MARKS["qwen3"], "<|im_start|>assistant\n<think>\n") and not is_open(
        MARKS["qwen3"], "<think>\n\n</think>\n\n"
    )
    assert is_open(MARKS["deepseek_r1"], "<｜Assistant｜>") and not is_open(
        MARKS["deepseek_r1"], "<｜Assistant｜></think>"
    )
