"""Generator of docs/simulated-triton.md: ``python -m tests.simulator.simulated_triton`` writes it.

Every public function of ``triton.language`` is called in a kernel of its own. The page holds what the simulator answers.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import torch
import triton
import triton.language as tl

import weft
from weft.errors import NotInterpretable
from weft.simulator import numerics
from weft.simulator.interpreter import libdevice
from weft.simulator.interpreter.assembly import ADVICE

PAGE = Path(__file__).parents[2] / "docs" / "simulated-triton.md"
# Names of tl that are types, values and modules, not functions. ``range`` and ``condition`` stand in a loop's head.
TYPES = {
    "PropagateNan", "block_type", "const", "constexpr", "constexpr_type", "dtype", "pointer_type", "slice", "tensor",
    "tensor_descriptor", "tuple",
}  # fmt: skip
# In a kernel: i and f are blocks of 16 int32 and fp32, m is 16 x 16, p and q point to fp32 and int32, d describes p.
_PREAMBLE = """
@triton.jit
def {kernel}(p, q):
    i = tl.arange(0, 16)
    f = i.to(tl.float32) + 1
    m = f[:, None] + f[None, :]
    d = tl.make_tensor_descriptor(p, [16, 16], [16, 1], [16, 16])
    {call}
"""
_HEAD = """import triton
import triton.language as tl


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def doubled(a):
    return a + a

"""
_OF_F = (
    "abs bitonic_merge ceil cos cumprod cumsum erf exp exp2 floor log log2 max min ravel rsqrt sigmoid sin softmax sort sqrt "
    "sqrt_rn sum zeros_like"
)
_OF_TWO = "add div_rn fdiv maximum minimum mul sub interleave join broadcast"
_ATOMIC = "add and max min or xchg xor"
_RANDOM = "rand rand4x randint randint4x randn randn4x"
CALLS: dict[str, str] = {
    **{name: f"tl.{name}(f)" for name in _OF_F.split()},
    **{name: f"tl.{name}(f, 0)" for name in ("argmax", "argmin", "flip")},
    **{name: f"tl.{name}(f, f)" for name in _OF_TWO.split()},
    **{f"atomic_{name}": f"tl.atomic_{name}(q + i, i)" for name in _ATOMIC.split()},
    **{name: f"tl.{name}(0, i)" for name in _RANDOM.split()},
    **{name: f"tl.{name}(i, 16)" for name in ("max_constancy", "max_contiguous")},
    **{name: f"tl.{name}(0)" for name in ("num_programs", "program_id")},
    **{name: f"for _ in tl.{name}(4): pass" for name in ("range", "static_range")},
    "advance": "tl.load(tl.advance(tl.make_block_ptr(p, (16, 16), (16, 1), (0, 0), (8, 8), (1, 0)), (8, 0)))",
    "arange": "tl.arange(0, 16)",
    "associative_scan": "tl.associative_scan(f, 0, plus)",
    "assume": "tl.assume(i[None, :].shape[1] == 16)",
    "atomic_cas": "tl.atomic_cas(q, 0, 1)",
    "atomic_load": "tl.atomic_load(q)",
    "atomic_poll": "tl.atomic_poll(q, tl.load(q))",
    "atomic_store": "tl.atomic_store(q, 1)",
    "broadcast_to": "tl.broadcast_to(f[:, None], (16, 16))",
    "cast": "tl.cast(f, tl.bfloat16)",
    "cat": "tl.cat(f, f, can_reorder=True)",
    "cdiv": "tl.cdiv(7, 2)",
    "clamp": "tl.clamp(f, 0.0, 1.0)",
    "condition": "while tl.condition(tl.program_id(0) > 0): pass",
    "debug_barrier": "tl.debug_barrier()",
    "device_assert": "tl.device_assert(f > 0)",
    "device_print": 'tl.device_print("f", f)',
    "dot": "tl.dot(m, m)",
    "dot_scaled": 'tl.dot_scaled(m.to(tl.float8e4nv), None, "e4m3", m.to(tl.float8e4nv), None, "e4m3")',
    "expand_dims": "tl.expand_dims(f, 0)",
    "expect_zero": "tl.expect_zero(i * 0)",
    "fma": "tl.fma(f, f, f)",
    "full": "tl.full((16,), 1, tl.int32)",
    "gather": "tl.gather(f, i, 0)",
    "histogram": "tl.histogram(i, 16)",
    "inline_asm_elementwise": 'tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], tl.int32, True, 1)',
    "load": "tl.load(p + i)",
    "load_tensor_descriptor": "tl.load_tensor_descriptor(d, [0, 0])",
    "make_block_ptr": "tl.load(tl.make_block_ptr(p, (16, 16), (16, 1), (0, 0), (8, 8), (1, 0)))",
    "make_tensor_descriptor": "tl.make_tensor_descriptor(p, [16, 16], [16, 1], [8, 8])",
    "map_elementwise": "tl.map_elementwise(doubled, f)",
    "multiple_of": "tl.multiple_of(i * 16, 16)",
    "pair_uniform_to_normal": "tl.pair_uniform_to_normal(f / 32, f / 32)",
    "permute": "tl.permute(m, (1, 0))",
    "philox": "tl.philox(0, i, i, i, i)",
    "philox_impl": "tl.philox_impl(i.to(tl.uint32), i.to(tl.uint32), i.to(tl.uint32), i.to(tl.uint32), 1, 2)",
    "reduce": "tl.reduce(f, 0, plus)",
    "reduce_or": "tl.reduce_or(i, 0)",
    "reshape": "tl.reshape(f, (4, 4))",
    "split": "tl.split(tl.join(f, f))",
    "squeeze": "tl.squeeze(f[:, None], 1)",
    "static_assert": "tl.static_assert(True)",
    "static_print": 'tl.static_print("f")',
    "store": "tl.store(p + i, f)",
    "store_tensor_descriptor": "tl.store_tensor_descriptor(d, [0, 0], m)",
    "swizzle2d": "tl.swizzle2d(i, i, 16, 16, 4)",
    "to_tensor": "tl.to_tensor(1)",
    "topk": "tl.topk(f, 4)",
    "trans": "tl.trans(m)",
    "uint_to_uniform_float": "tl.uint_to_uniform_float(i.to(tl.uint32))",
    "umulhi": "tl.umulhi(i.to(tl.uint32), i.to(tl.uint32))",
    "unsqueeze": "tl.unsqueeze(f, 1)",
    "view": "tl.view(f, (4, 4))",
    "where": "tl.where(f > 1, f, 0.0)",
    "xor_sum": "tl.xor_sum(i)",
    "zeros": "tl.zeros((16,), tl.float32)",
}


def functions() -> list[str]:
    """Public functions of this Triton's ``tl``."""
    return sorted(name for name in tl.__all__ if callable(getattr(tl, name)) and name not in TYPES)


def answers(calls: Mapping[str, str]) -> dict[str, str]:
    """Refusal of each call by name, "" where it runs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calls.py"
        file.write_text(
            _HEAD + "".join(_PREAMBLE.format(kernel=f"call_{name}", call=call) for name, call in calls.items())
        )
        kernels = _imported(file)
        return {name: _answer(getattr(kernels, f"call_{name}")) for name in calls}


def _imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("weft_simulated_triton", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _answer(kernel: triton.JITFunction) -> str:
    def main(team: weft.Team) -> None:
        kernel[(1,)](torch.ones(16, 16), torch.ones(16, dtype=torch.int32))

    try:
        weft.simulate(main, 1)
    except NotInterpretable as error:
        return re.sub(r" in call_\w+ \(.*?\)", "", str(error))
    return ""


def libdevice_answers() -> dict[str, bool]:
    """True for each function of libdevice all of whose symbols the simulator has."""
    found = {}
    for name, function in vars(tl.extra.cuda.libdevice).items():
        symbols = set(re.findall(r'"(__nv_\w+)"', inspect.getsource(function))) if callable(function) else set()
        if symbols:
            found[name] = all(libdevice.function_of(symbol) is not None for symbol in symbols)
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    found, of_libdevice = answers({name: CALLS[name] for name in functions()}), libdevice_answers()
    run = [name for name, refusal in found.items() if not refusal]
    refused = [_row(f"`tl.{name}`", refusal) for name, refusal in found.items() if refusal]
    assembly = [_row(f"`{pattern}`", advice) for pattern, advice in ADVICE]
    there, missing = ([name for name, has in of_libdevice.items() if has is wanted] for wanted in (True, False))
    types = [name for name in sorted(tl.__all__) if type(getattr(tl, name)) is tl.dtype and name != "void"]
    unknown = [name for name in types if getattr(tl, name).name not in numerics.DTYPES]
    return f"""# What the simulator runs of Triton

For Triton {triton.__version__}. Each public function of `triton.language` is called once, in a separate kernel.
`python -m tests.simulator.simulated_triton` writes this page, and a test compares it.

## Functions that run ({len(run)})

{_listed(run)}.

Types, operators and methods of tensors run as well. Hints (`max_contiguous`, `max_constancy`) and options for the compiler
(`num_stages`, cache modifiers, eviction policies) have no effect, except that a load with `.cv` is a volatile one.
`multiple_of` and `assume` are checked.

## Functions that are refused ({len(refused)})

`NotInterpretable` is raised when a program comes to the call, so a branch for a GPU's target may hold one.

| function | message |
|---|---|
{chr(10).join(refused)}

## Inline PTX

`tl.inline_asm_elementwise` runs if it knows the instructions, and is refused with the instruction otherwise. With `pack`
above 1 it takes arithmetic and registers.

| | |
|---|---|
| global memory | `ld`, `st`: `weak`, `volatile`, `relaxed`, `acquire`, `release`, `mmio` with every scope, and vectors |
| atomics | `atom`: `add`, `exch`, `cas`, `and`, `or`, `xor`, `min`, `max`; `red` without `exch` and `cas`; `.noftz`; \
`add`, `min`, `max` of packed types |
| hints | `.nc`, `.ca`, `.cg`, `.cs`, `.lu`, `.wb`, `.wt`, `.L1::...`, `.L2::...` change nothing; `createpolicy` gives 0; \
`ld.cv` is volatile |
| multicast | `multimem.st`, `multimem.red`, `multimem.ld_reduce`, in the order of ranks; packed types; `.acc::f32` |
| order | `fence`, `membar`, `fence.proxy.async`, `bar.sync` and `barrier` of all threads, `griddepcontrol`; a fence \
without thread 0 counts for no thread; proxy fences of shared memory, aliases and tensor maps do nothing; \
`fence.acquire` and `fence.release` count as fences of both directions |
| descriptor stores | `cp.async.bulk.wait_group 0` by thread 0, which makes them, completes them, with `.read` not; other \
threads know it after a CTA barrier; \
`cp.async.bulk.commit_group` |
| arithmetic | `add`, `sub`, `mul`, `mad`, `fma`, `min`, `max`, `neg`, `abs`, `and`, `or`, `xor`, `not`, `shl`, `shr`, \
`lop3`, `prmt` without a mode |
| threads of a warp | `shfl.sync`, by threads that its mask names; `elect.sync` elects the lowest lane of its mask |
| floats | `div`, `rcp`, `sqrt`, `rsqrt`, `ex2`, `lg2`, `sin`, `cos`, `tanh`, in fp64 and rounded once |
| modifiers | `.rn`, `.ftz` and `.approx` change nothing, subnormals are kept; `.sat`, `.relu`, `.satfinite`, `.NaN` \
of floats; other roundings only in `cvt`: `.rz`, `.rni`, `.rzi`, `.rmi`, `.rpi` |
| packed types | arithmetic of `f16x2`, `bf16x2`, `f32x2`, `s16x2`, `u16x2`; `cvt` also of `e4m3x2` and `e5m2x2` |
| registers | `mov`, also of parts (`mov.b64 {{a, b}}, c`) and vectors (`mov.v4.b32`); `cvt`, `cvta`, `setp`, `selp` |
| control | `bra` with labels and predicates, `ret`, `exit`; `nanosleep` and `prefetch` do nothing |
| special registers | `%tid`, `%ntid`, `%laneid`, `%warpid`, `%ctaid`, `%nctaid`, `%smid`; clocks stand still at 0 |

External functions `llvm.nvvm.read.ptx.sreg.*` read these registers too. A scalar computed from `%tid` has a value for each
thread. It may be an address, a condition of an `if` without `else`, and an argument of assembly; the branch runs for the
threads that take it. Elsewhere it is refused. Thread t of T holds the elements t, t + T, ... of a block; in a block of fewer
elements they are held several times, and the first holder stores them.

For an instruction that is not known, the message names a replacement:

| instruction (a regular expression; the first that matches counts) | replacement |
|---|---|
{chr(10).join(assembly)}
| any other | write it in plain Triton |

Also refused: `tl.map_elementwise` with `pack` above 1, Gluon functions, elements of type {_listed(unknown)}.

## libdevice

Functions that run ({len(there)}), functions of fp32 in fp64 and rounded once, so that their last bits may differ from a GPU's:
{_listed(there)}.

Functions that are refused by name ({len(missing)}): {_listed(missing)}.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
