"""Command lines with vLLM's flags, rewritten to weft's, and the list of docs/vllm-flags.md.

`python -m weft.cli.vllm_flags` prints the list.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.arguments import shortened
from weft.cli.vllm_table import FLAGS, Flag

# Values by which vLLM's -q is told from weft's --quiet: weft's of --quantization.
QUANTIZATIONS = "fp8", "fp8_per_block", "fp8_per_channel", "mxfp4", "int4"
_BY_NAME = {name: flag for flag in FLAGS for name in flag.names}
_NEGATED = {f"--no-{name[2:]}": flag for name, flag in _BY_NAME.items() if name[:2] == "--" and not flag.valued}


def spellings(field: str) -> tuple[str, ...]:
    """vLLM's names of the flag of an option."""
    return tuple(name for flag in FLAGS if flag.field == field for name in flag.names)


def rewritten(words: Sequence[str], command: str = "serve") -> list[str]:
    """Words of a command's line with weft's in place of vLLM's. ValueError for a flag that weft has not.

    vLLM takes `_` for `-` in names, -O3 for -O 3, and fields of a JSON value after dots, so these are read too.
    """
    words, result = list(words), []
    while words:
        word = words.pop(0)
        if word == "--":
            return [*result, word, *words]
        name, equals, value = _parts(word)
        if name == "-q" and words and words[0] in QUANTIZATIONS:
            name = "--quantization"
        base = name.partition(".")[0]
        flag = _BY_NAME.get(base) or _NEGATED.get(base)
        if flag is None or (flag.field is not None and name == base) or command not in flag.commands:
            spelled = str if flag is None else flag.spelled
            result.append(name + equals + spelled(value))
            if not equals and words:
                words[0] = spelled(words[0])
            continue
        if flag.valued and not equals and words:
            value = words.pop(0)
        result += _words_for(name, flag, value)
        while flag.many and words and "=" in words[0] and not words[0].startswith("-"):
            result += _words_for(name, flag, words.pop(0))
    return result


def _parts(word: str) -> tuple[str, str, str]:
    """Name of a flag, an equals sign, and a value; "" for the last two of a flag alone."""
    if word.startswith("-O") and word[2:3] not in ("", "="):
        return "-O", "=", word[2:]
    name, equals, value = word.partition("=")
    return name.replace("_", "-") if name.startswith("--") else name, equals, value


def _words_for(name: str, flag: Flag, value: str) -> list[str]:
    """Words that stand for a flag. ValueError where there are none.

    name  as it was given: with `--no-`, or with a dot and a field of its value
    """
    note, words = flag.note, None
    base, dot, _ = name.partition(".")
    if dot:
        note = f"pass {base} as JSON" if flag.field is not None else note
    elif base not in _BY_NAME:
        words = None if flag.negated is None else [*flag.negated]
    elif flag.words is not None:
        words = flag.words(value)
    if words is None:
        given = f"{name} {shortened(value)}" if value else name
        raise ValueError(f"{given} is a flag of vLLM that weft has not: {note.removeprefix('none: ')}")
    return words


def table() -> str:
    """List of the flags for the page, in Markdown."""
    lines = ["| vLLM | weft | |", "|---|---|---|"]
    for flag in FLAGS:
        names = ", ".join(f"`{name}`" for name in flag.names)
        ours = "refused" if flag.words is None else "taken"
        if flag.field is not None:
            ours = "the same"
        elif flag.values:
            ours = f"taken: {', '.join(f'`{value}`' for value in flag.values)}"
        lines.append(f"| {names} | {ours} | {flag.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
