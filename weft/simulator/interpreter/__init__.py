"""Interpreter of ordinary ``@triton.jit`` functions in NumPy, on the memory of a ``Port``.

An ``Interpreter`` patches Triton for the scope of a simulation. A kernel is rewritten once (operators and statements that
Python reads differently from Triton's compiler) and then runs as Python, so tracebacks, ``breakpoint()`` and debuggers show the
user's file and line. The interpreter holds no state of a program: it asks the port which program runs and what memory holds,
so programs may be greenlets.

Reading order: ``port`` (calls to the machine) and ``interpreter`` (the scope) are the outside. ``values`` (a tensor is a NumPy
array) and ``descriptors``. Triton's two layers as NumPy calls: ``builder`` (single operations) and ``semantic`` (type rules,
frequent operations). ``reductions`` and ``stand_ins``: functions of ``tl`` that are replaced. Kernels as Python: ``rewriting``,
``statements`` (helpers of the rewritten code), ``callees`` (resolution of names) and ``frames`` (source lines). Last,
``launching`` (arguments) and ``patching``.
"""

from __future__ import annotations

from weft.simulator.interpreter.frames import CodeLine
from weft.simulator.interpreter.interpreter import Interpreter
from weft.simulator.interpreter.launching import Launch
from weft.simulator.interpreter.port import GridSizes, Port
from weft.simulator.interpreter.values import addresses_of, block, element_dtype, numpy_dtype, scalar, value_of

__all__ = [
    "CodeLine",
    "GridSizes",
    "Interpreter",
    "Launch",
    "Port",
    "addresses_of",
    "block",
    "element_dtype",
    "numpy_dtype",
    "scalar",
    "value_of",
]
