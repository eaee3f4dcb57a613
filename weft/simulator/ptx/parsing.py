"""Parser of inline PTX: instructions, labels and operands."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cache

from weft.errors import NotInterpretable


@dataclass(frozen=True, slots=True)
class Register:
    """Register, special register or operand of the assembly ($0), by name.

    ``negated``: of a predicate, as ``!p``
    """

    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Immediate:
    """Constant: an integer, or the bits of a float of ``width`` bits.

    width  0 of an integer; 32 of ``0f...``, 64 of any other float
    """

    value: int
    width: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """Address operand: ``[base + offset]``."""

    base: Register | Immediate
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    """Braced operand of several registers."""

    parts: tuple[Register | Immediate, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two results, ``p|q``."""

    parts: tuple[Register | Immediate, ...]


Operand = Register | Immediate | Address | Vector | Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction.

    name, modifiers  of ``atom.global.sys.cas.b32``: "atom", ("global", "sys", "cas", "b32")
    guard            register of a predicate, None without one; ``negated``: executed where it is false
    target           label of a branch, "" for all else
    """

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: str | None
    negated: bool
    target: str
    text: str

    @property
    def type(self) -> str:
        """Last modifier, which is the type of most instructions."""
        return self.modifiers[-1] if self.modifiers else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Instructions of one block of assembly, and the index of each label."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @property
    def loops(self) -> bool:
        """True if a branch leads backward."""
        at = enumerate(self.instructions)
        return any(one.target and self.labels.get(one.target, len(self.labels)) <= index for index, one in at)


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([%$]?[\w$]+)\s+)?([a-z][\w]*)((?:\.[\w:]+)*)\s*(.*)", re.DOTALL)
_COMMA = re.compile(r",(?![^{\[]*[}\]])")  # outside braces and brackets
_NUMBER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?")
_FLOAT_BITS = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_FLOAT = re.compile(r"-?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_REGISTER = re.compile(r"[A-Za-z_$%][\w$.]*")


@cache
def parse(assembly: str) -> Code:
    """Parse a block of assembly. NotInterpretable names a statement that cannot be read."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in _COMMENT.sub(" ", assembly).split(";"):
        statement = statement.strip()
        while statement:
            if statement[0] in "{}":
                statement = statement[1:].strip()
            elif label := _LABEL.match(statement):
                labels[label[1]] = len(instructions)
                statement = statement[label.end() :].strip()
            else:
                break
        if statement and not statement.startswith("."):  # a declaration of registers
            instructions.append(_instruction(" ".join(statement.split())))
    code = Code(instructions=tuple(instructions), labels=labels)
    for one in code.instructions:
        if one.target and one.target not in labels:
            raise NotInterpretable(f"PTX `{one.text}` branches to a label that this assembly does not have")
    return code


def _instruction(text: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(text)
    if match is None:
        raise NotInterpretable(f"PTX `{text}` cannot be read")
    negated, guard, name, modifiers, rest = match.groups()
    operands = [part.strip() for part in _COMMA.split(rest)] if rest else []
    target = operands[0] if name == "bra" and operands else ""
    return Instruction(
        name=name, modifiers=tuple(modifiers.split(".")[1:]),
        operands=() if target else tuple(_operand(part, text) for part in operands),
        guard=guard, negated=bool(negated), target=target, text=text,
    )  # fmt: skip


def _operand(part: str, text: str) -> Operand:
    if part[:1] == "{" and part[-1] == "}":
        return Vector(tuple(_simple(one.strip(), text) for one in part[1:-1].split(",")))
    if part[:1] == "[" and part[-1] == "]":
        base, plus, offset = part[1:-1].replace(" ", "").partition("+")
        if plus and not _NUMBER.fullmatch(offset):
            raise NotInterpretable(f"PTX `{text}` has an address that cannot be read: {part}")
        return Address(_simple(base, text), _integer(offset) if plus else 0)
    if "|" in part:
        return Pair(tuple(_simple(one.strip(), text) for one in part.split("|", 1)))
    if part[:1] == "!" and _REGISTER.fullmatch(part[1:].lstrip()):
        return Register(part[1:].lstrip(), negated=True)
    return _simple(part, text)


def _simple(part: str, text: str) -> Register | Immediate:
    if bits := _FLOAT_BITS.fullmatch(part):
        return Immediate(int(part[2:], 16), width=32 if bits[1] else 64)
    if _NUMBER.fullmatch(part):
        return Immediate(_integer(part))
    if _FLOAT.fullmatch(part):
        return Immediate(struct.unpack(">Q", struct.pack(">d", float(part)))[0], width=64)
    if _REGISTER.fullmatch(part):
        return Register(part)
    raise NotInterpretable(f"PTX `{text}` has an operand that cannot be read: {part or 'an empty one'}")


def _integer(text: str) -> int:
    """Value of a constant in C's notation: hexadecimal, binary, octal or decimal."""
    digits = text.lstrip("-").rstrip("U")
    octal = re.fullmatch("0[0-7]+", digits)
    value = int(digits, 8 if octal else 0)
    return -value if text[0] == "-" else value
