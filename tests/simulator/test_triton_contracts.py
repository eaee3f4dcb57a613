"""Behaviour of Triton that weft relies on, beyond what Triton documents: the kernel language itself is not listed here.

Every contract holds on the versions in ``VERSIONS`` unless it names its own. On a Triton outside that list all are tested.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import BaseBackend
from triton.backends.nvidia import driver as cuda_driver
from triton.compiler import code_generator
from triton.language import semantic
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from weft import triton_api
from weft.simulator.interpreter.builder import Builder
from weft.simulator.interpreter.semantic import Semantic
from weft.triton_api import CompiledKernel, JITFunction, TritonSemantic

VERSIONS = ("3.6.0", "3.7.1", "3.9.0")
ROOT = Path(__file__).parents[2]
INTERPRETER = "weft/simulator/interpreter/"


@triton.jit
def kernel(x: tl.const, count: tl.int64, block: tl.constexpr, option=None):
    pass


DECORATED_AT = kernel.fn.__code__.co_firstlineno


def launch_is_one_method(monkeypatch: pytest.MonkeyPatch) -> bool:
    calls = []
    monkeypatch.setattr(JITFunction, "run", lambda fn, *args, **options: calls.append((fn, args, options)))
    kernel[(3,)](None, 1, block=2)
    kernel.warmup(None, 1, block=2, grid=(3,))
    (fn, args, launched), (_, _, warmed) = calls
    assert (fn, args) == (kernel, (None, 1))
    return (launched, warmed) == tuple({"grid": (3,), "warmup": warmup, "block": 2} for warmup in (False, True))


def parameters_are_described(_: pytest.MonkeyPatch) -> bool:
    facts = [(p.name, p.is_constexpr, p.is_const, p.annotation_type) for p in kernel.params]
    assert facts[0][:3] == ("x", False, True) and facts[1] == ("count", False, False, "i64")
    assert [p.is_constexpr for p in kernel.params] == [False, False, True, False]
    return list(kernel.signature.parameters) == [p.name for p in kernel.params] and kernel.pre_run_hooks == []


def source_is_kept(_: pytest.MonkeyPatch) -> bool:
    assert kernel.src.startswith("def kernel(") and "".join(kernel.raw_src).startswith("@triton.jit")
    return kernel.starting_line_number == DECORATED_AT and not kernel.is_gluon() and kernel.fn.__name__ == "kernel"


def interpreted_when_asked(monkeypatch: pytest.MonkeyPatch) -> bool:
    assert not KNOBS.interpret and isinstance(tl.standard.sum, JITFunction)
    monkeypatch.setattr(KNOBS, "interpret", True)
    return isinstance(triton.jit(kernel.fn), triton_api.InterpretedFunction)


def target_is_asked_in_one_place(monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(tl.target_info, "current_target", lambda: None)
    return not (tl.target_info.is_cuda() or tl.target_info.is_hip() or tl.target_info.cuda_capability_geq(8, 0))


def unknown_dtypes_raise_key_errors(_: pytest.MonkeyPatch) -> bool:
    with pytest.raises(KeyError):
        triton_api.canonicalize_dtype(torch.complex64)
    return triton_api.canonicalize_dtype(torch.bfloat16) == "bf16"


def libdevice_raises_key_errors_with_the_types(_: pytest.MonkeyPatch) -> bool:
    block = Semantic(Builder(None, lambda: "")).full([1], 1, tl.int32)
    with pytest.raises(KeyError) as error:
        tl.extra.cuda.libdevice.exp(block, _semantic=Semantic(Builder(None, lambda: "")))
    return [ty.name for ty in error.value.args[0]] == ["int32"]


def arguments_are_specialised(_: pytest.MonkeyPatch) -> bool:
    def kind(argument: object) -> tuple:
        return jit.native_specialize_impl(BaseBackend, argument, False, True, True)

    aligned = torch.zeros(32)
    assert len({kind(x) for x in (1, 2, 16, 2**31, 2**31 + 1)}) == 5 and kind(2) == kind(7) and kind(16) == kind(48)
    return kind(aligned) == kind(aligned[4:]) != kind(aligned[1:]) == kind(aligned[3:])


def asked_of_builders() -> str:
    return "".join(map(inspect.getsource, (semantic, tl.core, tl.math)))


def operations_have_these_names(_: pytest.MonkeyPatch) -> bool:
    is_old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
    later = {"create_atomic_load", "create_atomic_store", "create_atomic_poll", "create_approx_divf", "create_fneg"}
    own = {name for name in vars(Builder) if name.startswith(("create_", "get_"))}
    unasked = {name for name in own if f"builder.{name}(" not in asked_of_builders()}
    # Asked for by name: getattr(builder, "create_extern_elementwise").
    return unasked - {"create_extern_elementwise"} <= (later if is_old else set())


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One behaviour. ``users``: files that rely on it, of the interpreter if they have no folder."""

    behaviour: str
    users: tuple[str, ...]
    holds: Callable[[pytest.MonkeyPatch], object]
    versions: tuple[str, ...]


def contract(behaviour: str, users: str, holds: Callable[[pytest.MonkeyPatch], object], *versions: str) -> Contract:
    return Contract(behaviour=behaviour, users=tuple(users.split()), holds=holds, versions=versions or VERSIONS)


COMPILER = inspect.getsource(code_generator.CodeGenerator)
KNOBS = triton_api.knobs.runtime

CONTRACTS = (
    # kernels as objects
    contract("kernel[grid](...) and warmup call JITFunction.run(*args, grid=, warmup=, **options)",
             "patching.py weft/tune/compiling.py weft/runtime/launching.py", launch_is_one_method),
    contract("a JITFunction has the parameters' names, kinds and annotations, its signature and its hooks", "launching.py",
             parameters_are_described),
    contract("a JITFunction has its source without decorators, with them, and the line of the first", "callees.py",
             source_is_kept),
    contract("triton.jit makes an InterpretedFunction, and not a JITFunction, while TRITON_INTERPRET is set",
             "patching.py weft/runtime/triton_interpret.py", interpreted_when_asked),
    contract("reinterpret makes a TensorWrapper with the tensor as base and the new dtype", "launching.py",
             lambda _: (w := triton.reinterpret(x := torch.zeros(2), tl.int32)).base is x and w.dtype == tl.int32
             and isinstance(w, triton_api.TensorWrapper)),
    contract("a host's TensorDescriptor has base, shape, strides, block_shape and padding", "launching.py",
             lambda _: (d := TensorDescriptor(torch.zeros(4, 4), [4, 4], [4, 1], [2, 2])).padding == "zero"
             and (d.shape, d.strides, d.block_shape) == ([4, 4], [4, 1], [2, 2])),
    contract("canonicalize_dtype names a tensor's dtype as str_to_ty reads it, and raises KeyError", "launching.py",
             unknown_dtypes_raise_key_errors),
    # launches of compiled kernels
    contract("JITFunction.run launches by kernel.run(x, y, z, stream, function, packed_metadata, metadata, hooks, *arguments)",
             "weft/runtime/launching.py", lambda _: re.search(
                 r"kernel\.run\(grid_0, grid_1, grid_2, stream, kernel\.function, kernel\.packed_metadata, launch_metadata,\s+"
                 r"knobs\.runtime\.launch_enter_hook, knobs\.runtime\.launch_exit_hook, \*bound_args\.values\(\)",
                 inspect.getsource(JITFunction.run))),
    contract("a pointer is specialised on its dtype and 16-byte alignment, an integer on 1, multiples of 16 and its width",
             "weft/runtime/launching.py weft/runtime/team/view.py", arguments_are_specialised),
    contract("CompiledKernel loads itself in _init_handles and is launched by compiled[grid](..., stream=)",
             "weft/runtime/launching.py weft/tune/compiling.py",
             lambda _: callable(CompiledKernel._init_handles)
             and "stream=None" in inspect.getsource(CompiledKernel.__getitem__)),
    contract("CudaLauncher calls launch(x, y, z, stream, function, cooperative, pdl, scratch, profile_scratch, *arguments)",
             "weft/triton_api.py", lambda _: re.search(
                 r"self\.launch\(gridX, gridY, gridZ, stream, function, self\.launch_cooperative_grid, self\.launch_pdl,\s+"
                 r"global_scratch, profile_scratch, \*args\)", inspect.getsource(cuda_driver.CudaLauncher)),
             "3.6.0"),
    contract("a pointer argument may be an integer, its address", "weft/runtime/launching.py",
             lambda _: "PyLong_Check(obj)" in inspect.getsource(cuda_driver)
             + (Path(cuda_driver.__file__).parent / "driver.c").read_text()),
    contract("knobs.runtime has the profilers' hooks, whose calls are empty without a profiler", "weft/runtime/launching.py",
             lambda _: not (KNOBS.launch_enter_hook.calls or KNOBS.launch_exit_hook.calls)),
    contract("AsyncCompileMode(executor, ignore_errors=) compiles in threads", "weft/tune/compiling.py",
             lambda _: list(inspect.signature(triton.AsyncCompileMode).parameters) == ["executor", "ignore_errors"]),
    # the compiler, seen from a builtin
    contract("a CodeGenerator knows its function's name, first line and present node",
             "weft/language/lowering/debug_site.py", lambda _: all(
                 f"self.{name} =" in COMPILER for name in ("function_name", "begin_line", "cur_node"))),
    contract("the builder of _semantic has the launch's options, with num_warps and warp_size",
             "weft/language/lowering/stock.py", lambda _: "self.builder.options = options" in COMPILER),
    # tl
    contract("a builtin is marked TRITON_BUILTIN, takes _semantic and keeps its function as __wrapped__", "callees.py",
             lambda _: getattr(tl.load, triton_api.TRITON_BUILTIN) and "_semantic" in inspect.signature(tl.load).parameters
             and "_semantic" in inspect.signature(tl.load.__wrapped__).parameters),
    contract("tl re-exports the builtins of tl.core and tl.math", "patching.py",
             lambda _: tl.load is tl.core.load and tl.exp is tl.math.exp),
    contract("target_info asks for the target by current_target, and None is neither CUDA nor HIP", "patching.py",
             target_is_asked_in_one_place),
    contract("tl.sum, tl.max and tl.min reduce by combine functions of their own", "reductions.py",
             lambda _: "_sum_combine" in tl.standard.sum.src and "_elementwise_max" in tl.standard.max.src
             and "_elementwise_min" in tl.standard.min.src and "_sum_combine" in tl.standard.cumsum.src),
    contract("_wrap_axis makes a negative axis positive", "reductions.py", lambda _: triton_api.wrap_axis(-1, 3) == 2),
    contract("libdevice's stubs are named in triton.language.extra.libdevice, and NVIDIA's versions equally in extra.cuda",
             "callees.py", lambda _: tl.extra.libdevice.exp.__module__ == "triton.language.extra.libdevice"
             and "_semantic" in inspect.signature(tl.extra.cuda.libdevice.exp).parameters),
    contract("libdevice without a version for the arguments raises KeyError with their types", "callees.py",
             libdevice_raises_key_errors_with_the_types),
    contract("a pointer type has its element's type, and str_to_ty reads it", "launching.py values.py",
             lambda _: tl.str_to_ty("*fp32", None).element_ty == tl.float32 and tl.pointer_type(tl.int8).is_ptr()),
    contract("the result of make_block_ptr is a tensor of its own kind", "stand_ins.py",
             lambda _: "block_type" in inspect.getsource(TritonSemantic.make_block_ptr), "3.6.0", "3.7.1"),
    contract("constexpr has Python's operators, and reflected ones", "patching.py",
             lambda _: {"__add__", "__radd__", "__lt__", "__rshift__"} <= vars(tl.constexpr).keys()),
    # the two layers below tl
    contract("TritonSemantic(builder) is the upper layer; the interpreter overrides these methods", "semantic.py",
             lambda _: {"to_tensor", "binary_op_type_checking_impl", "add", "where", "cast", "full", "make_scalar",
                        "atom_red_typechecking_impl", "descriptor_load", "descriptor_store", "_has_native_tma"}
             <= vars(TritonSemantic).keys()),
    contract("integer_promote_impl gives the type of a range over two integer types", "stand_ins.py",
             lambda _: Semantic(Builder(None, lambda: "")).integer_promote_impl(tl.int32, tl.int64) == tl.int64),
    contract("the semantic layer asks a builder for operations by these names", "builder.py", operations_have_these_names),
    contract("InterpreterBuilder() has codegen_fns, the functions that a backend provides", "builder.py",
             lambda _: "min_dot_size" in triton_api.InterpreterBuilder().codegen_fns),
    contract("ir names the kinds, orders and scopes of atomics and of descriptors' reductions", "builder.py",
             lambda _: all(hasattr(triton_api.ir, name) for name in
                           ("ATOMIC_OP", "MEM_SEMANTIC", "MEM_SYNC_SCOPE", "DESCRIPTOR_REDUCE_KIND", "PADDING_OPTION"))),
)  # fmt: skip


@pytest.mark.parametrize("one", CONTRACTS, ids=lambda one: one.behaviour)
def test_contract(one, monkeypatch):
    if triton.__version__ in VERSIONS and triton.__version__ not in one.versions:
        pytest.skip(f"holds on {', '.join(one.versions)}")
    assert one.holds(monkeypatch)


def test_users_of_contracts_exist():
    files = {user if "/" in user else INTERPRETER + user for one in CONTRACTS for user in one.users}
    assert {file for file in files if not (ROOT / file).is_file()} == set()


def test_triton_api_holds_only_what_is_used():
    text = "".join(path.read_text() for path in (ROOT / "weft").rglob("*.py") if path.name != "triton_api.py")
    assert [name for name in triton_api.__all__ if not re.search(rf"\b{name}\b", text)] == []
