"""Triton's front end for the kernels of a simulation: which kernels Triton refuses, and where.

The interpreter executes a kernel's Python, so it also runs what is not Triton: dictionaries, ``try``, a variable of two types.
The front end, which makes Triton IR of a kernel, needs no GPU and no ptxas. It runs after the simulation, because the
interpreter replaces parts of ``tl`` until then.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from weft.triton_api import (
    ASTSource,
    CodeGenerator,
    CompilationError,
    GPUTarget,
    JITFunction,
    create_function_from_signature,
    driver,
    find_paths_if,
    ir,
    make_backend,
)

TARGET = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Kernel that Triton does not compile.

    message         in Triton's words
    file, line      where the front end stopped, in the kernel or a function that it calls; else the kernel's first line
    function, text  name of that function, and the line's text
    """

    kernel: str
    message: str
    file: str
    line: int
    function: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Kernel with the types and compile-time constants of its arguments, and its launch options.

    key  of a kernel by identity, since its hash walks all that it refers to, and of types, constants and options as text
    """

    key: tuple[Hashable, str]
    kernel: JITFunction = field(compare=False)
    signature: dict[str, Any] = field(compare=False)
    constants: dict[tuple, Any] = field(compare=False)
    options: dict[str, Any] = field(compare=False)


class FrontEnd:
    """Distinct kernels of one simulation, each taken to Triton IR once.

    known  results of earlier simulations, which ``refusals`` extends
    """

    def __init__(self, known: dict[Source, Refusal | None] | None = None) -> None:
        self._known = {} if known is None else known
        self._launched: dict[Source, None] = {}
        self._backend = make_backend(TARGET)
        self._options = vars(self._backend.parse_options({})).keys()
        self._binders: dict[int, Callable[..., tuple]] = {}

    def note(self, kernel: JITFunction, args: tuple, kwargs: dict[str, Any]) -> Source:
        """Note a launch with arguments that the interpreter has accepted."""
        binder = self._binders.get(id(kernel))
        if binder is None:
            binder = create_function_from_signature(kernel.signature, kernel.params, self._backend)
            self._binders[id(kernel)] = binder
        bound, specialisation, options = binder(*args, **kwargs)
        kinds = [kind for kind, _ in specialisation]
        paths = find_paths_if(kinds, lambda _, kind: kind == "constexpr")
        constants = {path: _at(list(bound.values()), path) for path in paths}
        # The simulator takes AMD's options too.
        options = {name: value for name, value in options.items() if name in self._options}
        source = Source(
            key=(_identity(kernel), f"{kinds} {constants} {options}"), kernel=kernel,
            signature=dict(zip(bound, kinds, strict=True)), constants=constants, options=options,
        )  # fmt: skip
        self._launched[source] = None
        return source

    def forget(self, source: Source) -> None:
        self._launched.pop(source, None)

    def refusals(self) -> list[Refusal]:
        """Refused kernels, in the order of their first launches; only outside the interpreter's scope."""
        for source in self._launched:
            if source not in self._known:
                self._known[source] = self._refusal(source)
        refused = [self._known[source] for source in self._launched]
        return list(dict.fromkeys(refusal for refusal in refused if refusal is not None))

    def _refusal(self, source: Source) -> Refusal | None:
        context = ir.context()
        ir.load_dialects(context)
        self._backend.load_dialects(context)
        options = self._backend.parse_options(source.options)
        functions = self._backend.get_codegen_implementation(options)
        made = ASTSource(source.kernel, source.signature, source.constants)
        try:
            with _target_driver():
                made.make_ir(TARGET, options, functions, self._backend.get_module_map(), context)
                made.hash()  # of all functions referred to, some of which Triton refuses here
        except Exception as error:  # whatever Python and Triton raise on the way
            return _refusal_of(source.kernel, error)
        return None


def _identity(kernel: JITFunction) -> Hashable:
    """Identity of a kernel in this process.

    Files of torch programs are loaded once for each rank and run, so that one kernel is several functions.
    """
    function = kernel.fn
    at = function.__code__.co_filename, function.__code__.co_firstlineno, kernel.src
    return id(kernel) if function.__closure__ else at


@contextmanager
def _target_driver() -> Iterator[None]:
    """Scope in which Triton's driver is of a GPU that is not here: code asks it for the target alone."""
    before = driver._active
    driver.set_active(SimpleNamespace(get_current_target=lambda: TARGET))
    try:
        yield
    finally:
        driver._active = before


def _at(values: Any, path: tuple[int, ...]) -> Any:
    """The value at ``path`` of nested sequences."""
    for index in path:
        values = values[index]
    return values


# How the front end says another exception: by its repr.
_EXCEPTION = re.compile(r"""(\w+)\((["'])(.*)\2\)""", re.DOTALL)


def _refusal_of(kernel: JITFunction, error: Exception) -> Refusal:
    """Refusal from the innermost error, which names the line: each caller's generator wraps it again."""
    while isinstance(error.__cause__, CompilationError):
        error = error.__cause__
    message = getattr(error, "error_message", None) or f"{type(error).__name__}: {error}"
    if named := _EXCEPTION.fullmatch(message):
        message = f"{named[1]}: {named[3]}"
    message = " ".join(message.split()).rstrip(".")
    generator = None
    entry = error.__traceback__
    while entry is not None:
        visitor = entry.tb_frame.f_locals.get("self")
        generator = visitor if isinstance(visitor, CodeGenerator) else generator
        entry = entry.tb_next
    node = getattr(generator, "cur_node", None)
    code = (kernel if node is None else generator.jit_fn).fn.__code__
    line = code.co_firstlineno if node is None else generator.begin_line + node.lineno
    return Refusal(
        kernel=kernel.__name__, message=message, file=code.co_filename, line=line, function=code.co_name,
        text=linecache.getline(code.co_filename, line).strip(),
    )  # fmt: skip
