"""Knobs: fields of a design that state their legal values, and the neighbours that a search tries.

    chunk: int = knob(8, powers(), halved(1, 64))      # a power of two; half of it and twice, within 1 .. 64

``design_type`` makes the class of a design, which refuses other values; ``around`` yields the designs with one knob moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from weft.runtime.codec import exchangeable

T = TypeVar("T")
# Rule that a value breaks, as the end of a message, or None; and values to try in its place.
Legal = Callable[[Any], str | None]
Near = Callable[[Any], Iterable[Any]]


def knob(default: Any = dataclasses.MISSING, legal: Legal | None = None, near: Near | None = None) -> Any:
    """Field of a design.

    default  a class: made by calling it
    legal    None: any value
    near     None: a search leaves it
    """
    of_class = {"default_factory" if isinstance(default, type) else "default": default}
    return dataclasses.field(**of_class, metadata={"legal": legal, "near": near})


if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(knob, dataclasses.field))
    def design_type(cls: type[T]) -> type[T]: ...

else:

    def design_type(cls):
        """Decorator: make a frozen dataclass that ranks may exchange, and whose knobs have legal values."""
        if not hasattr(cls, "__post_init__"):
            cls.__post_init__ = check_knobs
        return exchangeable(dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls))


def powers(low: int = 1) -> Legal:
    """Powers of two of at least ``low``."""
    rule = "is not a power of two" + f" of at least {low}" * (low > 1)
    return lambda value: rule if value < low or value & (value - 1) else None


def one_of(*values: int) -> Legal:
    rule = f"is not one of {', '.join(map(str, values))}"
    return lambda value: None if value in values else rule


def counts(high: int | None = None, remedy: str = "") -> Legal:
    """Numbers from 1 to ``high``; None: on."""
    rule = "is not positive; pass 1 or more" if high is None else f"is not in 1 .. {high}{remedy}"
    return lambda value: None if 1 <= value <= (value if high is None else high) else rule


def halved(low: int = 1, high: int = 1 << 30) -> Near:
    """Half and twice, within ``low`` .. ``high``."""
    return lambda value: [size for size in (value // 2, value * 2) if low <= size <= high]


def stepped(low: int = 1) -> Near:
    """One less, but at least ``low``, and one more."""
    return lambda value: (max(low, value - 1), value + 1)


def flipped(value: bool) -> tuple[bool]:
    """The other of True and False."""
    return (not value,)


def either(*values: object) -> Near:
    """Any of ``values``."""
    return lambda value: values


def check_knobs(design: Any) -> None:
    """ValueError unless each knob of ``design`` has a legal value."""
    for field in dataclasses.fields(design):
        legal, value = field.metadata.get("legal"), getattr(design, field.name)
        if legal is not None and (rule := legal(value)) is not None:
            raise ValueError(f"{field.name}={value} {rule}")


def around(design: T) -> Iterator[T]:
    """Copies of ``design`` with one knob moved, if its class accepts them.

    A knob that is a design itself, with this function as its ``near``, is moved in the same way.
    """
    for field in dataclasses.fields(design):  # type: ignore[arg-type]
        if field.metadata.get("near") is not None:
            yield from moved(design, **{field.name: field.metadata["near"](getattr(design, field.name))})


def moved(design: T, **values: Iterable[Any]) -> Iterator[T]:
    """Copies of ``design`` with one field changed to one of its ``values``, if the class accepts it."""
    for name, options in values.items():
        for value in options:
            if value == getattr(design, name):
                continue
            try:
                yield dataclasses.replace(design, **{name: value})  # type: ignore[type-var]
            except ValueError:
                continue
