"""Resolution of functions that kernel code names: rewritten, bound to the semantic layer, replaced."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from functools import cache, partial

import triton
import triton.language as tl

from weft.simulator.interpreter import rewriting, statements
from weft.simulator.interpreter.frames import KernelFrames
from weft.simulator.interpreter.semantic import Semantic
from weft.simulator.interpreter.values import not_interpretable
from weft.triton_api import TRITON_BUILTIN, JITFunction, core

_CHECKED = getattr(core.num_programs, "__code__", None)  # of the check around every builtin


def is_builtin(member: object) -> bool:
    """True if Triton's compiler passes the semantic layer to ``member`` as ``_semantic``."""
    try:
        return bool(getattr(member, TRITON_BUILTIN, False))
    except Exception:  # lazily loaded attributes of foreign objects
        return False


def with_semantic(member: Callable, semantic: Semantic) -> Callable:
    """Builtin with the semantic layer bound, callable from kernel code."""
    inner = _asking_for_semantic(member)
    return member if inner is None else partial(inner, _semantic=semantic)


@cache  # a simulation asks for all of tl, at each launch
def _asking_for_semantic(member: Callable) -> Callable | None:
    """A builtin's function that takes ``_semantic``, without the check around it; None if it takes none."""
    signature = getattr(member, "signature", None) or inspect.signature(member)
    if "_semantic" not in signature.parameters and not inspect.isclass(member):
        return None
    is_checked = hasattr(member, "signature") or getattr(member, "__code__", None) is _CHECKED
    return member.__wrapped__ if hasattr(member, "__wrapped__") and is_checked else member


# The stubs that kernels import, and the module in which Triton's compiler for NVIDIA GPUs finds their implementation.
_STUBS, _LIBDEVICE = "triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice"


def _libdevice(name: str, function: Callable) -> Callable:
    """libdevice function that raises TypeError, in one line, for unsupported types."""

    def call(*args: object, **kwargs: object) -> object:
        try:
            return function(*args, **kwargs)
        except KeyError as error:
            given = ", ".join(getattr(ty, "name", str(ty)) for ty in error.args[0])
            raise TypeError(
                f"libdevice.{name} has no version for {given}; cast the arguments, to tl.float32 for instance"
            ) from None

    return call


def _with_constexprs(function: Callable) -> Callable:
    """Builtin of another project, which gets constants as constexprs, as from Triton's compiler."""

    def call(*args: object, **kwargs: object) -> object:
        return function(*map(_as_compiled, args), **{name: _as_compiled(x) for name, x in kwargs.items()})

    return call


def _as_compiled(x: object) -> object:
    """Constant as a constexpr, also in tuples and lists, which Triton's compiler makes a ``tl.tuple``."""
    if isinstance(x, (tuple, list, tl.tuple)):
        values = [_as_compiled(value) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else tl.tuple(values)
    return tl.constexpr(x) if x is None or isinstance(x, (bool, int, float, str)) else x


_ConstexprFunction = type(triton.constexpr_function(is_builtin))


class Callees:
    """Table from the objects that kernel code names to the functions it calls, filled on demand."""

    def __init__(self, semantic: Semantic, frames: KernelFrames) -> None:
        self._semantic, self._frames = semantic, frames
        self._table: dict[int, tuple[object, Callable]] = {}  # id -> (object with that id, function to call)
        self._replaced: dict[int, tuple[object, Callable]] = {}
        self.helpers = {"__weft_call__": self.resolve, **statements.helpers(semantic)}

    def replace(self, callee: object, function: Callable) -> None:
        """Replace ``callee`` by ``function`` permanently."""
        self._replaced[id(callee)] = (callee, function)
        self.know(callee, function)

    def know(self, callee: object, function: Callable) -> None:
        """Replace ``callee`` by ``function`` until ``forget``."""
        self._table[id(callee)] = (callee, function)

    def forget(self) -> None:
        self._table = dict(self._replaced)

    def resolve(self, callee: object) -> Callable:
        """Function that kernel code calls when it names ``callee``."""
        entry = self._table.get(id(callee))
        if entry is not None and entry[0] is callee:
            return entry[1]
        if isinstance(callee, types.MethodType):
            return callee
        if isinstance(callee, tl.constexpr):
            return self.resolve(callee.value)
        module = getattr(callee, "__module__", None)
        if isinstance(callee, JITFunction):
            function = self._rewritten(callee)
        elif module in (_STUBS, _LIBDEVICE) and inspect.isfunction(callee):
            name = callee.__name__
            builtin = getattr(tl.extra.cuda.libdevice, name, None)
            if builtin is None:
                raise not_interpretable(f"libdevice.{name}")
            function = _libdevice(name, with_semantic(builtin, self._semantic))
        elif is_builtin(callee):
            function = with_semantic(callee, self._semantic)
            if not str(module).startswith(("triton.", "weft.")):
                function = _with_constexprs(function)
        elif isinstance(callee, (type, types.FunctionType, _ConstexprFunction)):
            function = callee
        else:
            return callee
        self.know(callee, function)
        return function

    def _rewritten(self, jit_fn: JITFunction) -> Callable:
        if jit_fn.is_gluon():
            raise not_interpretable(f"the Gluon function {jit_fn.__name__}")
        original = jit_fn.fn
        raw = "".join(jit_fn.raw_src)
        definition = re.search(r"^([ \t]*)def\s+\w+\s*\(", raw, re.MULTILINE)
        assert definition is not None, jit_fn
        first_line = jit_fn.starting_line_number + raw[: definition.start()].count("\n")
        code = rewriting.compile_kernel(
            jit_fn.src, original.__code__.co_filename, first_line, len(definition[1]), original.__name__,
            original.__code__.co_freevars,
        )  # fmt: skip
        self._frames.add(rewriting.codes_of(code))
        return rewriting.bind(code, original, self.helpers)
