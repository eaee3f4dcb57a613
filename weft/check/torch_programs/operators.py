"""Custom operators of a torch program: torch's registry has one for all ranks, which leads to theirs.

Each rank loads the program's modules, and torch destroys or refuses an operator that is defined once more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch._library.custom_ops import CustomOpDef
from torch.library import Library

from weft.check.torch_programs.processes import is_installed
from weft.check.torch_programs.ranks import ranks_if_running

if TYPE_CHECKING:
    from weft.check.torch_programs.ranks import Ranks

# Modules that make a library for their caller.
_REGISTERING = ("torch.library", "torch._library.", "functools", "weft.check.torch_programs")
_FUNCTIONS = ("_init_fn", "_abstract_fn", "_setup_context_fn", "_backward_fn", "_vmap_fn")


def _of_rank(name: str) -> property:
    """Attribute with a value for each rank, and the first one for ranks without a value and outside runs."""

    def get(operator: Any) -> Any:
        ranks = ranks_if_running()
        first = vars(operator)[name]
        return first if ranks is None else operator.functions.get((ranks.here.rank, name), first)

    def put(operator: Any, value: Any) -> None:
        ranks = ranks_if_running()
        if ranks is None or vars(operator)[name] is None:
            vars(operator)[name] = value
        if ranks is not None:
            operator.functions[ranks.here.rank, name] = value

    return property(get, put)


class OperatorOfRanks(CustomOpDef):
    """Operator with functions of each rank, which calls its caller's."""

    functions: dict[tuple[int, str], Any]

    def register_kernel(self, device_types: Any, fn: Any = None, /) -> Any:
        """Take a kernel for GPUs or for any device; one for another device is never called here."""
        if fn is None:
            return partial(self.register_kernel, device_types)
        kinds = (device_types,) if device_types is None or isinstance(device_types, str) else tuple(device_types)
        if "cuda" in kinds or None in kinds:
            self._init_fn = fn
        return fn


for _name in _FUNCTIONS:
    setattr(OperatorOfRanks, _name, _of_rank(_name))


def custom_op(ranks: Ranks, define: Callable[..., Any], name: str, fn: Any = None, /, **options: Any) -> Any:
    """Stand-in for ``torch.library.custom_op``, which is ``define``. Operators of torch stay as they are."""
    if _caller().partition(".")[0] == "torch":
        return define(name, fn, **options)
    if fn is None:
        return partial(custom_op, ranks, define, name, **options)
    operator = ranks.operators.get(name)
    if operator is None:
        operator = ranks.operators[name] = define(name, fn, **options)
        operator.functions, operator.__class__ = {}, OperatorOfRanks

        def call(*args: object, **kwargs: object) -> object:
            return operator._init_fn(*args, **kwargs)

        operator._backend_fns.update(dict.fromkeys(operator._backend_fns, call))
    operator._init_fn = fn
    return operator


def library(ranks: Ranks) -> dict[str, Callable[..., Any]]:
    """Stand-ins for methods of ``torch.library.Library``, by which each rank defines the operators."""
    return {
        "__init__": partial(_start, ranks, Library.__init__), "define": partial(_define, ranks, Library.define),
        "impl": partial(_implement, ranks, Library.impl),
    }  # fmt: skip


def _start(
    ranks: Ranks, start: Callable[..., None], library: Library, ns: str, kind: str, dispatch_key: str = ""
) -> None:
    """Make a library of a namespace, which all ranks may do. It ends with the run, as its module does."""
    start(library, ns, "FRAGMENT" if kind == "DEF" else kind, dispatch_key)
    module = sys.modules.get(_caller())
    if module is None or not is_installed(module):
        ranks.libraries.append(library)


def _caller() -> str:
    """Module that calls one of the functions by which operators are registered."""
    frame: FrameType | None = sys._getframe(1)
    name = __name__
    while frame is not None and name.startswith(_REGISTERING):
        name, frame = str(frame.f_globals.get("__name__")), frame.f_back
    return name


def _define(ranks: Ranks, define: Callable[..., Any], library: Library, schema: str, *args: Any, **options: Any) -> Any:
    """Define an operator, if no other rank or earlier run has. Operators of torch stay as they are."""
    if _caller().partition(".")[0] == "torch":
        return define(library, schema, *args, **options)
    name, rank = schema.partition("(")[0], ranks.here.rank
    definers = ranks.defined.setdefault(f"{library.ns}::{name}", set())
    try:
        return define(library, schema, *args, **options)
    except RuntimeError as error:
        if rank in definers or "multiple times" not in str(error):
            raise
        return name
    finally:
        definers.add(rank)


def _implement(
    ranks: Ranks, implement: Callable[..., Any], library: Library, op_name: Any, fn: Any, dispatch_key: str = "",
    **options: Any,
) -> None:  # fmt: skip
    """Register a kernel for the present rank. The dispatcher gets one that leads to all ranks' kernels.

    A kernel for GPUs is one for any device, since tensors lie in memory of the CPU.
    """
    name = op_name if isinstance(op_name, str) else op_name._schema.name
    operator = f"{library.ns}::{name.rpartition('::')[2]}"
    if operator not in ranks.defined:
        return implement(library, op_name, fn, dispatch_key, **options)
    key = dispatch_key or library.dispatch_key
    key = "CompositeExplicitAutograd" if key == "CUDA" else key
    kernels = ranks.kernels.setdefault((operator, key), {})
    is_first = not kernels
    kernels[ranks.here.rank] = fn

    def call(*args: object, **kwargs: object) -> object:
        running = ranks_if_running()
        own = {} if running is None else running.kernels.get((operator, key), {})
        return (own.get(running.here.rank, fn) if running is not None else fn)(*args, **kwargs)

    try:
        return implement(library, op_name, call, key, **options) if is_first else None
    except RuntimeError as error:
        if "already a kernel registered" not in str(error):  # by an earlier run, for all runs
            raise
