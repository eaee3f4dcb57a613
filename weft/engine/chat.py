"""Chat template of a checkpoint: from messages to the text that the model was trained to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.arguments import quoted
from weft.engine.params import check_prompt
from weft.engine.renderer import Renderer, RenderError, as_json
from weft.errors import CheckpointError
from weft.models.checkpoint import read_file, read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = Mapping[str, Any]
# Shared by all templates of this process.
_RENDERER = Renderer()


class ChatTemplate:
    """Jinja template of chat_template.jinja, else of tokenizer_config.json, rendered in another process.

    renderer  sets limits on time, memory and output; None: the one that all templates of this process share

    CheckpointError where the directory has no readable template.
    """

    def __init__(self, directory: Path, renderer: Renderer | None = None) -> None:
        self.directory, self._renderer = directory, renderer or _RENDERER
        self._special, self._source = _read(directory)
        try:
            self._renderer.compile(self._source)
        except RenderError as error:
            raise CheckpointError(f"{directory}: its chat template is not valid Jinja ({error})") from None

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Prompt that the assistant's answer continues. ValueError for messages that the template refuses.

        variables  further variables of the template, such as {"enable_thinking": False}
        """
        if variables is not None and not isinstance(variables, Mapping):
            raise ValueError(f"variables={quoted(variables)} is not a dictionary")
        if not isinstance(messages, Sequence):
            raise ValueError(f"messages={quoted(messages)} is not a list of messages")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(
                    f"messages[{index}]={quoted(message)} is not a dictionary with a role, and mostly content"
                )
        known = {
            **self._special,
            **as_json("variables", variables or {}),
            "messages": as_json("messages", messages),
            "add_generation_prompt": True,
        }
        try:
            return self._renderer.render(self._source, known)
        except RenderError as error:
            verb = "refuses" if error.kind == "refused" else "fails on"
            raise ValueError(f"the chat template {verb} these messages: {error}") from None


def prompt_of(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the rendered prompt. ValueError as in `ChatTemplate.render`."""
    text = template.render(messages, variables)
    check_prompt("a message", text)
    # The template has written the special tokens already.
    return tokenizer.encode(text, add_special_tokens=False).ids


def _read(directory: Path) -> tuple[dict[str, str], str]:
    """(special tokens by name, the template's source)"""
    path, separate = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    config = read_object(path) if path.exists() else {}
    try:
        source = read_file(separate).decode("utf-8") if separate.exists() else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{separate}: not readable as text ({error}); download it again") from None
    if isinstance(source, list):  # several by name
        if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in source):
            raise CheckpointError(f"{path}: chat_template is a list of what are not objects with name and template")
        source = {one["name"]: one.get("template") for one in source}.get("default")
    if not isinstance(source, str):
        raise CheckpointError(
            f"{directory}: no chat template in tokenizer_config.json and no chat_template.jinja; give it text, not a chat"
        )
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }
    return special, source
