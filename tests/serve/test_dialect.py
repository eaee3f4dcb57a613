"""Answers are read, and held to grammars, by the chat template of the model."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from weft.engine.answers import Piece
from weft.engine.params import SamplingParams
from weft.serve.checks import BadField
from weft.serve.dialect import Dialect
from weft.serve.fields import Asked
from weft.serve.reply import delta_of, message_of

NOW = {"type": "function", "function": {"name": "now"}}
MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|end|>",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (*MARKS, "<|odd|>")])
    return tokenizer


@pytest.fixture
def dialect(tokenizer, tmp_path):
    def made(template, tool_parser=None, reasoning_parser=None):
        (tmp_path / "chat_template.jinja").write_text(template)
        return Dialect(tmp_path, tokenizer, tool_parser, reasoning_parser)

    return made


def asked(**body):
    return Asked.of({"messages": [{"role": "user", "content": "x"}], **body}, True, SamplingParams())


def pieces(tokenizer, text):
    tokens = tokenizer.encode(text).ids
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    last = len(tokens) - 1
    return [
        Piece(0, one, token, "eos" if at == last else None)
        for at, (one, token) in enumerate(zip(texts, tokens, strict=True))
    ]


QWEN = "{{ tools }} <tool_call> </think> enable_thinking"


def test_variables_are_those_that_the_template_reads(dialect):
    qwen, plain = dialect(QWEN), dialect("{{ messages }}")
    assert qwen.variables(asked(tools=[NOW], reasoning_effort="none")) == {"tools": [NOW], "enable_thinking": False}
    assert qwen.variables(asked(reasoning_effort="high", chat_template_kwargs={"a": 1})) == {
        "a": 1,
        "enable_thinking": True,
    }
    assert dialect("reasoning_effort").variables(asked(reasoning_effort="low")) == {"reasoning_effort": "low"}
    assert dialect("documents").variables(asked(documents=[{"text": "x"}])) == {"documents": [{"text": "x"}]}
    for body in ({"tools": [NOW]}, {"documents": []}, {"reasoning_effort": "low"}):
        [field] = body
        with pytest.raises(
            BadField, match=f"{field} is not supported by this model: its chat template does not read it"
        ):
            plain.variables(asked(**body))
    assert dialect("{{ messages }}", "hermes").variables(asked(tools=[NOW])) == {"tools": [NOW]}  # asked for by name


def test_a_developer_is_the_system_where_the_template_does_not_know_it(dialect):
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    assert [one["role"] for one in dialect("system").messages(messages)] == ["system", "user"]
    assert dialect("developer").messages(messages) == messages


def test_arguments_are_text_where_the_template_joins_them_to_text(dialect):
    call = {"type": "function", "function": {"name": "now", "arguments": {"a": "é"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    joins = "{{ 'x' + tool['function']['arguments'] + 'y' }}"
    assert dialect(joins).messages(messages)[0]["tool_calls"][0]["function"]["arguments"] == '{"a": "é"}'
    for template in (
        "{{ tool.function.arguments | tojson }}",
        "{% for key in call.arguments %}{{ a + b }}{% endfor %}",
    ):
        assert dialect(template).messages(messages) == messages


def test_parsers_are_of_the_template_or_by_name(dialect):
    assert (dialect(QWEN).tool_parser, dialect(QWEN).reasoning_parser) == ("hermes", "qwen3")
    assert dialect(QWEN, "qwen3_xml").tool_parser == "qwen3_coder"
    named = dialect(QWEN, "none", "deepseek_r1")
    assert (named.tool_parser, named.reasoning_parser) == (None, "deepseek_r1")


def test_the_end_of_a_prompt_opens_or_closes_reasoning(dialect, tokenizer):
    qwen = dialect(QWEN)
    for end, opened, reasoning in (
        ("<think>\n", True, "qwen3"),
        ("<think>\n\n</think>\n\n", False, None),
        ("x", False, "qwen3"),
    ):
        prompt = tokenizer.encode(f"x{end}").ids
        params = qwen.params(asked(), prompt)
        assert params.structured_outputs is None and params.skip_special_tokens == (reasoning is None)
        said = message_of(qwen.reply(asked(), prompt).push(pieces(tokenizer, "a</think>b")))
        assert said.get("reasoning_content") == ("a" if opened else None), end


def test_special_tokens_that_are_no_marks_have_no_text(dialect, tokenizer):
    qwen, prompt = dialect(QWEN), tokenizer.encode("x").ids
    text = '<think>a<|odd|>b</think>c<|odd|><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    message = message_of(qwen.reply(asked(tools=[NOW]), prompt).push(pieces(tokenizer, text)))
    assert (message["reasoning_content"], message["content"]) == ("ab", "c")
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    kept = asked(tools=[NOW], skip_special_tokens=False)
    assert message_of(qwen.reply(kept, prompt).push(pieces(tokenizer, text)))["reasoning_content"] == "a<|odd|>b"


def test_one_call_is_left_where_calls_may_not_be_parallel_and_reasoning_may_be_hidden(dialect, tokenizer):
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    text = f"<think>a</think>{call}{call}"
    reply = dialect(QWEN).reply(asked(tools=[NOW], parallel_tool_calls=False, include_reasoning=False), [])
    deltas = [delta_of(reply.push([piece])) for piece in pieces(tokenizer, text)]
    calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
    assert [one["index"] for one in calls] == [0] * len(calls) and calls[0]["type"] == "function"
    assert not any("reasoning_content" in delta for delta in deltas) and reply.called


@pytest.mark.parametrize("template, parser, begins", [
    (QWEN, "hermes", "<tool_call>"),
    ("{{ tools }} [TOOL_CALLS]", "mistral", "[TOOL_CALLS]"),
    ("{{ tools }} <|channel|>", "openai", "<|channel|>"),
    ("{{ tools }} <arg_key>", "json", None),
    ("{{ tools }}", "json", None),
])  # fmt: skip
def test_forced_calls_have_the_form_of_the_model_or_are_a_list(dialect, tokenizer, template, parser, begins):
    known, offered = dialect(template), asked(tools=[NOW], tool_choice="required")
    rules = known.params(offered, tokenizer.encode("x").ids).structured_outputs.grammar.split("\n")
    calls = next(line for line in rules if line.startswith("call0:"))
    assert known._frame()[0] == parser
    assert (f"<[{tokenizer.token_to_id(begins)}]>" if begins else '"{\\"name\\": \\"now\\"') in calls


def test_fields_that_cannot_go_together_are_refused(dialect):
    form = {"response_format": {"type": "json_object"}}
    wrong = [
        (QWEN, {"tools": [NOW], "tool_choice": "required", **form}, "with a tool_choice that forces a call"),
        ("{{ tools }}", {"thinking_token_budget": 5}, "thinking_token_budget is for models that end their"),
        (QWEN, {"tools": [NOW], "structured_outputs": {"grammar": 'start: "a"'}}, "cannot stand beside tools"),
    ]  # fmt: skip
    for template, body, message in wrong:
        with pytest.raises(BadField, match=message):
            dialect(template).params(asked(**body), [])
    assert dialect("{{ x }}").params(asked(**form), []).structured_outputs.json_object  # as it was asked for
