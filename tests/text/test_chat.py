"""Chat templates are rendered as transformers renders them, or refused in a line."""

import itertools
import json

import jinja2
import pytest
from tokenizers import pre_tokenizers

from weft.errors import CheckpointError
from weft.text.chat import ChatTemplate, prompt_of
from weft.text.tokenizer import load_tokenizer

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


def directory_of(path, byte_model, config, files=()):
    """Directory that transformers and weft both read: the byte model's tokenizer with these settings."""
    path.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_bytes((byte_model / name).read_bytes())
    files = {
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config),
        **dict(files),
    }
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return path


def as_transformers(directory, conversations, variables=({},)):
    """Assert that each conversation renders equally, or is refused by both."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(directory), ChatTemplate(directory)
    for messages, given in itertools.product(conversations, variables):
        try:
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given)
        except (jinja2.TemplateError, ValueError):
            with pytest.raises(ValueError):
                ours.render(messages, given)
        else:
            assert ours.render(messages, given) == expected, (messages, given)


VARIABLES = [{}, {"enable_thinking": False}, {"tools": [{"name": "größer", "x": 1}]}]
USER = [{"role": "user", "content": "hi"}]


def test_a_template_gives_what_transformers_makes_of_it(byte_model, tmp_path):
    config = {"chat_template": TEMPLATE, "eos_token": "<eos>"}
    as_transformers(directory_of(tmp_path, byte_model, config), CONVERSATIONS, VARIABLES)


FEATURES = {
    "absent lists": "{{ tools is none }} {{ tools is defined }} {{ documents is none }} {{ other is defined }} "
    "{{ messages | length }}",
    "given lists": "{% for one in tools or [] %}{{ one | tojson }}{% endfor %}{% for one in documents or [] %}"
    "{{ one.title }}{% endfor %}",
    "null fields": "{% for m in messages %}{{ m.content is defined }} {{ m.content is none }} "
    "{{ 'tool_calls' in m }} {{ m.keys() | list }} {{ m }}{% endfor %}",
    "fields of fields": "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "{{ call.function.arguments | tojson }} {{ call.id is none }}{% endfor %}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "tojson": "{{ messages | tojson }} {{ messages | tojson(indent=2) }} "
    "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }} "
    "{{ messages | tojson(ensure_ascii=True) }} {{ {'b': 1, 'a': '<é&>'} | tojson(sort_keys=true, indent=4) }}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ image_token }}|"
    "{{ audio_token }}|{{ add_bos_token }}"
    "|{{ bos_token is defined }}|{{ extra_special_tokens is defined }}",
    "variables": "{{ enable_thinking is defined and enable_thinking is false }} {{ bos_token }} "
    "{{ add_generation_prompt }}",
    "blocks": "{% for m in messages %}\n    {%- if m.role == 'user' %}\n  {{ m.role }}\n    {% else %}  x\n  "
    "{% endif %}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{% if loop.index == 4 %}"
    "{% break %}{% endif %}{{ loop.index }}{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content or '' }}"
    "{{ x }}{% endgeneration %}{% endfor %}{{ x }}",
    "namespace": "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'tool' %}{% set ns.found = true %}"
    "{% endif %}{% endfor %}{{ ns.n }} {{ ns.found }} {{ dict(a=1) }}",
    "macros": "{% macro show(m, mark='#') %}{{ mark }}{{ m.role | title }}{% endmacro %}"
    "{% for m in messages[::-1] %}{{ show(m) }}{% endfor %}",
    "strings": "{{ 'a<think>b'.split('<think>')[-1].lstrip() }} {{ messages[0].role.upper() }} {{ 'x' ~ 1 }} "
    "{{ ' y '.strip('\n ') }} {{ '%s' % 3 }}",
    "tests": "{% for m in messages %}{{ m.content is string }} {{ m.content is iterable }} {{ m is mapping }} "
    "{{ m.content is sequence }};{% endfor %}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }} "
    "{{ messages | groupby('role') | length }}",
    "a date": "{{ strftime_now('%Y') }} {% if strftime_now is defined %}yes{% endif %}",
    "a refusal": "{% if messages[0].role != 'system' %}{{ raise_exception('a system message first') }}{% endif %}ok",
    "undefined": "{{ messages[0].nothing }}{{ nothing }}|{{ nothing.more }}",
    "immutable": "{{ messages.append(1) }}",
}  # fmt: skip
CALL = {"id": None, "function": {"arguments": {"b": 1, "a": None}}}
FIELDS = [
    [{"role": "user", "content": "Grüße <&>", "name": None}, {"role": "assistant", "content": None, "tool_calls": []}],
    [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "", "reasoning": "since", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_calls": None},
        {"role": "assistant", "thinking": "hm", "content": "x", "reasoning_content": None},
    ],
]  # fmt: skip


def test_what_templates_use_is_as_in_transformers(byte_model, tmp_path):
    named = {"bos_token": "<s>", "eos_token": "<eos>", "image_token": "<img>", "pad_token": None, "add_bos_token": True}
    named["extra_special_tokens"] = {"audio_token": "<audio>"}
    variables = [{}, {"tools": []}, {"tools": [{"a": 1}], "documents": [{"title": "t", "text": "x"}]}]
    variables += [{"bos_token": "mine", "enable_thinking": False}, {"tools": None}]
    for name, template in FEATURES.items():
        directory = directory_of(tmp_path / name, byte_model, named | {"chat_template": template})
        as_transformers(directory, FIELDS, variables)


TOKENS = (
    "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ cls_token }}|{{ image_token }}|{{ x_token }}"
)
MAP = {
    "bos_token": "<s>",
    "eos_token": {"content": "<end>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False},
}
MAP |= {"image_token": "<img>"}  # fmt: skip
NAMED = {
    "a map alone": ({}, MAP),
    "a map behind the config": ({"eos_token": "<eos>", "pad_token": "<pad>"}, MAP),
    "a map that is older than the config": ({"eos_token": "<eos>", "added_tokens_decoder": {}}, MAP),
    "names of a model": (
        {"extra_special_tokens": {"x_token": "<x>", "image_token": "<i>"}, "image_token": "<img>"},
        {},
    ),
    "older names": ({"additional_special_tokens": ["<x>"], "bos_token": None}, {}),
    "a class of Qwen": ({"tokenizer_class": "Qwen2Tokenizer", "bos_token": None}, {}),
    "a class of GPT-2": ({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>"}, {}),
    "a class of Llama, of bytes": ({"tokenizer_class": "LlamaTokenizerFast", "eos_token": "<eos>"}, {}),
}


def test_special_tokens_have_their_names(byte_model, tmp_path):
    for name, (config, older) in NAMED.items():
        files = {"special_tokens_map.json": json.dumps(older)} if older else {}
        as_transformers(directory_of(tmp_path / name, byte_model, config | {"chat_template": TOKENS}, files), [USER])


# Composed and compatibility characters, digits of several scripts, blanks, line ends, contractions, special tokens.
HARD = (
    "e\u0301 é", "Å\u212b ﬁ", "न\u093fम", "a1234567 12", "١٢٣ ²", "  a bc", "\r\n\n  bc ", "don't DON'T", "a\u200bb\u00a0c",
    "<|im_end|> a<|endoftext|>b", "",
)  # fmt: skip


@pytest.mark.parametrize(
    ("made", "named", "model_type"),
    [
        ("GPT2Tokenizer", "GPT2Tokenizer", "llama"),
        *(("Qwen2Tokenizer", "Qwen2Tokenizer", kind) for kind in ("qwen2", "qwen3", "qwen3_next")),
        ("Qwen2Tokenizer", "LlamaTokenizerFast", "qwen2"),
        *(("Qwen3_5Tokenizer", name, "qwen3_5") for name in ("Qwen2Tokenizer", "Qwen3_5Tokenizer")),
    ],
)
def test_a_chat_with_a_tokenizer_of_its_class_has_the_ids_of_transformers(tmp_path, made, named, model_type):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    merges = [
        ("Ġ", "a"), ("b", "c"), ("1", "2"), ("12", "3"), ("Ġ", "Ġ"), ("Ã", "©"), ("'", "t"), ("Ċ", "Ċ"), ("Ġ", "bc"),
    ]  # fmt: skip
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges), "<|endoftext|>"]
    special = {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": TEMPLATE}
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    getattr(transformers, made)(vocab=vocabulary, merges=merges, **special).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template, tokenizer = ChatTemplate(tmp_path), load_tokenizer(tmp_path)
    assert type(theirs).__name__ == made
    for text in HARD:
        messages = [{"role": "user", "content": text}]
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert prompt_of(template, tokenizer, messages) == ids, text


def test_of_several_templates_the_one_for_tools_is_taken_with_tools(byte_model, tmp_path):
    several = [{"name": name, "template": f"{name} {{{{ tools }}}}"} for name in ("tool_use", "default", "rag")]
    variables = [{}, {"tools": []}, {"tools": None}, {"tools": [{"name": "f"}]}]
    files = {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "with tools"}
    for number, (config, more) in enumerate(
        [
            ({"chat_template": several}, {}),
            ({"chat_template": several[1:]}, {}),
            ({"chat_template": several[:1]}, {}),
            ({"chat_template": "config"}, files),
            ({"chat_template": "config"}, {"additional_chat_templates/rag.jinja": "rag"}),
        ]
    ):
        as_transformers(directory_of(tmp_path / str(number), byte_model, config, more), [USER], variables)


def test_the_template_of_a_file_of_its_own_comes_first(tmp_path):
    directory_with(tmp_path, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert ChatTemplate(tmp_path).render([{"role": "user", "content": "x"}]) == "new x"


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
    for name, value in (("messages", []), ("add_generation_prompt", False)):
        with pytest.raises(ValueError, match=f"variables of the chat template hold {name}=.*, which weft gives; leave"):
            template.render([{"role": "user", "content": "x"}], {name: value})
    template.render([{"role": "user", "content": "x"}], {"add_generation_prompt": True})
    with pytest.raises(ValueError, match="refuses these messages"):  # a sandbox
        ChatTemplate(
            directory_with(tmp_path, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
        ).render([])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 1 // messages[0].content }}", "fails on these messages: ZeroDivisionError: "),
        ("{{ range(10**9) }}", "fails on these messages: OverflowError: "),
        ("{{ 'x' + messages[0].content }}", "fails on these messages: TypeError: can only concatenate str"),
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
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', "chat_template is neither text nor a list of objects"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: not readable as text"),
        ("chat_template.jinja", b"{% generation %}", "not valid Jinja"),
    ],
)
def test_files_that_hold_no_template_are_refused(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        ChatTemplate(tmp_path)
    assert "\n" not in str(caught.value)
