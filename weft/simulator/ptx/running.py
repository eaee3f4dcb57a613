"""Execution of a block of inline PTX by the threads of a program.

Threads advance together: the instruction that comes first in the text runs next, for the threads that have come to it. So
threads that leave a loop wait at its end for the remaining ones, as Triton's code after the assembly does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weft.errors import NotInterpretable
from weft.simulator import numerics
from weft.simulator.ptx import warps
from weft.simulator.ptx.accesses import CACHE_HINT, Accesses, refusal
from weft.simulator.ptx.parsing import Address, Code, Immediate, Instruction, Operand, Pair, Register, Vector
from weft.simulator.ptx.registers import LOGIC, OPERANDS, TYPES, Bits, compute, packed, parts_of, raw
from weft.simulator.ptx.threads import Position

if TYPE_CHECKING:
    from weft.simulator.interpreter.port import Port

_ORDERING = ("fence", "membar", "bar", "barrier", "griddepcontrol")
# Least and greatest number of operands, the result among them; one more of atom.cas, and one more with a cache policy.
_ACCESSES = {"ld": 2, "ldu": 2, "st": 2, "atom": 3, "red": 2, "multimem": 2}
_OF_WARPS = {"shfl": (5, 5), "elect": (2, 2)}
_OPERANDS = {
    **OPERANDS,
    **_OF_WARPS,
    "createpolicy": (1, 4),
    **{name: (count, count) for name, count in _ACCESSES.items()},
}
_IDLE = ("nanosleep", "prefetch", "prefetchu", "discard", "pragma")


def needs_threads(code: Code) -> bool:
    """True if every thread must execute the block: it loops, counts, or reads the thread's number."""
    return code.loops or any(_is_of_threads(one) for one in code.instructions)


def orders(code: Code) -> bool:
    """True if the block has a barrier or a fence."""
    return any(one.name in _ORDERING for one in code.instructions)


def _is_of_threads(one: Instruction) -> bool:
    by_thread = ("%tid", "%laneid", "%warpid")
    reads = any(isinstance(x, Register) and x.name.startswith(by_thread) for x in one.operands)
    return (
        reads
        or one.name in ("atom", "red", "cp", *_OF_WARPS)
        or (one.name, one.modifiers[:1]) == ("multimem", ("red",))
    )


class Run:
    """One execution by the threads of a program, or for the elements of a block."""

    def __init__(
        self, code: Code, operands: list[Bits | None], position: Position, port: Port, by_thread: bool
    ) -> None:
        """``operands``: bits of $0, $1, ...; None of a result. ``by_thread``: each thread executes the block."""
        self._code, self._position, self._accesses = code, position, Accesses(port)
        self._by_thread, self._operands = by_thread, operands

    def run(self, active: np.ndarray) -> list[Bits]:
        """Bits of all operands after the ``active`` threads have executed the block."""
        count, end = active.size, len(self._code.instructions)
        self._count = count
        self._registers: dict[str, Bits] = {
            f"${i}": np.zeros(count, np.uint64) if bits is None else np.broadcast_to(bits, (count,))
            for i, bits in enumerate(self._operands)
        }
        at = np.where(active, 0, end)
        while (now := int(at.min(initial=end))) < end:
            here = at == now
            one = self._code.instructions[now]
            chosen = here & self._guard(one) if one.guard is not None else here
            at = np.where(here, now + 1, at)
            if one.target:
                at = np.where(chosen, self._code.labels[one.target], at)
            elif one.name in ("ret", "exit"):
                at = np.where(chosen, end, at)
            elif chosen.any():
                self._execute(one, chosen)
        return [self._registers[f"${i}"] for i in range(len(self._operands))]

    def _guard(self, one: Instruction) -> np.ndarray:
        holds = self._read_register(one.guard, one) != 0
        return ~holds if one.negated else holds

    # --- operands ----------------------------------------------------------------------------------------------------

    def _read(self, operand: Operand, one: Instruction) -> Bits:
        if isinstance(operand, Register):
            bits = self._read_register(operand.name, one)
            return bits ^ np.uint64(1) if operand.negated else bits
        if isinstance(operand, Immediate):
            return self._constant(operand, one)
        raise _unknown(one)

    def _read_register(self, name: str, one: Instruction) -> Bits:
        known = self._registers.get(name)
        if known is not None:
            return known
        value = self._position.read(name)
        if value is None:
            raise NotInterpretable(f"PTX `{one.text}` reads {name}, which is not known or was not written")
        if isinstance(value, np.ndarray) and value.size != self._count:
            raise NotInterpretable(f"PTX `{one.text}` reads {name} in a block of {self._count} elements")
        return np.broadcast_to(np.asarray(value, np.uint64), (self._count,))

    def _constant(self, operand: Immediate, one: Instruction) -> Bits:
        kind = next((m for m in reversed(one.modifiers) if m in TYPES), "b64")
        dtype, is_integer = TYPES[kind], TYPES[kind].kind in "iu"
        if not operand.width:
            if not is_integer:
                raise _unknown(one, f"an integer constant in an instruction of type {kind}; write a float, such as 1.0")
            return np.broadcast_to(np.uint64(operand.value & (2**64 - 1)), (self._count,))
        value = np.array([operand.value], f"uint{operand.width}")
        if is_integer and kind != f"b{operand.width}":
            raise _unknown(one, f"a float constant of {operand.width} bits in an instruction of type {kind}")
        if not is_integer:
            value = value.view(f"float{operand.width}")
            value = value if value.dtype == dtype else numerics.convert(value, dtype)
        return np.broadcast_to(raw(value), (self._count,))

    def _write(self, operand: Operand, bits: Bits, chosen: np.ndarray, one: Instruction) -> None:
        if not isinstance(operand, Register):
            raise _unknown(one)
        if operand.name == "_":
            return
        before = self._registers.get(operand.name)
        self._registers[operand.name] = bits if before is None else np.where(chosen, bits, before)

    def _addresses(self, operand: Operand, one: Instruction) -> np.ndarray:
        if not isinstance(operand, Address):
            raise _unknown(one)
        return self._read(operand.base, one) + np.uint64(operand.offset % 2**64)

    def _values(self, operand: Operand, one: Instruction) -> list[Bits]:
        parts = operand.parts if isinstance(operand, Vector) else (operand,)
        return [self._read(part, one) for part in parts]

    # --- instructions ------------------------------------------------------------------------------------------------

    def _execute(self, one: Instruction, chosen: np.ndarray) -> None:
        if one.name in _IDLE:
            return
        _check(one)
        done = True
        if one.name in _ORDERING:
            if one.name in ("bar", "barrier"):
                self._check_barrier(one, chosen)
            done = self._accesses.order(one.name, one.modifiers, not self._by_thread or bool(chosen[0]))
        elif one.name == "cp":
            done = self._accesses.group(one.modifiers, _pending(one), chosen)
        elif one.name in ("ld", "ldu"):
            self._load(one, self._accesses.load(one.modifiers, self._addresses(one.operands[1], one), chosen), chosen)
        elif one.name == "st":
            address, value = one.operands[:2]
            done = self._accesses.store(
                one.modifiers, self._addresses(address, one), self._values(value, one), chosen
            )  # fmt: skip
        elif one.name in ("atom", "red"):
            self._atomic(one, chosen)
        elif one.name == "multimem":
            done = self._multicast(one, chosen)
        elif one.name == "setp":
            self._compare(one, chosen)
        elif one.name in _OF_WARPS:
            done = self._exchange(one, chosen)
        elif one.name == "createpolicy":  # of a cache hint, which has no effect
            self._write(one.operands[0], np.zeros(self._count, np.uint64), chosen, one)
        else:
            self._compute(one, chosen)
        if not done:
            raise _unknown(one)

    def _check_barrier(self, one: Instruction, chosen: np.ndarray) -> None:
        """NotInterpretable for a barrier that is not one of all threads of the program."""
        operands = [self._read(operand, one) for operand in one.operands]
        if one.modifiers[:1] == ("warp",):
            if len(operands) != 1:
                raise _unknown(one, "it needs the mask of a warp's threads")
            return
        if not chosen.all():
            raise NotInterpretable(f"PTX `{one.text}` is reached by some threads of the program only")
        if not 1 <= len(operands) <= 2:
            raise _unknown(one, "it needs a barrier's number, and may have a number of threads")
        threads = self._position.threads
        if len(operands) == 2 and (operands[1] != threads).any():
            raise NotInterpretable(
                f"PTX `{one.text}` is a barrier of {int(operands[1][0])} of the program's {threads} threads; "
                f"only barriers of all are modelled"
            )

    def _load(self, one: Instruction, loaded: list[Bits] | None, chosen: np.ndarray) -> None:
        target = one.operands[0]
        parts = target.parts if isinstance(target, Vector) else (target,)
        if loaded is None or len(parts) != len(loaded):
            raise _unknown(one)
        for part, bits in zip(parts, loaded, strict=True):
            self._write(part, bits, chosen, one)

    def _atomic(self, one: Instruction, chosen: np.ndarray) -> None:
        operands = one.operands[1:] if one.name == "atom" else one.operands
        operands = operands[:-1] if CACHE_HINT in one.modifiers else operands
        values = [self._read(operand, one) for operand in operands[1:]]
        old = self._accesses.atomic(one.modifiers, self._addresses(operands[0], one), values, chosen)
        if old is None:
            raise _unknown(one)
        if one.name == "atom":
            self._write(one.operands[0], old, chosen, one)

    def _multicast(self, one: Instruction, chosen: np.ndarray) -> bool:
        what, modifiers = one.modifiers[0], one.modifiers[1:]
        if what == "ld_reduce":
            loaded = self._accesses.multicast_load(modifiers, self._addresses(one.operands[1], one), chosen)
            self._load(one, loaded, chosen)
            return True
        address, value = self._addresses(one.operands[0], one), self._values(one.operands[1], one)
        if what == "st":
            return self._accesses.multicast_store(modifiers, address, value, chosen)
        return what == "red" and self._accesses.multicast_atomic(modifiers, address, value, chosen)

    def _compute(self, one: Instruction, chosen: np.ndarray) -> None:
        if one.name not in _OPERANDS:
            raise _unknown(one)
        if one.name == "mov" and self._move_parts(one, chosen):
            return
        sources = [self._read(operand, one) for operand in one.operands[1:]]
        try:
            result = compute(one.name, one.modifiers, sources)
        except (IndexError, ValueError, TypeError, KeyError):
            result = None
        if result is None:
            raise _unknown(one)
        self._write(one.operands[0], result, chosen, one)

    def _exchange(self, one: Instruction, chosen: np.ndarray) -> bool:
        """Execute an instruction of a warp's threads; False for one that is not known."""
        to, *operands = one.operands
        *values, masks = [self._read(operand, one) for operand in operands]
        if not warps.reach(masks, chosen):
            raise NotInterpretable(f"PTX `{one.text}` is executed by other threads than its mask names")
        sources = np.arange(self._count)
        if one.name == "elect" and one.modifiers == ("sync",):
            results = warps.elected(masks)
        elif one.name == "shfl" and one.modifiers in [("sync", mode, "b32") for mode in ("up", "down", "bfly", "idx")]:
            *results, sources = warps.shuffled(one.modifiers[1], *values)
        else:
            return False
        if not chosen[sources[chosen]].all():
            raise NotInterpretable(f"PTX `{one.text}` takes the value of a thread that does not execute it")
        for register, bits in zip(to.parts if isinstance(to, Pair) else (to,), results, strict=False):
            self._write(register, bits, chosen, one)
        return True

    def _compare(self, one: Instruction, chosen: np.ndarray) -> None:
        """Execute ``setp``, with each result combined with a predicate, if there is one.

        The second result is of the opposite comparison.
        """
        to, *compared = one.operands
        combine = [name for name in one.modifiers if name in LOGIC]
        if len(combine) != len(compared) - 2 or any(isinstance(x, Register) and x.negated for x in compared[:2]):
            raise _unknown(one)
        modifiers = tuple(name for name in one.modifiers if name not in LOGIC)
        a, b, *further = [self._read(operand, one) for operand in compared]
        holds = compute("setp", modifiers, [a, b])
        if holds is None:
            raise _unknown(one)
        for register, value in zip(
            to.parts if isinstance(to, Pair) else (to,), (holds, holds ^ np.uint64(1)), strict=False
        ):
            combined = LOGIC[combine[0]](value, further[0]) if combine else value
            self._write(register, combined, chosen, one)

    def _move_parts(self, one: Instruction, chosen: np.ndarray) -> bool:
        """Move between a register and its parts, or of a vector register. False if it is neither.

        ``mov.b64 {a, b}, c``, ``mov.b64 c, {a, b}``, ``mov.v4.b32 v, 0``.
        """
        to, source = one.operands
        if one.modifiers[:1] in (("v2",), ("v4",)) and isinstance(to, Register):
            for letter in "xyzw"[: int(one.modifiers[0][1])]:
                part = Register(f"{source.name}.{letter}") if isinstance(source, Register) else source
                self._write(Register(f"{to.name}.{letter}"), self._read(part, one), chosen, one)
            return True
        parts = next((operand.parts for operand in (to, source) if isinstance(operand, Vector)), None)
        if parts is None or one.type not in TYPES:
            return False
        width = 8 * TYPES[one.type].itemsize // len(parts)
        if to.__class__ is source.__class__ or len(parts) not in (2, 4):
            raise _unknown(one)
        if isinstance(source, Vector):
            inside = [bits & np.uint64(2**width - 1) for bits in self._values(source, one)]
            self._write(to, packed(inside, width), chosen, one)
        else:
            for part, bits in zip(parts, parts_of(self._read(source, one), len(parts), width), strict=True):
                self._write(part, bits, chosen, one)
        return True


def _check(one: Instruction) -> None:
    """NotInterpretable for a wrong number of operands, or an access with modifiers that are not known."""
    why = refusal(one.name, one.modifiers) if one.name in _ACCESSES else ""
    least, most = _OPERANDS.get(one.name, (0, len(one.operands)))
    more = (CACHE_HINT in one.modifiers) + (one.name == "atom" and "cas" in one.modifiers)
    count = len(one.operands)
    if not why and not least + more <= count <= most + more:
        why = f"it has {count} operand{'s' * (count != 1)} and needs {least + more}"
    if not why and one.name != "setp" and any(isinstance(x, Register) and x.negated for x in one.operands):
        why = "only setp takes a negated predicate as an operand"
    if why:
        raise _unknown(one, why)


def _pending(one: Instruction) -> int | None:
    """Number of bulk groups that a wait leaves pending; None without a constant."""
    return one.operands[0].value if len(one.operands) == 1 and isinstance(one.operands[0], Immediate) else None


def _unknown(one: Instruction, why: str = "") -> NotInterpretable:
    return NotInterpretable(f"PTX `{one.text}` is not known{': ' if why else ''}{why}")
