"""A checkpoint's chat template: messages to the text that the model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError

Message = Mapping[str, Any]


class ChatTemplate:
    """The Jinja template of chat_template.jinja, or else of tokenizer_config.json, run in a sandbox.

    CheckpointError where the directory has neither, or none that can be read.
    """

    def __init__(self, directory: Path) -> None:
        from jinja2 import TemplateSyntaxError  # torch needs it too
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.directory = directory
        self._special, source = _read(directory)
        # As templates are written for: transformers' settings and the names that it adds.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"{directory}: its chat template is not valid Jinja ({error})") from None

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """The prompt behind which the assistant's answer comes. `variables`: what else the template knows, such as
        {"enable_thinking": False}. ValueError for messages that it refuses."""
        from jinja2 import TemplateError

        if not isinstance(messages, Sequence):
            raise ValueError(f"messages={messages!r} is not a list of messages")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise ValueError(f"messages[{index}]={message!r} is not a dictionary with role and content")
        words = {**self._special, **(variables or {}), "messages": list(messages), "add_generation_prompt": True}
        try:
            return self._template.render(**words)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None


def _read(directory: Path) -> tuple[dict[str, str], str]:
    """(special tokens by name, the template's source)"""
    path = directory / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download it again") from None
    separate = directory / "chat_template.jinja"
    source = separate.read_text(encoding="utf-8") if separate.exists() else config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {one["name"]: one["template"] for one in source}.get("default")
    if not isinstance(source, str):
        raise CheckpointError(
            f"{directory}: no chat template in tokenizer_config.json and no chat_template.jinja; pass text to generate()"
        )
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }
    return special, source


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
