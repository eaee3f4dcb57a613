"""Functions that a request offers to the model, and which it may, must or must not call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.arguments import quoted
from weft.serve.checks import JSON_TYPES, BadField
from weft.text.chat import MAX_DEPTH, as_json

# OpenAI takes 128; further ones cost the prompt's room.
MOST_TOOLS = 512
# As OpenAI's, and longer with the marks that clients of MCP put between a server's name and a tool's.
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
# Parameters of a function that has none.
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Functions that a model may call.

    listed    as its chat template gets them
    schemas   of their parameters, by name
    forced    names of the functions of which the answer calls one; empty: it calls some or none
    parallel  an answer may have several calls
    """

    listed: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    forced: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def called(self) -> dict[str, dict[str, Any]]:
        """Schemas of the functions that may be called."""
        names = self.forced or tuple(tool["function"]["name"] for tool in self.listed)
        return {name: self.schemas[name] for name in names}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Tools | None:
        """Tools of a request's fields; None: none that the model may call. BadField for what is wrong."""
        listed, choice = _listed(given.get("tools", [])), given.get("tool_choice")
        schemas: dict[str, dict[str, Any]] = {}
        for tool in listed:
            name = tool["function"]["name"]
            if name in schemas:
                raise BadField(f"tools has two functions named {quoted(name)}; rename one", "tools")
            schemas[name] = tool["function"].get("parameters") or NO_PARAMETERS
        if not listed and choice not in (None, "none", "auto"):
            raise BadField(f"tool_choice={quoted(choice)} without tools; send tools too", "tool_choice")
        if not listed or choice == "none":
            return None
        names, forced = _chosen(choice, schemas)
        one = isinstance(choice, dict) and choice.get("type") == "function"
        return cls(
            listed=[tool for tool in listed if tool["function"]["name"] in names or one],
            schemas=schemas,
            forced=names if forced else (),
            parallel=given.get("parallel_tool_calls", True) and not one,
        )


def _listed(tools: object) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise BadField(f"tools={quoted(tools)} is not a list of tools", "tools")
    if len(tools) > MOST_TOOLS:
        raise BadField(f"tools has {len(tools):,} tools; pass at most {MOST_TOOLS}", "tools")
    return [_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]


def _tool(at: str, tool: object) -> dict[str, Any]:
    """A tool in the form of the API, without null fields."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise BadField(f'{at}={quoted(tool)} is not {{"type": "function", "function": {{…}}}}', "tools")
    function = {key: value for key, value in tool["function"].items() if value is not None}
    if not isinstance(name := function.get("name"), str) or not NAME.fullmatch(name):
        raise BadField(
            f"{at}.function.name={quoted(name)} is not a name of up to 128 letters, digits and _ - . : /", "tools"
        )
    for key, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if not isinstance(value := function.get(key, kind()), kind):
            raise BadField(f"{at}.function.{key}={quoted(value)} is not {JSON_TYPES[kind]}", "tools")
    try:
        as_json("", function)
    except ValueError:  # of JSON only the depth can be wrong
        raise BadField(f"{at}.function is nested more than {MAX_DEPTH} deep; flatten its parameters", "tools") from None
    return {"type": "function", "function": function}


def _name_in(tool: object) -> object:
    """Name of the function in a tool or a tool_choice; None where there is none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _chosen(choice: object, schemas: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """(names of the functions that may be called, whether one must be)"""
    if choice in (None, "auto", "required"):
        return tuple(schemas), choice == "required"
    if isinstance(choice, dict) and choice.get("type") == "function":
        names, must = [_name_in(choice)], True
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools")
        inner = inner if isinstance(inner, dict) else choice
        allowed = inner.get("tools")
        names = [_name_in(tool) for tool in allowed] if isinstance(allowed, list) else []
        must = inner.get("mode") == "required"
    else:
        raise BadField(
            f"tool_choice={quoted(choice)} is not none, auto, required or a function of tools", "tool_choice"
        )
    for name in names:
        if not isinstance(name, str) or name not in schemas:
            raise BadField(f"tool_choice names {quoted(name)}, which is no function of tools", "tool_choice")
    if not names:
        raise BadField("tool_choice allows no function; send tool_choice none", "tool_choice")
    return tuple(dict.fromkeys(names)), must
