"""Checks of callers' arguments. Each error is one line: argument, value, rule, often a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

# Most characters of a value that a message repeats.
LONGEST = 200
# Names of choices in a message.
MOST_LISTED = 44
# Devices that ranks run on.
DEVICES = ("auto", "cuda", "sim")


def shortened(text: object, most: int = LONGEST) -> str:
    """The text on one line, cut in the middle if it has more than `most` characters."""
    line = " ".join(str(text).split())
    if len(line) <= most:
        return line
    return f"{line[: most - 40]}... ({len(line):,} characters) ...{line[-15:]}"


def quoted(value: object) -> str:
    """The value's repr on one line, shortened; for tensors and arrays their shape and dtype."""
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is not None and dtype is not None and not isinstance(value, type):
            return f"<{type(value).__name__} of shape {tuple(shape)} and dtype {dtype}>"
        return shortened(repr(value))
    except Exception:  # an integer of more than 4,300 digits, or an object whose repr or attributes raise
        return f"<{type(value).__name__}>"


def listed(choices: Iterable[Any]) -> str:
    """Choices in a message, at most MOST_LISTED by name."""
    names = [str(choice) for choice in choices]
    rest = len(names) - MOST_LISTED
    return ", ".join(names) if rest <= 0 else f"{', '.join(names[:MOST_LISTED])} or {rest} more"


def did_you_mean(value: object, choices: Iterable[Any]) -> str:
    """End of a message about a mistyped name: the choice that is nearest to it; "" where none is near."""
    by_lower = {str(choice).lower(): choice for choice in choices}
    near = get_close_matches(value.lower(), by_lower, 1) if isinstance(value, str) and len(value) < 100 else []
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def is_integer(value: object) -> bool:
    """True for Python's and NumPy's integers, but not for booleans."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def check_int(name: str, value: object, low: int | None = None, high: int | None = None, remedy: str = "") -> int:
    """The value as an int. ValueError unless it is an integer in low .. high (None: no bound)."""
    fits = is_integer(value) and (low is None or value >= low) and (high is None or value <= high)
    if fits:
        return int(value)
    if high is not None:
        rule = f"is not an integer in {low} .. {high}"
    elif low == 1:
        rule = "is not a positive integer"
    else:
        rule = "is not an integer" if low is None else f"is not an integer of at least {low}"
    raise ValueError(f"{name}={quoted(value)} {rule}" + (f"; {remedy}" if remedy else ""))


def positive(name: str, value: object) -> int:
    """The value as an int. ValueError unless it is a positive integer."""
    return check_int(name, value, 1)


def check_number(name: str, value: object, low: float, high: float, rule: str) -> None:
    """ValueError unless the value is a real number in low .. high; `rule` names the range."""
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}={quoted(value)} is not {rule}")


def check_bool(name: str, value: object) -> None:
    """ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={quoted(value)} is not True or False")


def check_choice(name: str, value: object, choices: Iterable[Any]) -> None:
    """ValueError unless the value is one of the strings `choices`."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(map(str, choices))
        raise ValueError(f"{name}={quoted(value)} is not one of {listed}{did_you_mean(value, choices)}")


def check_utf_8(name: str, text: str) -> None:
    """ValueError for half of a surrogate pair, which JSON can hold and a tokenizer cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not text that UTF-8 can hold: {error}") from None


def strings_of(name: str, value: object) -> tuple[str, ...]:
    """The value, a string or strings, as a tuple. ValueError for other types, and for an empty string."""
    value = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(value, Iterable):
        raise ValueError(f"{name}={quoted(value)} is not a string or a list of strings")
    value = tuple(value)
    if not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"{name}={quoted(value)} holds something that is not a non-empty string")
    for one in value:
        check_utf_8(name, one)
    return tuple(map(str, value))


def check_callable(name: str, value: object, called: str) -> None:
    """ValueError unless the value can be called; `called` shows the call."""
    if not callable(value):
        raise ValueError(f"{name}={quoted(value)} is not a function; pass one that is called as {called}")


def check_sequence(name: str, value: object, rule: str) -> tuple:
    """The value as a tuple. ValueError unless it is a sequence other than a string; `rule` describes it."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise ValueError(f"{name}={quoted(value)} is not {rule}")
    return tuple(value)


def check_instance(name: str, value: object, kind: type | tuple[type, ...], rule: str) -> None:
    """ValueError unless the value is an instance of `kind`; `rule` describes it."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}={quoted(value)} is not {rule}")


def check_optional(check: Callable[..., Any], name: str, value: object, *rest: object) -> Any:
    """The result of `check`, or None for None."""
    return None if value is None else check(name, value, *rest)


# More than the 72 GPUs that NVLink joins today. An all-reduce over 64 virtual ranks takes 15 s.
MOST_VIRTUAL_RANKS = 128
# Processes that share a GPU. Each takes about 0.5 GB of its memory before it computes anything.
MOST_RANKS_PER_GPU = 16
# Processors address at most 2**48 bytes, and larger tensors overflow torch.
_MOST_HEAP_BYTES = 1 << 47


def check_virtual_ranks(name: str, value: object) -> int:
    """The value as an int. ValueError unless that number of virtual ranks can be simulated."""
    value = positive(name, value)
    if value > MOST_VIRTUAL_RANKS:
        raise ValueError(
            f"{name}={quoted(value)}: at most {MOST_VIRTUAL_RANKS} virtual ranks are simulated, each with a thread and "
            f"a heap of its own; pass a smaller one"
        )
    return value


def check_heap_bytes(value: object) -> int | None:
    """The value as an int, or None. ValueError unless it can be the size of a symmetric heap."""
    if value is None:
        return None
    return check_int("heap_bytes", value, 1, _MOST_HEAP_BYTES, "pass bytes per rank, or leave it out")


def check_debug(value: object) -> float | None:
    """Seconds after which a wait gives up; None for False. ValueError for other types and ranges."""
    if isinstance(value, bool):
        return 20.0 if value else None
    check_number("debug", value, 1e-6, 1e6, "True, False or the seconds after which a wait gives up (up to 1e6)")
    return float(value)


def check_args(value: object) -> tuple:
    """The value as a tuple. ValueError unless it is a list or tuple, the arguments of main."""
    return check_sequence("args", value, "a list or tuple of what main gets after team; pass (x,) for one")


def check_seed(value: object) -> int:
    """The value as an int. ValueError unless it is an integer."""
    return check_int("seed", value)
