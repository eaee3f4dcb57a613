"""Chat templates are rendered as transformers renders them, or refused in a line."""

import json

import pytest

from weft.engine.chat import ChatTemplate
from weft.errors import CheckpointError

TEMPLATE = """{%- if tools %}
    {{- 'tools: ' + tools | tojson }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role not in ('system', 'user') %}
        {{- raise_exception('begin with the user') }}
    {%- endif %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {%- set eos_token = 'of the block' %}
            {{- message.content or '' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {%- if eos_token %}{{- eos_token }}{%- endif %}
{%- endif %}"""
CONVERSATIONS = [
    [{"role": "user", "content": 'Grüße <&> "quoted"'}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\n\nb"},
        {"role": "skip", "content": ""},
    ],
    [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "tool_calls": [{"name": "größer"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "three"},
    ],
]


def directory_with(path, **config):
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"tools": [{"name": "größer", "x": 1}]}])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_template_gives_what_transformers_makes_of_it(byte_model, messages, variables):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(byte_model / "tokenizer.json"), eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    directory = byte_model.parent
    special = {"eos_token": {"content": "<eos>", "lstrip": False}}
    ours = ChatTemplate(directory_with(directory, chat_template=TEMPLATE, **special))
    assert ours.render(messages, variables) == expected


def test_the_template_of_a_file_of_its_own_comes_first(tmp_path):
    directory_with(tmp_path, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert ChatTemplate(tmp_path).render([{"role": "user", "content": "x"}]) == "new x"


def test_of_several_templates_the_default_one_is_taken(tmp_path):
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert ChatTemplate(directory_with(tmp_path, chat_template=several)).render([]) == "yes"


def test_what_cannot_be_rendered_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no chat template in tokenizer_config.json"):
        ChatTemplate(tmp_path)
    with pytest.raises(CheckpointError, match="its chat template is not valid Jinja"):
        ChatTemplate(directory_with(tmp_path, chat_template="{% if %}"))
    template = ChatTemplate(directory_with(tmp_path, chat_template=TEMPLATE))
    with pytest.raises(ValueError, match="the chat template refuses these messages: begin with the user"):
        template.render([{"role": "assistant", "content": "x"}])
    with pytest.raises(ValueError, match=r"messages\[0\]='hello' is not a dictionary with a role"):
        template.render(["hello"])
    with pytest.raises(ValueError, match="refuses these messages"):  # a sandbox
        ChatTemplate(
            directory_with(tmp_path, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
        ).render([])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 1 // messages[0].content }}", "fails on these messages: ZeroDivisionError: "),
        ("{{ range(10**9) }}", "fails on these messages: OverflowError: "),
        ("{{ 'x' + messages[1].content }}", "fails on these messages: TypeError: can only concatenate str"),
        ("{{ raise_exception('a\nb') }}", "refuses these messages: a b"),
        ("{{ messages[2].content + 'x' }}", "refuses these messages: 'dict object' has no attribute 'content'"),
    ],
)
def test_a_template_that_fails_says_why_in_a_line(tmp_path, template, says):
    messages = [{"role": "user", "content": 0}, {"role": "assistant", "content": None}, {"role": "assistant"}]
    with pytest.raises(ValueError) as caught:
        ChatTemplate(directory_with(tmp_path, chat_template=template)).render(messages)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"variables=\['x'\] is not a dictionary"):
        ChatTemplate(tmp_path).render(messages, ["x"])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: holds a JSON list, not an object"),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', "chat_template is a list of what are not objects"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: not readable as text"),
        ("chat_template.jinja", b"{% generation %}", "not valid Jinja"),
    ],
)
def test_files_that_hold_no_template_are_refused(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        ChatTemplate(tmp_path)
    assert "\n" not in str(caught.value)
