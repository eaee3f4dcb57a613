"""Inline assembly: execution for a program's values, and advice where the simulator does not know it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import triton.language as tl

from weft.errors import NotInterpretable
from weft.simulator.interpreter.semantic import Semantic
from weft.simulator.interpreter.values import Flag, Integer, Operand, Text, make, numpy_dtype, plain
from weft.simulator.ptx import parsing, running
from weft.simulator.ptx.registers import packed, parts_of, raw
from weft.simulator.ptx.threads import elements_of

# (pattern of the assembly, replacement); the first match counts.
ADVICE = (
    (r"multimem\.ld_reduce", "add up tl.load of wl.symm_at(ptr, peer, team) in a loop over wl.num_ranks(team)"),
    (r"multimem\.", "tl.store through wl.symm_at(ptr, peer, team) in a loop over wl.num_ranks(team)"),
    (r"\bld\.\S*acquire", "write wl.wait(signal, value, team), or tl.atomic_add(ptr, 0, sem='acquire', scope='sys')"),
    (
        r"\bst\.\S*release",
        "write wl.notify(signal, peer, value, team), or tl.atomic_xchg(ptr, value, sem='release', scope='sys')",
    ),
    (r"\b(atom|red)\.", "write tl.atomic_add or another atomic, with sem= and scope="),
    (r"fence\.proxy", "write wl.wait(signal, value, team), which contains it"),
    (r"fence|membar", "write wl.fence(team)"),
    (r"prefetch", "write wl.prefetch(ptr, nbytes)"),
    (r"griddepcontrol", "write wl.follow_previous_kernel()"),
    (r"bar\.sync|barrier\.sync|s_barrier", "write tl.debug_barrier()"),
    (r"\bld\.\S*volatile", "write tl.load(ptr, volatile=True)"),
    (r"\bld\.", "write tl.load"),
    (r"\bst\.", "write tl.store"),
    (r"%tid", "write tl.arange(0, BLOCK) in place of a thread's number"),
    (r"%(smid|warpid|ctaid|nctaid)", "write tl.program_id, or avoid the hardware position of a program"),
    (r"%(globaltimer|clock)", "avoid clocks: simulated time means nothing"),
)


# Instructions that reach memory or other threads.
_OF_MEMORY = ("ld", "ldu", "st", "atom", "red", "multimem", "fence", "membar", "bar", "barrier", "griddepcontrol", "cp")


def _registers_of(itemsize: int, pack: int) -> tuple[int, int]:
    """(registers that hold ``pack`` elements, bits of an element)."""
    return max(1, pack * itemsize // 4) if itemsize < 4 else pack, 8 * itemsize


def instead_of(assembly: str) -> str:
    """Advice on portable code in place of this assembly, as a part of a sentence."""
    advice = (instead for pattern, instead in ADVICE if re.search(pattern, assembly))
    return next(advice, "write it in plain Triton")


class Assembly:
    """Stand-in for ``tl.inline_asm_elementwise``."""

    def __init__(self, semantic: Semantic) -> None:
        self._semantic = semantic

    def call(
        self,
        asm: Text,
        constraints: Text,
        args: Sequence[Operand],
        dtype: tl.dtype | Sequence[tl.dtype],
        is_pure: Flag,
        pack: Integer,
        _semantic: object = None,
    ) -> tl.tensor | tuple[tl.tensor, ...]:
        asm, constraints, dtype = plain(asm), plain(constraints), plain(dtype)
        kinds = [plain(kind) for kind in dtype] if isinstance(dtype, (tuple, list, tl.tuple)) else [dtype]
        try:
            code = parsing.parse(asm)
            operands = [self._semantic.to_tensor(plain(x)) for x in args]
            outputs = [part.strip() for part in constraints.split(",") if part.strip().startswith("=")]
            if plain(pack) != 1:
                results = self._run_packed(code, operands, kinds, plain(pack), len(outputs))
            elif len(outputs) == len(kinds):
                results = self._run(code, operands, kinds)
            else:
                raise NotInterpretable("only results before arguments, one register for each, are known")
        except NotInterpretable as error:
            raise NotInterpretable(
                f"inline assembly in {self._semantic.builder.names()} cannot run in the simulator: {error}; "
                f"{instead_of(asm)}, or put it under `if tl.target_info.is_cuda():` with a portable twin in plain Triton under "
                f"`else:`, which the simulator takes, and test that the two agree"
            ) from None
        return tuple(results) if isinstance(dtype, (tuple, list, tl.tuple)) else results[0]

    def _run(self, code: parsing.Code, args: list[tl.tensor], kinds: list[tl.dtype]) -> list[tl.tensor]:
        port = self._semantic.builder.port
        position, active = port.position(), port.active_threads()
        shape = _common_shape(args)
        size = int(np.prod(shape or ()))
        differ = any(x.type is x.dtype and x.handle.data.size > 1 for x in args)
        in_branch = active is not None and shape is None and running.orders(code)
        by_thread = differ or in_branch or running.needs_threads(code)
        if active is None:
            active = np.ones(position.threads, np.bool_)
        count = position.threads if by_thread else size
        parts: list[list[np.ndarray]] = []
        for first in range(0, size, count):
            part = slice(first, first + count)
            operands = [None] * len(kinds) + [_bits(x, shape, part, count) for x in args]
            mask = active if by_thread else elements_of(active, size)
            by_thread = by_thread and port.diverge(active)
            try:
                parts.append(running.Run(code, operands, position, port, by_thread).run(mask)[: len(kinds)])
            finally:
                if by_thread:
                    port.converge()
        return [self._result([part[i] for part in parts], kind, shape, active) for i, kind in enumerate(kinds)]

    def _run_packed(
        self, code: parsing.Code, args: list[tl.tensor], kinds: list[tl.dtype], pack: int, outputs: int
    ) -> list[tl.tensor]:
        """Results of executions that take ``pack`` elements each.

        Elements of less than 32 bits share registers, the first one in the low bits.
        """
        if running.needs_threads(code) or any(one.name in _OF_MEMORY for one in code.instructions):
            raise NotInterpretable("with pack above 1 only arithmetic of registers is known")
        shape = _common_shape(args)
        size = int(np.prod(shape or ()))
        if shape is None or size % pack:
            raise NotInterpretable(f"pack={pack} of {size} elements is not known")
        count = size // pack
        layouts = [_registers_of(numpy_dtype(kind).itemsize, pack) for kind in kinds]
        if sum(registers for registers, _ in layouts) != outputs:
            raise NotInterpretable(f"pack={pack} with {outputs} result registers is not known")
        operands: list[np.ndarray | None] = [None] * outputs
        for x in args:
            registers, width = _registers_of(x.handle.data.dtype.itemsize, pack)
            elements = np.broadcast_to(raw(x.handle.data), shape).reshape(count, registers, pack // registers)
            operands += [packed(list(elements[:, i].T), width) for i in range(registers)]
        port = self._semantic.builder.port
        results = running.Run(code, operands, port.position(), port, False).run(np.ones(count, np.bool_))
        made = []
        for kind, (registers, width) in zip(kinds, layouts, strict=True):
            own, results = results[:registers], results[registers:]
            parts = [np.stack(parts_of(bits, pack // registers, width), -1) for bits in own]
            dtype = numpy_dtype(kind)
            bits = np.stack(parts, 1).astype(f"uint{8 * dtype.itemsize}")
            made.append(make(bits.view(dtype).reshape(shape), kind, True))
        return made

    @staticmethod
    def _result(
        parts: list[np.ndarray], kind: tl.dtype, shape: tuple[int, ...] | None, active: np.ndarray
    ) -> tl.tensor:
        """Block of type ``kind``, or a scalar, which may differ between threads."""
        dtype = numpy_dtype(kind)
        bits = np.concatenate(parts).astype(f"uint{8 * dtype.itemsize}")
        if shape is not None:
            return make(bits[: int(np.prod(shape))].view(dtype).reshape(shape), kind, True)
        ran = bits[active] if bits.size == active.size else bits
        if ran.size and np.all(ran == ran[0]):
            bits = ran[:1]
        return make(bits.view(dtype), kind, False)


def _common_shape(args: list[tl.tensor]) -> tuple[int, ...] | None:
    """Shape to which the blocks among ``args`` are broadcast; None where all are scalars."""
    blocks = [x.handle.data.shape for x in args if x.type is not x.dtype]
    return np.broadcast_shapes(*blocks) if blocks else None


def _bits(x: tl.tensor, shape: tuple[int, ...] | None, part: slice, count: int) -> np.ndarray:
    """Raw bits of an argument for ``count`` threads or elements, which hold ``part`` of a block."""
    bits = raw(x.handle.data)
    if x.type is x.dtype:
        return bits
    flat = np.broadcast_to(bits, shape).ravel()[part]
    return np.resize(flat, count)
