"""Runs ordinary ``@triton.jit`` functions with NumPy, one program at a time, on whatever memory a ``Port`` offers.

The one place that touches Triton's internals. An ``Interpreter`` patches Triton for the scope of a simulation; a kernel is
rewritten once (operators and statements that Python would read otherwise than Triton's compiler does) and then runs as
Python, so tracebacks, ``breakpoint()`` and debuggers show the user's file and line. Nothing here belongs to a program:
which one runs, and what memory holds, is asked of the port, so programs may be greenlets.

Reading order: ``port`` (what is asked of the machine) and ``interpreter`` (the scope) are the outside; ``values`` (a tensor
is a NumPy array) and ``descriptors``; Triton's two layers as NumPy calls: ``builder`` (single operations) and ``semantic``
(type rules and the hot operations); ``reductions`` and ``stand_ins`` (functions of ``tl`` that are replaced outright); then
how a kernel becomes Python: ``rewriting``, ``statements`` (what the rewritten code calls), ``callees`` (what a name means in
it) and ``frames`` (where it is); last ``launching`` (arguments) and ``patching``.
"""

from __future__ import annotations

from weft.simulator.interpreter.frames import LIBRARIES
from weft.simulator.interpreter.interpreter import Interpreter
from weft.simulator.interpreter.launching import Launch
from weft.simulator.interpreter.port import Port
from weft.simulator.interpreter.values import addresses_of, block, element_dtype, numpy_dtype, scalar, value_of

__all__ = [
    "LIBRARIES",
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
