"""Scope in which Triton kernels run in the simulator."""

from __future__ import annotations

import types
from collections.abc import Callable

from weft.simulator.interpreter import launching, patching
from weft.simulator.interpreter.builder import Builder
from weft.simulator.interpreter.callees import Callees
from weft.simulator.interpreter.frames import LIBRARIES, CodeLine, KernelFrames
from weft.simulator.interpreter.launching import Launch
from weft.simulator.interpreter.port import GridSizes, Port
from weft.simulator.interpreter.semantic import Semantic
from weft.simulator.interpreter.stand_ins import StandIns
from weft.simulator.interpreter.values import value_of
from weft.triton_api import JITFunction


class Interpreter:
    """Scope in which Triton is patched, one at a time per process.

    Use as ``with Interpreter(port) as interpreter:``.
    """

    def __init__(self, port: Port) -> None:
        self.port = port
        self.frames = KernelFrames()
        self._semantic = Semantic(Builder(port, self.frames.kernel_name))
        self._callees = Callees(self._semantic, self.frames)
        self._stand_ins = StandIns(self._semantic, self._callees.resolve)
        self._patches = patching.Patches()

    def __enter__(self) -> Interpreter:
        if patching.is_active():
            raise RuntimeError(
                "this process simulates kernels already; call weft.simulate or weft.check outside of main"
            )
        try:
            patching.patch_jit_functions(
                self._patches, self.port.launch, self._callees.resolve, lambda: self.frames.innermost() is not None
            )
            patching.patch_language(self._patches, self._callees, self._stand_ins)
            patching.patch_values(self._patches, self._semantic, self._stand_ins.cast)
        except BaseException:
            self._patches.restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.restore()
        self._callees.forget()

    def replace(self, jit_fn: object, function: Callable) -> None:
        """Replace a jit function (or any callable) in kernels by ``function``, with unchanged arguments."""
        self._callees.replace(jit_fn, function)

    def prepare(self, jit_fn: JITFunction, grid: GridSizes, args: tuple, kwargs: dict) -> Launch:
        """Bind a launch's arguments as Triton does. TypeError for missing, extra or unknown arguments."""
        return launching.prepare(self._semantic, jit_fn, self._callees.resolve(jit_fn), grid, args, kwargs)

    def kernel_line(self) -> CodeLine | None:
        """Line of the innermost kernel code now executing, outside ``LIBRARIES`` if possible."""
        frame = self.frames.innermost(LIBRARIES)
        return (frame.f_code, frame.f_lineno) if frame is not None else None

    def evaluate(self, expression: types.CodeType) -> object:
        """Plain value of an expression in the frame of ``kernel_line``; None if it has none there.

        expression  of ``compile_expression``; it touches no memory, since it runs outside the schedule
        """
        frame = self.frames.innermost(LIBRARIES)
        if frame is None:
            return None
        try:
            variables = {**frame.f_globals, **frame.f_locals, **self._callees.helpers}
            return value_of(types.FunctionType(expression, variables)())
        except Exception:  # a variable that is not assigned yet, for instance
            return None
