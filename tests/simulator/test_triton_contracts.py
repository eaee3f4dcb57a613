"""Behaviour of Triton that weft relies on, beyond what Triton documents: the kernel language itself is not listed here.

Every contract holds on Triton 3.6 to 3.9 (``make contracts`` and ``make test`` run them on 3.6.0, 3.7.0, 3.7.1, 3.8.0 and the
newest) unless it names its versions. On another version it is tested if it names none.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import BaseBackend
from triton.backends.nvidia import driver as cuda_driver
from triton.compiler import code_generator
from triton.language import semantic
from triton.runtime import cache as triton_cache
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from weft import triton_api
from weft.simulator import front_end
from weft.simulator.interpreter import builder, patching
from weft.simulator.interpreter.builder import Builder
from weft.simulator.interpreter.callees import is_builtin
from weft.simulator.interpreter.interpreter import Interpreter
from weft.simulator.interpreter.semantic import Semantic
from weft.simulator.interpreter.stand_ins import _is_block_pointer
from weft.simulator.interpreter.values import Handle, make, scalar, value_of
from weft.triton_api import CompiledKernel, InterpreterBuilder, JITFunction, TritonSemantic

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
ROOT = Path(__file__).parents[2]
INTERPRETER = "weft/simulator/interpreter/"
SEMANTIC = Semantic(Builder(None, lambda: ""))
POINTER = make(np.array([64], np.uint64), tl.pointer_type(tl.float32), False)
TWO_BY_FOUR = [tl.constexpr(2), tl.constexpr(4)]


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


def autotuners_prune_and_run(_: pytest.MonkeyPatch) -> bool:
    launched, hooked = [], []
    configs = [triton.Config({"block": size}, num_warps=2, pre_hook=hooked.append) for size in (1, 2, 4)]
    pruned = {"early_config_prune": lambda configs, named, **_: configs[1:]}
    tuned = triton.autotune(configs, key=[], prune_configs_by=pruned)(kernel)
    assert isinstance(tuned, triton_api.Autotuner) and tuned.arg_names == ["x", "count", "block", "option"]
    tuned.nargs = {}
    assert tuned.prune_configs({}) == configs[1:] and configs[1].pre_hook == hooked.append
    tuned.fn = SimpleNamespace(run=lambda *args, **options: launched.append((args, options)))
    single = triton.autotune(configs[:1], key=[])(kernel)
    single.fn = tuned.fn
    single.run(None, 7, grid=(3,), warmup=False)
    assert single.best_config is configs[0] and len(hooked) == 1 and hooked[0]["block"] == 1 and hooked[0]["count"] == 7
    ((args, options),) = launched
    return args == (None, 7) and options.items() >= {"grid": (3,), "warmup": False, "block": 1, "num_warps": 2}.items()


def parameters_are_described(_: pytest.MonkeyPatch) -> bool:
    facts = [(p.name, p.is_constexpr, p.is_const, p.annotation_type) for p in kernel.params]
    assert facts[0][:3] == ("x", False, True) and facts[1] == ("count", False, False, "i64")
    assert [p.is_constexpr for p in kernel.params] == [False, False, True, False]
    return list(kernel.signature.parameters) == [p.name for p in kernel.params] and kernel.pre_run_hooks == []


def source_is_kept(_: pytest.MonkeyPatch) -> bool:
    assert kernel.src.startswith("def kernel(") and "".join(kernel.raw_src).startswith("@triton.jit")
    return kernel.starting_line_number == DECORATED_AT and not kernel.is_gluon() and kernel.fn.__name__ == "kernel"


def hash_of_triton_is_kept(monkeypatch: pytest.MonkeyPatch) -> bool:
    hashed = []
    assert callable(triton_cache.triton_key.cache_info)
    monkeypatch.setattr(triton_cache, "triton_key", lambda: hashed.append(0) or "hash of Triton")
    triton_api.hash_triton()
    part = SimpleNamespace(hash=lambda: "part")
    return triton_cache.get_cache_key(part, part, part, {}).startswith("hash of Triton-part") and len(hashed) == 2


def interpreted_when_asked(monkeypatch: pytest.MonkeyPatch) -> bool:
    assert not KNOBS.interpret and isinstance(tl.standard.sum, JITFunction)
    monkeypatch.setattr(KNOBS, "interpret", True)
    return isinstance(triton.jit(kernel.fn), triton_api.InterpretedFunction)


def jit_functions_do_not_bind(_: pytest.MonkeyPatch) -> bool:
    with pytest.raises(RuntimeError):
        kernel(None, 1, 2)
    return isinstance(tl.tensor.sum, JITFunction) and tl.tensor.sum is tl.sum and not hasattr(JITFunction, "__get__")


def patched_attributes_exist(_: pytest.MonkeyPatch) -> bool:
    with Interpreter(SimpleNamespace(launch=None)) as interpreter:
        patched = [(owner, name) for owner, name, value in interpreter._patches._undo if value is patching._ABSENT]
    of_tensor = ("__bool__", "__index__", "__repr__", "numel", "shape")  # the last two are set by Triton's __init__
    of_values = ((tl.constexpr, "__format__"), *((tl.tensor, name) for name in of_tensor))
    return set(patched) == {(JITFunction, "__get__"), *of_values}


def target_is_asked_in_one_place(monkeypatch: pytest.MonkeyPatch) -> bool:
    asked = triton_api.target_info
    monkeypatch.setattr(asked, "current_target", lambda: None)
    return not (asked.is_cuda() or asked.is_hip() or asked.cuda_capability_geq(8, 0))


def front_end_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Kernel to TTIR by the names that front_end.py uses, and the line of one that is refused."""

    @triton.jit
    def refused(x, block: tl.constexpr):
        tl.store(x, {block: 1.0})

    backend = triton_api.make_backend(triton_api.GPUTarget("cuda", 90, 32))
    binder = triton_api.create_function_from_signature(refused.signature, refused.params, backend)
    bound, specialisation, options = binder(torch.zeros(4), block=2, num_warps=8)
    kinds = [kind for kind, _ in specialisation]
    assert (list(bound), kinds, options) == (["x", "block"], ["*fp32", "constexpr"], {"num_warps": 8})
    assert triton_api.find_paths_if(kinds, lambda _, kind: kind == "constexpr") == [(1,)]
    end = front_end.FrontEnd()
    end.note(refused, (torch.zeros(4), 2), {"num_warps": 8, "waves_per_eu": 2})
    end.note(kernel, (None, 1), {"block": 2})
    (refusal,) = end.refusals()
    assert refusal.message == "unsupported AST node type: Dict" and "{block: 1.0}" in refusal.text
    source = triton_api.ASTSource(
        kernel, {"x": "constexpr", "count": "i64", "block": "constexpr", "option": "constexpr"}
    )
    return bool(source.hash()) and issubclass(triton_api.CompilationError, Exception)


def builtins_are_for_kernels(_: pytest.MonkeyPatch) -> bool:
    made = triton_api.builtin(lambda x, _semantic=None: x)
    with pytest.raises(ValueError):
        made(3)
    return is_builtin(made) and made(3, _semantic=SEMANTIC) == 3


def unknown_dtypes_raise_key_errors(_: pytest.MonkeyPatch) -> bool:
    with pytest.raises(KeyError):
        triton_api.canonicalize_dtype(torch.complex64)
    return triton_api.canonicalize_dtype(torch.bfloat16) == "bf16"


def libdevice_raises_key_errors_with_the_types(_: pytest.MonkeyPatch) -> bool:
    with pytest.raises(KeyError) as error:
        tl.extra.cuda.libdevice.exp(SEMANTIC.full([1], 1, tl.int32), _semantic=SEMANTIC)
    return [ty.name for ty in error.value.args[0]] == ["int32"]


def arguments_are_specialised(_: pytest.MonkeyPatch) -> bool:
    def kind(argument: object) -> tuple:
        return jit.native_specialize_impl(BaseBackend, argument, False, True, True)

    aligned = torch.zeros(32)
    assert len({kind(x) for x in (1, 2, 16, 2**31, 2**31 + 1)}) == 5 and kind(2) == kind(7) and kind(16) == kind(48)
    return kind(aligned) == kind(aligned[4:]) != kind(aligned[1:]) == kind(aligned[3:])


def descriptor() -> tl.tensor_descriptor:
    size, stride = scalar(8, tl.int32), scalar(8, tl.int64)
    return SEMANTIC.make_tensor_descriptor(POINTER, [size, size], [stride, tl.constexpr(1)], TWO_BY_FOUR, "zero")


def descriptors_are_values_with_builtins(_: pytest.MonkeyPatch) -> bool:
    kind, value = triton_api.tensor_descriptor_base, descriptor()
    assert is_builtin(vars(kind)["load"]) and is_builtin(vars(kind)["store"])
    assert issubclass(tl.tensor, triton_api.base_value) and issubclass(kind, triton_api.base_value)
    return isinstance(value, kind) and value.dtype == tl.float32 and list(value.block_shape) == TWO_BY_FOUR


def block_pointers_are_told_from_pointers(patch: pytest.MonkeyPatch) -> bool:
    if VERSION >= (3, 8):  # asks numbers for it, as it may while a kernel runs
        patch.setattr(tl.tensor, "shape", property(patching._shape), raising=False)
    one = tl.constexpr(1)
    shape, order = TWO_BY_FOUR, [one, tl.constexpr(0)]
    made = tl.make_block_ptr(POINTER, shape, [tl.constexpr(4), one], [one, one], shape, order, _semantic=SEMANTIC)
    return _is_block_pointer(made) and not _is_block_pointer(POINTER)


def methods(kind: type) -> dict[str, Callable]:
    return {name: x for name, x in vars(kind).items() if inspect.isfunction(x) and not name.startswith("__")}


def takes_the_calls_of(ours: type, theirs: type) -> bool:
    """Each override in ``ours`` takes the arguments of the original: all by position, those with defaults also by name."""
    for name in methods(ours).keys() & methods(theirs).keys():
        signature, original = (inspect.signature(vars(kind)[name]) for kind in (ours, theirs))
        needed = [p.name for p in original.parameters.values() if p.default is p.empty]
        optional = [p.name for p in original.parameters.values() if p.default is not p.empty]
        signature.bind(*needed, *optional)
        signature.bind(*needed, **dict.fromkeys(optional))
    return True


def semantic_methods_are_overridden(_: pytest.MonkeyPatch) -> bool:
    # Public methods are overrides and private ones are not, but for these.
    others = {name for name in methods(Semantic) if name.startswith("_") is (name in methods(TritonSemantic))}
    assert others == {"dot_fp32", "fetch", "operands", "put", "transpose", "_has_native_tma"}
    return takes_the_calls_of(Semantic, TritonSemantic)


def called_methods() -> set[str]:
    """Methods of TritonSemantic that the interpreter calls and does not override."""
    sources = "".join(file.read_text() for file in (ROOT / INTERPRETER).glob("*.py"))
    called = {*patching._ARITHMETIC.values(), *patching._COMPARISONS.values()}
    called.update(
        re.findall(r"\bsemantic\.(\w+)", sources), re.findall(r"\bself\.(\w+)\(", inspect.getsource(Semantic))
    )
    return called - vars(Semantic).keys() - {"builder"}


def called_methods_do_as_they_are_named(_: pytest.MonkeyPatch) -> bool:
    s, three, true, false = SEMANTIC, scalar(3, tl.int32), scalar(True, tl.int1), scalar(False, tl.int1)
    results = {
        "arange": value_of(s.arange(0, 4)).tolist() == [0, 1, 2, 3],
        "bitcast": value_of(s.bitcast(scalar(1, tl.float32), tl.int32)) == 0x3F800000,
        "computation_type_impl": s.computation_type_impl(tl.int32, False, tl.float16, False, False) == tl.float16,
        "integer_promote_impl": s.integer_promote_impl(tl.int32, tl.int64) == tl.int64,
        "logical_and": value_of(s.logical_and(true, false)) is False,
        "logical_or": value_of(s.logical_or(true, false)) is True,
        "make_tensor_descriptor": descriptor().handle.block_shape == (2, 4),
        "minus": value_of(s.minus(three)) == -3,
        "not_": value_of(s.not_(true)) is False,
        "truediv": value_of(s.truediv(three, scalar(2, tl.int32))) == 1.5,
    }
    assert called_methods() == results.keys()
    return all(results.values())


def asked_of_builders() -> str:
    return "".join(map(inspect.getsource, (semantic, tl.core, tl.math)))


def operations_are_asked_for(_: pytest.MonkeyPatch) -> bool:
    since = {"create_fneg": (3, 8), "create_approx_divf": (3, 9)}
    since |= dict.fromkeys(("create_atomic_load", "create_atomic_store", "create_atomic_poll"), (3, 9))
    own = {name for name in methods(Builder) if name.startswith(("create_", "get_"))}
    unasked = {name for name in own if f"builder.{name}(" not in asked_of_builders()}
    # Asked for by name: getattr(builder, "create_extern_elementwise").
    assert unasked - {"create_extern_elementwise"} == {name for name, version in since.items() if version > VERSION}
    return takes_the_calls_of(Builder, InterpreterBuilder)


def options_are_those_asked_for(_: pytest.MonkeyPatch) -> bool:
    asked = set(re.findall(r"builder\.options\.(\w+)", asked_of_builders()))
    return {"debug", "sanitize_overflow", "arch"} <= asked and all(hasattr(SEMANTIC.builder.options, x) for x in asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One behaviour, on ``versions`` of Triton or, without them, on all.

    users: files that rely on it, of the interpreter if they have no folder
    """

    behaviour: str
    users: tuple[str, ...]
    holds: Callable[[pytest.MonkeyPatch], object]
    versions: tuple[tuple[int, int], ...]


def contract(
    behaviour: str, users: str, holds: Callable[[pytest.MonkeyPatch], object], *versions: tuple[int, int]
) -> Contract:
    return Contract(behaviour=behaviour, users=tuple(users.split()), holds=holds, versions=versions)


COMPILER = inspect.getsource(code_generator.CodeGenerator)
KNOBS = triton_api.knobs.runtime

CONTRACTS = (
    # kernels as objects
    contract("kernel[grid](...) and warmup call JITFunction.run(*args, grid=, warmup=, **options)",
             "patching.py weft/bench/harness/compiling.py weft/runtime/launching.py", launch_is_one_method),
    contract("a JITFunction has the parameters' names, kinds and annotations, its signature and its hooks", "launching.py",
             parameters_are_described),
    contract("a JITFunction has its source without decorators, with them, and the line of the first", "callees.py",
             source_is_kept),
    contract("triton.jit makes an InterpretedFunction, and not a JITFunction, while TRITON_INTERPRET is set",
             "patching.py weft/runtime/triton_interpret.py", interpreted_when_asked),
    contract("a function of standard is a JITFunction, unless Triton was imported while TRITON_INTERPRET was set",
             "weft/runtime/triton_interpret.py stand_ins.py", lambda _: isinstance(triton_api.standard.zeros, JITFunction)
             and tl.zeros is triton_api.standard.zeros),
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
             "weft/triton_api.py", lambda _: re.search(
                 r"kernel\.run\(grid_0, grid_1, grid_2, stream, kernel\.function, kernel\.packed_metadata, launch_metadata,\s+"
                 r"knobs\.runtime\.launch_enter_hook, knobs\.runtime\.launch_exit_hook, \*bound_args\.values\(\)",
                 inspect.getsource(JITFunction.run))),
    contract("a pointer is specialised on its dtype and 16-byte alignment, an integer on 1, multiples of 16 and its width",
             "weft/runtime/launching.py weft/runtime/team/view.py", arguments_are_specialised),
    contract("CompiledKernel loads itself in _init_handles and is launched by compiled[grid](..., stream=)",
             "weft/runtime/launching.py weft/bench/harness/compiling.py",
             lambda _: callable(CompiledKernel._init_handles)
             and "stream=None" in inspect.getsource(CompiledKernel.__getitem__)),
    contract("launcher_of: CudaLauncher calls launch(x, y, z, stream, function, cooperative, pdl, scratch (2), *arguments)",
             "weft/triton_api.py", lambda _: re.search(
                 r"self\.launch\(gridX, gridY, gridZ, stream, function, self\.launch_cooperative_grid, self\.launch_pdl,\s+"
                 r"global_scratch, profile_scratch, \*args\)", inspect.getsource(cuda_driver.CudaLauncher)),
             (3, 6)),
    contract("a pointer argument may be an integer, its address", "weft/runtime/launching.py",
             lambda _: "PyLong_Check(obj)" in inspect.getsource(cuda_driver)
             + (Path(cuda_driver.__file__).parent / "driver.c").read_text()),
    contract("knobs.runtime has the profilers' hooks, whose calls are empty without a profiler", "weft/runtime/launching.py",
             lambda _: not (KNOBS.launch_enter_hook.calls or KNOBS.launch_exit_hook.calls)),
    contract("hash_triton: a kernel's key in the cache takes the hash of Triton from triton_key, which keeps it",
             "weft/triton_api.py", hash_of_triton_is_kept, (3, 6)),
    contract("AsyncCompileMode(executor, ignore_errors=) compiles in threads", "weft/bench/harness/compiling.py",
             lambda _: list(inspect.signature(triton.AsyncCompileMode).parameters) == ["executor", "ignore_errors"]),
    # the compiler, seen from a builtin
    contract("a CodeGenerator knows its function's name, first line and present node",
             "weft/language/lowering/debug_site.py", lambda _: all(
                 f"self.{name} =" in COMPILER for name in ("function_name", "begin_line", "cur_node"))),
    contract("the front end (make_backend of a GPUTarget, create_function_from_signature, find_paths_if, ASTSource) needs no "
             "GPU but a driver that knows the target, and raises a CompilationError", "weft/simulator/front_end.py",
             front_end_needs_no_gpu),
    contract("the builder of _semantic has the launch's options, with num_warps and warp_size",
             "weft/language/lowering/stock.py", lambda _: "self.builder.options = options" in COMPILER),
    # tl
    contract("a builtin is marked TRITON_BUILTIN, takes _semantic and keeps its function as __wrapped__", "callees.py",
             lambda _: getattr(tl.load, triton_api.TRITON_BUILTIN) and "_semantic" in inspect.signature(tl.load).parameters
             and "_semantic" in inspect.signature(tl.load.__wrapped__).parameters),
    contract("tl re-exports the builtins of core and tl.math", "patching.py stand_ins.py",
             lambda _: tl.load is triton_api.core.load and tl.exp is tl.math.exp),
    contract("builtin makes such a function, which refuses calls without _semantic, and so outside of kernels",
             "weft/language/arguments.py", builtins_are_for_kernels),
    contract("target_info asks for the target by current_target, and None is neither CUDA nor HIP", "patching.py",
             target_is_asked_in_one_place),
    contract("tl.sum and tl.cumsum reduce by combine_sum, tl.max by combine_max and tl.min by combine_min", "reductions.py",
             lambda _: all(
                 combine.__name__ in function.src for function, combine in (
                     (tl.sum, triton_api.combine_sum), (tl.cumsum, triton_api.combine_sum),
                     (tl.max, triton_api.combine_max), (tl.min, triton_api.combine_min)))),
    contract("gsan makes a memory pool, and its symmetric memory takes a group of ranks", "weft/runtime/platforms/sanitized.py",
             lambda _: callable(triton_api.gsan().create_mem_pool) and callable(triton_api.gsan().symmetric_memory.configure),
             (3, 9)),
    contract("wrap_axis makes a negative axis positive", "reductions.py", lambda _: triton_api.wrap_axis(-1, 3) == 2),
    contract("libdevice's stubs are named in triton.language.extra.libdevice, and NVIDIA's versions equally in extra.cuda",
             "callees.py", lambda _: tl.extra.libdevice.exp.__module__ == "triton.language.extra.libdevice"
             and "_semantic" in inspect.signature(tl.extra.cuda.libdevice.exp).parameters),
    contract("libdevice without a version for the arguments raises KeyError with their types", "callees.py",
             libdevice_raises_key_errors_with_the_types),
    contract("a pointer type has its element's type, and str_to_ty reads it", "launching.py values.py",
             lambda _: tl.str_to_ty("*fp32", None).element_ty == tl.float32 and tl.pointer_type(tl.int8).is_ptr()),
    contract("the result of make_block_ptr is no pointer's tensor: one of pointers to blocks, or in 3.8 no tensor",
             "stand_ins.py", block_pointers_are_told_from_pointers, (3, 6), (3, 7), (3, 8)),
    contract("constexpr has Python's operators, and reflected ones", "patching.py",
             lambda _: {"__add__", "__radd__", "__lt__", "__rshift__"} <= vars(tl.constexpr).keys()),
    contract("tl.tensor is a base_value, and so is a tensor_descriptor_base, with builtins, a dtype and a block_shape",
             "patching.py semantic.py", descriptors_are_values_with_builtins),
    contract("a method of tl.tensor is a builtin or a JITFunction, which neither binds itself nor can be called", "patching.py",
             jit_functions_do_not_bind),
    contract("an Autotuner runs prune_configs(kwargs), then a config's pre_hook with named arguments, then fn.run",
             "compiled.py patching.py", autotuners_prune_and_run),
    contract("testing has do_bench and do_bench_cudagraph, which take quantiles and a return_mode",
             "weft/check/torch_programs/scope.py", lambda _: all(
                 {"quantiles", "return_mode"} <= inspect.signature(bench).parameters.keys()
                 for bench in (triton_api.testing.do_bench, triton_api.testing.do_bench_cudagraph))),
    contract("the attributes that the interpreter patches exist, but for seven", "patching.py", patched_attributes_exist),
    # the two layers below tl
    contract("TritonSemantic(builder) is the upper layer; the interpreter overrides methods of it, with their parameters",
             "semantic.py", semantic_methods_are_overridden),
    contract("other methods of TritonSemantic that the interpreter calls do as they are named",
             "semantic.py stand_ins.py statements.py launching.py patching.py", called_methods_do_as_they_are_named),
    contract("IncompatibleTypeErrorImpl(a, b) names both types", "semantic.py",
             lambda _: re.search("int32 .*float32", str(triton_api.IncompatibleTypeErrorImpl(tl.int32, tl.float32)))),
    contract("the semantic layer asks a builder for operations by the names and with the parameters of InterpreterBuilder",
             "builder.py", operations_are_asked_for),
    contract("InterpreterBuilder() has codegen_fns, the functions that a backend provides", "builder.py",
             lambda _: "min_dot_size" in InterpreterBuilder().codegen_fns),
    contract("InterpreterOptions(debug=, sanitize_overflow=, arch=) has all options that the semantic layer asks for",
             "builder.py", options_are_those_asked_for),
    contract("TensorHandle(data, dtype, attr) is the value of operations and knows what its pointers point to", "values.py",
             lambda _: [field.name for field in dataclasses.fields(triton_api.TensorHandle)] == ["data", "dtype", "attr"]
             and Handle(POINTER.handle.data, POINTER.dtype).get_element_ty() == tl.float32),
    contract("ir names the kinds, orders and scopes of atomics and of descriptors' reductions and paddings", "builder.py",
             lambda _: triton_api.ir.PADDING_OPTION.PAD_NAN and all(
                 hasattr(triton_api.ir, kind) for kind in re.findall(r"\bir\.(\w+)", inspect.getsource(builder)))),
)  # fmt: skip


@pytest.mark.parametrize("one", CONTRACTS, ids=lambda one: one.behaviour)
@pytest.mark.filterwarnings("ignore:.*make_block_ptr")
def test_contract(one, monkeypatch):
    if one.versions and VERSION not in one.versions:
        pytest.skip(f"holds on {', '.join('{}.{}'.format(*version) for version in one.versions)}")
    assert one.holds(monkeypatch)


def test_users_of_contracts_exist():
    files = {user if "/" in user else INTERPRETER + user for one in CONTRACTS for user in one.users}
    assert {file for file in files if not (ROOT / file).is_file()} == set()


def test_triton_api_holds_only_what_is_used():
    text = "".join(path.read_text() for path in (ROOT / "weft").rglob("*.py") if path.name != "triton_api.py")
    assert [name for name in triton_api.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_every_exported_name_is_in_a_contract():
    text = " ".join(one.behaviour for one in CONTRACTS)
    assert [name for name in triton_api.__all__ if not re.search(rf"\b{name}\b", text)] == []
