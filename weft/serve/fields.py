"""Fields of a request as OpenAI's API names them, and vLLM's further ones: read, or refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.arguments import check_bool, check_int, is_integer, quoted, shortened
from weft.engine.params import Prompt, SamplingParams, as_prompts, check_strings
from weft.serve.checks import BadField, a_text, an_object, checked, given_of, of_type, refuse
from weft.serve.conversation import messages_of
from weft.serve.tools import Tools
from weft.text.structure import StructuredOutputsParams

# OpenAI's.
MOST_CHOICES = 128
COMPLETION_TOKENS = 16
# Strings of `stop` and of `bad_words`, and their characters together: OpenAI's limit is 4 strings.
MOST_STRINGS, MOST_CHARACTERS = 128, 8192

# Field of a request: parameter of SamplingParams.
SAMPLING = {
    name: name
    for name in (
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
        "allowed_token_ids", "bad_words", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos",
        "include_stop_str_in_output", "skip_special_tokens", "cache_salt",
    )
} | {"max_completion_tokens": "max_tokens"}  # fmt: skip
# Fields that this server reads itself.
OF_BOTH = (
    "model", "n", "stream", "stream_options", "return_token_ids", "logprobs", "response_format", "structured_outputs"
)  # fmt: skip
OF_CHAT = (
    *OF_BOTH, "messages", "chat_template_kwargs", "documents", "include_reasoning", "reasoning_effort", "thinking_token_budget",
    "tool_choice", "tools", "top_logprobs",
)  # fmt: skip
OF_COMPLETIONS = (*OF_BOTH, "prompt", "echo")
# Fields that say something of the client and ask for nothing of the model, with their type in JSON.
NOT_OF_THE_MODEL: dict[str, type] = {
    "client_metadata": dict,  # of Codex
    "metadata": dict,
    "parallel_tool_calls": bool,  # for tools, which say what it asks
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "user": str,
}
# Fields of the API that are not supported, with values that ask for nothing, beside null.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Fields of a request to complete a conversation or prompts.

    messages, variables  of a conversation; None of prompts
    documents, effort    further variables of the chat template; None: not given
    tools                functions that the model may call; None: none
    thinking_budget      most tokens of reasoning; None: any number
    include_reasoning    the answer has the reasoning, apart from its content
    prompts              of completions; empty of a conversation
    include_usage        a stream ends with its usage
    return_token_ids     choices have their token ids, as of vLLM
    echo                 the prompt stands before its completion, with its log-probabilities where they are asked for
    prompt_only          max_tokens is 0: the answer is the echo alone
    """

    model: str | None
    messages: list[dict[str, Any]] | None
    variables: dict[str, Any] | None
    prompts: list[Prompt]
    params: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    echo: bool = False
    prompt_only: bool = False
    documents: list[Any] | None = None
    effort: str | None = None
    tools: Tools | None = None
    thinking_budget: int | None = None
    include_reasoning: bool = True

    @classmethod
    def of_prompts(cls, prompts: list[Prompt], params: SamplingParams, model: str | None = None) -> Asked:
        """Request to answer each prompt once."""
        return cls(
            model=model, messages=None, variables=None, prompts=prompts, params=params, n=1, stream=False, include_usage=False,
            return_token_ids=False,
        )  # fmt: skip

    @classmethod
    def of(cls, body: object, chat: bool, defaults: SamplingParams) -> Asked:
        """Fields of a decoded JSON body. BadField for any that is wrong, unknown or not supported."""
        given = given_of(body)
        _check_names(given, OF_CHAT if chat else OF_COMPLETIONS)
        stream = checked("stream", check_bool, given.get("stream", False))
        needed = "messages" if chat else "prompt"
        if needed not in given:
            raise BadField(f"{needed} is missing", needed)
        echo = not chat and checked("echo", check_bool, given.get("echo", False))
        prompt_only = echo and type(given.get("max_tokens")) is int and given["max_tokens"] == 0
        if prompt_only:
            given["max_tokens"] = 1  # a pass over the prompt chooses a token, which is left out
        return cls(
            echo=echo,
            prompt_only=prompt_only,
            model=checked("model", a_text, given.get("model")),
            messages=messages_of(given["messages"]) if chat else None,
            variables=checked("chat_template_kwargs", an_object, given.get("chat_template_kwargs")),
            prompts=[] if chat else prompts_of("prompt", given["prompt"]),
            params=_params(given, chat, replace(defaults, max_tokens=None if chat else COMPLETION_TOKENS, seed=None)),
            n=checked("n", lambda name, n: check_int(name, n, 1, MOST_CHOICES), given.get("n", 1)),
            stream=stream,
            include_usage=_include_usage(given.get("stream_options"), stream),
            return_token_ids=checked("return_token_ids", check_bool, given.get("return_token_ids", False)),
            **(_of_chat(given) if chat else {}),
        )


def _check_names(given: Mapping[str, Any], own: Collection[str]) -> None:
    """BadField for a field that is unknown or not supported. own: names of the path's fields."""
    for name, value in given.items():
        if (kind := NOT_OF_THE_MODEL.get(name)) is not None:
            checked(name, of_type(kind), value)
        elif name not in own and name not in SAMPLING:
            refuse(name, value, UNSUPPORTED, (*own, *SAMPLING))


def _of_chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a conversation alone."""
    budget = checked("thinking_token_budget", _budget, given.get("thinking_token_budget"))
    return {
        "documents": checked("documents", of_type(list), given.get("documents")),
        "effort": checked("reasoning_effort", a_text, given.get("reasoning_effort")),
        "tools": Tools.of(given),
        "thinking_budget": None if budget == -1 else budget,
        "include_reasoning": checked("include_reasoning", check_bool, given.get("include_reasoning", True)),
    }


def _budget(name: str, value: object) -> None:
    if not is_integer(value) or not -1 <= value < 1 << 31:
        raise ValueError(f"{name}={quoted(value)} is not a number of tokens, or -1 for any number")


def _include_usage(options: object, stream: bool) -> bool:
    if options is None:
        return False
    checked("stream_options", an_object, options)
    for name, value in options.items():
        if name != "include_usage" and value not in (None, False):
            raise BadField(f"stream_options.{shortened(name)} is not supported; leave it out", "stream_options")
    usage = options.get("include_usage")
    # Of an answer that is no stream the usage is always there.
    return usage is not None and checked("stream_options.include_usage", check_bool, usage) and stream


def _params(given: Mapping[str, Any], chat: bool, defaults: SamplingParams) -> SamplingParams:
    if given.get("max_tokens", tokens := given.get("max_completion_tokens")) != tokens and tokens is not None:
        raise BadField("max_tokens and max_completion_tokens differ; send the latter alone", "max_tokens")
    parameters: dict[str, object] = {"logprobs": _logprobs(given, chat), "structured_outputs": _structure(given)}
    if not chat and given.get("echo"):
        parameters["prompt_logprobs"] = parameters["logprobs"]
    for name, value in given.items():
        if (parameter := SAMPLING.get(name)) is not None:
            # JSON has text for keys.
            parameters[parameter] = _by_token_id(value) if name == "logit_bias" else value
    for name in ("stop", "bad_words"):
        checked(name, _few_strings, parameters.get(name))
    try:
        return replace(defaults, **parameters)
    except ValueError as error:
        name = str(error).partition("=")[0]
        raise BadField(str(error), name if name in given else None) from None


def _few_strings(name: str, value: object) -> None:
    """ValueError for more strings than the server takes; values of another type are refused later."""
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list) and all(isinstance(one, str) for one in strings):
        check_strings(name, strings, MOST_STRINGS, MOST_CHARACTERS)


def _logprobs(given: Mapping[str, Any], chat: bool) -> Any:
    """Number of likeliest tokens beside each chosen one, as SamplingParams has it."""
    asked, top = given.get("logprobs"), given.get("top_logprobs")
    if not chat:
        return None if asked is False else asked
    if asked is not None:
        checked("logprobs", check_bool, asked)
    if top is not None and not asked:
        if top == 0:
            return None
        raise BadField("top_logprobs is for logprobs=true; send it too, or leave it out", "top_logprobs")
    return (0 if top is None else top) if asked else None


def _structure(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Structure of the answer, by OpenAI's response_format or vLLM's structured_outputs."""
    asked, form = given.get("structured_outputs"), given.get("response_format")
    if form is not None:
        checked("response_format", an_object, form)
        kind, schema = form.get("type"), form.get("json_schema")
        if kind not in ("text", "json_object", "json_schema"):
            raise BadField(
                f"response_format.type={quoted(kind)} is not text, json_object or json_schema", "response_format"
            )
        if kind == "json_schema" and not (isinstance(schema, dict) and isinstance(schema.get("schema"), dict)):
            raise BadField("response_format.json_schema.schema is missing, or no object", "response_format")
        if kind != "text":
            if asked is not None:
                raise BadField("response_format and structured_outputs are both given; send one", "structured_outputs")
            asked = {"json_object": True} if kind == "json_object" else {"json": schema["schema"]}
    if asked is None:
        return None
    checked("structured_outputs", an_object, asked)
    try:
        return StructuredOutputsParams(**asked)
    except (TypeError, ValueError) as error:
        raise BadField(f"structured_outputs: {error}", "structured_outputs") from None


def _by_token_id(value: object) -> object:
    """Biases with integers for keys; another value as it is, which SamplingParams refuses."""
    if isinstance(value, dict) and all(key.isascii() and key.isdigit() and len(key) < 19 for key in value):
        return {int(key): bias for key, bias in value.items()}
    return value


def prompts_of(name: str, value: object) -> list[Prompt]:
    """Texts and token ids of a field. BadField for ones that are none, or empty."""
    try:
        prompts = as_prompts(value)
    except ValueError as error:
        raise BadField(str(error).replace("prompts", name, 1), name) from None
    if not prompts or [] in prompts or "" in prompts:
        raise BadField(f"{name}={quoted(value)} is empty; send at least one token", name)
    return prompts
