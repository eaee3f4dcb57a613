"""Triton's internals that weft uses: no other file imports a module of Triton's that is not public.

``tests/simulator/test_triton_contracts.py`` tests the behaviour relied on, of every name exported here. The users, besides the
simulator's interpreter:

JITFunction     a simulation and ``weft.bench.harness.compiling`` replace its ``run``; ``weft.runtime.launching`` goes past it
CompiledKernel  ``launcher_of`` calls ``run`` with ``function`` and ``packed_metadata``, or the function of C below it;
                ``weft.bench.harness.compiling`` calls ``_init_handles``
knobs           ``weft.runtime.launching`` asks for a profiler's hooks, ``weft.runtime.triton_interpret`` for TRITON_INTERPRET
CodeGenerator   ``weft.language.lowering.debug_site`` looks for it on the Python stack
ASTSource, create_function_from_signature, driver, find_paths_if, make_backend
                ``weft.simulator.front_end`` takes kernels to Triton IR with them
builder         ``weft.language.lowering.stock`` reads the ``options`` of ``_semantic.builder``
gsan            ``weft.runtime.platforms.sanitized`` takes heaps from it, and ``weft.check.gpu`` looks whether it is there
builtin         decorates the functions of ``weft.language`` that run as a kernel is compiled
hash_triton     ``weft.runtime.early`` calls it in the processes of ranks
target_info     ``weft.language.lowering`` asks it for the GPU that a kernel is compiled for
standard        ``weft.runtime.triton_interpret`` looks whether its functions are interpreted
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import triton
from triton import knobs, testing
from triton._C.libtriton import ir
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError, CompiledKernel, make_backend
from triton.compiler.code_generator import CodeGenerator
from triton.language import core, standard, target_info
from triton.language.core import TRITON_BUILTIN, base_value, builtin, tensor_descriptor_base
from triton.language.semantic import IncompatibleTypeErrorImpl, TritonSemantic
from triton.runtime import cache
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, TensorWrapper, create_function_from_signature, find_paths_if

if TYPE_CHECKING:
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, InterpreterOptions, TensorHandle

__all__ = [
    "TRITON_BUILTIN", "ASTSource", "Autotuner", "CodeGenerator", "CompilationError", "CompiledKernel", "GPUTarget",
    "IncompatibleTypeErrorImpl", "InterpretedFunction", "InterpreterBuilder", "InterpreterOptions", "JITFunction",
    "TensorHandle", "TensorWrapper", "TritonSemantic", "base_value", "builtin", "canonicalize_dtype", "combine_max",
    "combine_min", "combine_sum", "core", "create_function_from_signature", "driver", "find_paths_if", "gsan", "hash_triton",
    "ir", "knobs", "launcher_of", "make_backend", "standard", "target_info", "tensor_descriptor_base", "testing",
    "wrap_axis",
]  # fmt: skip

wrap_axis = core._wrap_axis
# Combine functions of tl.sum, tl.max and tl.min.
combine_sum, combine_max, combine_min = standard._sum_combine, standard._elementwise_max, standard._elementwise_min


def launcher_of(compiled: CompiledKernel) -> tuple[Callable[..., None], tuple]:
    """Function that launches ``compiled`` without hooks, and its arguments before the kernel's own.

    These come after the grid and the stream.
    Triton's launcher asks at every call whether the kernel needs scratch memory, and then calls a function of C. That one is
    called directly if the kernel needs none and the function takes its arguments as Triton 3.6 gives them.
    """
    run = compiled.run
    is_known = triton.__version__.startswith("3.6.") and type(run).__module__ == "triton.backends.nvidia.driver"
    if is_known and not run.global_scratch_size and not run.profile_scratch_size:
        how = run.launch_cooperative_grid, run.launch_pdl, None, None  # no scratch memory of either kind
        return run.launch, (compiled.function, *how, compiled.packed_metadata, None, None, None)
    return run, (compiled.function, compiled.packed_metadata, None, None, None)


def hash_triton() -> None:
    """Hash Triton's files, which Triton does before it looks for a process's first kernel in its cache.

    400 MB, 0.4 s, during which other threads go on. The hash is kept.
    """
    cache.triton_key()


def gsan() -> ModuleType:
    """GSan, Triton's sanitizer for races of global memory. ImportError before Triton 3.8."""
    import triton.experimental.gsan
    import triton.experimental.gsan.symmetric_memory

    return triton.experimental.gsan


def __getattr__(name: str) -> Any:
    # Loaded on first use, which only a simulation makes.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import triton.runtime.interpreter as interpreter

    return getattr(interpreter, name)
