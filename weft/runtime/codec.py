"""Encoding of host values as bytes, for messages between ranks. Decoding runs no code of the sender."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import struct
from array import array
from collections.abc import Callable
from enum import Enum, Flag
from itertools import accumulate, pairwise
from typing import Any, NoReturn, TypeVar

import torch

from weft.errors import NotExchangeable

MAX_DEPTH = 64
MAX_BYTES = 1 << 30
_MAGIC = b"weft1"
_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
        "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "complex64",
        "complex128",
    )
}  # fmt: skip
_PLAIN = "None, bool, int, float, str, bytes, list, tuple, dict, torch.Tensor, torch.dtype or a class marked @weft.exchangeable"
T = TypeVar("T", bound=type)
# Place of a value inside the item, from the inside out: (place of its container, format of the access, key or index).
Place = tuple[Any, str, Any]

_CLASSES: dict[str, type] = {}
# Class -> its name, and its fields; None for an Enum.
_NAMES: dict[type, tuple[str, tuple[str, ...] | None]] = {}
# Items of a list from which on integers, strings and instances of one class are sent together.
TOGETHER = 9


class Malformed(ValueError):
    """Bytes that `encode` did not make, or with classes that are not marked here."""


def exchangeable(cls: T) -> T:
    """Decorator: let ``team.exchange`` carry this dataclass, NamedTuple or Enum. Every rank must run it.

    A dataclass or NamedTuple is rebuilt by its constructor from its fields; an Enum's member is found by its name.
    """
    named = issubclass(cls, tuple) and hasattr(cls, "_fields")
    if not (named or dataclasses.is_dataclass(cls) or (issubclass(cls, Enum) and not issubclass(cls, Flag))):
        raise ValueError(f"exchangeable({cls.__name__}): not a dataclass, NamedTuple or Enum; make it one of these")
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    if derived := [field.name for field in fields if not field.init]:
        raise ValueError(f"exchangeable({cls.__name__}): field {derived[0]} has init=False; make it a property")
    name = f"{cls.__module__}.{cls.__qualname__}"
    names = cls._fields if named else None if issubclass(cls, Enum) else tuple(field.name for field in fields)
    _CLASSES[name], _NAMES[cls] = cls, (name, names)
    return cls


def encode(value: object, called: str = "item") -> bytes:
    """The value as bytes. NotExchangeable, with the place inside ``called``, for one that cannot be sent."""
    out = bytearray(_MAGIC)
    _put(out, value, (None, "{}", called), 0)
    if len(out) > MAX_BYTES:
        raise NotExchangeable(
            called, f"has {len(out):,} bytes", f"at most {MAX_BYTES:,} can be sent; send less at once"
        )
    return bytes(out)


def decode(data: bytes) -> Any:
    """The value that `encode` was given, with tensors in CPU memory. Malformed for other bytes."""
    reader = _Reader(data)
    try:
        if reader.take(len(_MAGIC)) != _MAGIC:
            raise Malformed("it does not begin as a message of this version of weft")
        value = reader.value(0)
    except Malformed:
        raise
    except Exception as error:  # of a class's constructor, of a shape that torch refuses, of an unhashable key
        raise Malformed(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from None
    if reader.at != len(data):
        raise Malformed(f"{len(data) - reader.at} bytes follow its end")
    return value


# --- encoding --------------------------------------------------------------------------------------------------------


def _put(out: bytearray, value: Any, place: Place, depth: int) -> None:
    kind = type(value)
    if depth > MAX_DEPTH:
        _refuse(place, f"lies more than {MAX_DEPTH} levels deep", "pass something flatter")
    put = _PUT.get(kind)
    if put is not None:
        put(out, value, place, depth)
    elif kind is torch.dtype and _name(value) in _DTYPES:
        _put_bytes(out, b"y", _name(value).encode())
    elif kind in _NAMES:
        _put_instance(out, value, place, depth)
    else:
        _refuse(place, f"is of type {_class(kind)}", _remedy(value))


def _put_plain(out: bytearray, value: Any, place: Place, depth: int) -> None:
    if value is None or type(value) is bool:
        out += b"N" if value is None else b"T" if value else b"F"
    elif type(value) is float:
        out += b"f" + struct.pack("<d", value)
    elif type(value) is str:
        _put_bytes(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif type(value) is bytes:
        _put_bytes(out, b"b", value)
    elif -(1 << 63) <= value < 1 << 63:
        out += b"q" + struct.pack("<q", value)
    else:
        _put_bytes(out, b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _put_list(out: bytearray, values: list, place: Place, depth: int) -> None:
    if (numbers := _as_array(values)) is not None:
        _put_bytes(out, b"a", numbers)
    elif len(values) < TOGETHER or len(kinds := set(map(type, values))) > 1:
        _put_sequence(out, values, place, depth)
    elif kinds == {str}:
        _put_bytes(out, b"c", array("q", map(len, values)).tobytes())
        _put_bytes(out, b"", "".join(values).encode("utf-8", "surrogatepass"))
    elif not _put_columns(out, values, kinds.pop(), place, depth):
        _put_sequence(out, values, place, depth)


def _put_columns(out: bytearray, values: list, kind: type, place: Place, depth: int) -> bool:
    """Put instances of one class field by field; False for other values, and where a field refuses.

    What all hold is put once. A byte for each comes first: a reader takes no number on trust. Ones of a frozen class that hold
    the same become one instance, such as the parameters of a call's greedy requests: these took longer than the prompts.
    """
    name, fields = _NAMES.get(kind, ("", None))
    if not fields:
        return False
    begin = len(out)
    _put_bytes(out, b"k", name.encode())
    _put_bytes(out, b"", bytes(len(values)))
    out += struct.pack("<I", len(fields))
    several = values[:1] if all(one is values[0] for one in values) else values
    try:
        for field in fields:
            column = [getattr(one, field) for one in several]
            alike = all(one is column[0] for one in column)
            _put(out, (column[0],) if alike else column, (place, ".{}", field), depth + 1)
    except NotExchangeable:  # one by one the message names its instance
        del out[begin:]
        return False
    return True


def _put_sequence(out: bytearray, values: list | tuple, place: Place, depth: int) -> None:
    out += {list: b"l", tuple: b"t", torch.Size: b"z"}[type(values)] + struct.pack("<I", len(values))
    for index, one in enumerate(values):
        _put(out, one, (place, "[{}]", index), depth + 1)


def _put_dict(out: bytearray, values: dict, place: Place, depth: int) -> None:
    out += b"d" + struct.pack("<I", len(values))
    for key, one in values.items():
        if isinstance(key, torch.Tensor):
            _refuse(place, "has a tensor for a key", "pass a dict with plain keys")
        _put(out, key, (place, " (the key {!r})", key), depth + 1)
        _put(out, one, (place, "[{!r}]", key), depth + 1)


def _put_instance(out: bytearray, value: Any, place: Place, depth: int) -> None:
    name, fields = _NAMES[type(value)]
    _put_bytes(out, b"e" if fields is None else b"o", name.encode())
    if fields is None:
        _put_bytes(out, b"s", value.name.encode())
        return
    out += struct.pack("<I", len(fields))
    for field in fields:
        _put(out, getattr(value, field), (place, ".{}", field), depth + 1)


def _put_bytes(out: bytearray, tag: bytes, data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise NotExchangeable("item", f"has {len(data):,} bytes in one piece", f"at most {MAX_BYTES:,} can be sent")
    out += tag + struct.pack("<I", len(data)) + data


def _put_tensor(out: bytearray, tensor: torch.Tensor, place: Place, depth: int) -> None:
    name, shape = _name(tensor.dtype), tuple(tensor.shape)
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda") or name not in _DTYPES:
        kind = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
        _refuse(place, f"is a {kind}", "pass a dense one on the CPU or a GPU")
    _put_bytes(out, b"x", name.encode())
    out += struct.pack(f"<B{len(shape)}q", len(shape), *shape)
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    _put_bytes(out, b"", ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b"")


_PUT: dict[type, Callable[[bytearray, Any, Place, int], None]] = {
    **dict.fromkeys((type(None), bool, int, float, str, bytes), _put_plain),
    **dict.fromkeys((tuple, torch.Size), _put_sequence),
    **dict.fromkeys((torch.Tensor, torch.nn.Parameter), _put_tensor),
    list: _put_list,
    dict: _put_dict,
}


def _as_array(values: list[Any]) -> bytes | None:
    """A list of 64-bit integers, such as token ids, as bytes; None for other lists. 30 times as fast."""
    if len(values) >= TOGETHER and type(values[0]) is int and set(map(type, values)) == {int}:
        try:
            return array("q", values).tobytes()
        except OverflowError:
            pass
    return None


def _refuse(place: Place | None, problem: str, remedy: str) -> NoReturn:
    parts = []
    while place is not None:
        place, form, by = place
        plain = type(by) in (bool, int, float, str, bytes)
        part = form.format(by) if plain else form.replace("!r", "").format(f"a {type(by).__name__}")
        parts.append(part if len(part) <= 60 else f"{part[:58]}…{part[-1]}")
    if len(parts) > 12:  # a value that contains itself
        parts[6:-6] = ["…"]
    raise NotExchangeable("".join(reversed(parts)), problem, remedy)


def _remedy(value: object) -> str:
    kind = type(value)
    if kind.__module__.split(".")[0] == "numpy":
        return "pass torch.from_numpy(x)" if kind.__name__ == "ndarray" else "pass x.item(), a plain Python value"
    if isinstance(value, (set, frozenset)):
        return "pass sorted(x), a list"
    if dataclasses.is_dataclass(kind) or isinstance(value, Enum) or hasattr(kind, "_fields"):
        return f"decorate class {kind.__name__} with @weft.exchangeable"
    for plain in (bool, int, float, str, bytes, list, tuple, dict):
        if isinstance(value, plain):
            return f"pass {plain.__name__}(x)"
    return f"pass {_PLAIN}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _class(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# --- decoding --------------------------------------------------------------------------------------------------------


class _Reader:
    """Reader of untrusted bytes: it trusts no length before it has seen that as many bytes follow."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.data) - self.at:
            raise Malformed("it ends in the middle of a value")
        self.at += count
        return self.data[self.at - count : self.at]

    def count(self) -> int:
        (count,) = struct.unpack("<I", self.take(4))
        if count > len(self.data) - self.at:  # every value takes a byte at least
            raise Malformed("it ends in the middle of a value")
        return count

    def text(self) -> str:
        return self.take(self.count()).decode("utf-8", "surrogatepass")

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise Malformed(f"values lie more than {MAX_DEPTH} levels deep")
        tag = self.take(1)
        read = _READ.get(tag)
        if read is None:
            raise Malformed(f"{tag!r} marks no kind of value")
        return read(self, depth + 1)

    def texts(self) -> list[str]:
        ends = list(accumulate(array("q", self.take(self.count()))))
        text = self.text()
        if (ends or [0])[-1] != len(text) or any(end < begin for begin, end in pairwise([0, *ends])):
            raise Malformed("its texts are not as long as it says")
        return [text[begin:end] for begin, end in pairwise([0, *ends])]

    def values(self, depth: int) -> list[Any]:
        return [self.value(depth) for _ in range(self.count())]

    def tensor(self) -> torch.Tensor:
        dtype = _DTYPES[self.text()]
        (dims,) = self.take(1)
        shape = struct.unpack(f"<{dims}q", self.take(8 * dims))
        data = self.take(self.count())
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
            raise Malformed(f"{len(data)} bytes are no tensor of {dtype} and shape {shape}")
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)

    def cls(self) -> type:
        name = self.text()
        if name not in _CLASSES:
            raise Malformed(f"it holds a {name[:100]!r}, which this rank has not marked @weft.exchangeable")
        return _CLASSES[name]

    def instance(self, depth: int) -> Any:
        cls, values = self.cls(), self.values(depth)
        names = _NAMES[cls][1] or ()
        return cls(**dict(zip(names, values, strict=True)))

    def instances(self, depth: int) -> list[Any]:
        cls, number = self.cls(), len(self.take(self.count()))
        columns, names = self.values(depth), _NAMES[cls][1] or ()
        if len(columns) != len(names) or any(len(one) != {tuple: 1, list: number}.get(type(one)) for one in columns):
            raise Malformed(f"it does not hold {number} instances of {cls.__name__}")
        frozen = dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
        if number and frozen and all(type(one) is tuple for one in columns):
            return [cls(**{name: one for name, (one,) in zip(names, columns, strict=True)})] * number
        columns = [one * number if type(one) is tuple else one for one in columns]
        return [cls(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


_READ: dict[bytes, Callable[[_Reader, int], Any]] = {
    b"N": lambda reader, depth: None,
    b"T": lambda reader, depth: True,
    b"F": lambda reader, depth: False,
    b"q": lambda reader, depth: struct.unpack("<q", reader.take(8))[0],
    b"i": lambda reader, depth: int.from_bytes(reader.take(reader.count()), "little", signed=True),
    b"f": lambda reader, depth: struct.unpack("<d", reader.take(8))[0],
    b"s": lambda reader, depth: reader.text(),
    b"b": lambda reader, depth: reader.take(reader.count()),
    b"y": lambda reader, depth: _DTYPES[reader.text()],
    b"a": lambda reader, depth: array("q", reader.take(reader.count())).tolist(),
    b"c": lambda reader, depth: reader.texts(),
    b"l": lambda reader, depth: reader.values(depth),
    b"t": lambda reader, depth: tuple(reader.values(depth)),
    b"z": lambda reader, depth: torch.Size(reader.values(depth)),
    b"d": lambda reader, depth: {reader.value(depth): reader.value(depth) for _ in range(reader.count())},
    b"x": lambda reader, depth: reader.tensor(),
    b"e": lambda reader, depth: reader.cls()[reader.value(depth)],
    b"o": lambda reader, depth: reader.instance(depth),
    b"k": lambda reader, depth: reader.instances(depth),
}
