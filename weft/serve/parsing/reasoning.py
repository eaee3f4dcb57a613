"""Readers of reasoning that stands before an answer, by the names that vLLM has for them."""

from __future__ import annotations

from typing import NamedTuple

from weft.serve.parsing.reading import Output, Reading, Text


class Marks(NamedTuple):
    """Marks around reasoning.

    always  the answer begins within it, unless the prompt has closed it
    """

    begin: str
    end: str
    always: bool = False


_THINK = Marks("<think>", "</think>")
MARKS = {
    "deepseek_r1": Marks("<think>", "</think>", always=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "mistral": Marks("[THINK]", "[/THINK]"),
    "qwen3": _THINK,
}
# Its reasoning is a channel of the reader of its calls.
HARMONY = "openai_gptoss"


def is_closed(marks: Marks, prompt_end: str) -> bool:
    """True if a prompt has ended the reasoning, so that an answer has none."""
    return prompt_end.rstrip().endswith(marks.end)


def is_open(marks: Marks, prompt_end: str) -> bool:
    """True if an answer begins within reasoning, by the end of its prompt."""
    return prompt_end.rstrip().endswith(marks.begin) or (marks.always and not is_closed(marks, prompt_end))


def read_reasoning(text: Text, output: Output, marks: Marks, opened: bool) -> Reading[None]:
    """Read reasoning, if the text begins by it, up to and with its end mark.

    opened  the prompt has its begin mark
    """
    if (yield from text.begins((marks.begin,))) is None and not opened:
        return
    output.begin_reasoning()
    yield from text.until((marks.end,), output.reasoning)
    output.end_reasoning()
