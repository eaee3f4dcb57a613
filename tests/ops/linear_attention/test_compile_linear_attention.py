"""Kernels of linear attention compile for every target, fit it, and take no dot of a dot's transposed result."""

import re

import pytest
import torch

from tests import compiling
from tests.compiling import SHARED, TARGETS, broken_sums, compiled, stack_bytes
from tests.ops.test_compile_layer_kernels import FP32, INTS, caps_of, check_compiles, check_machine_code
from weft.kernels.fp8 import RowFormat, rows_argument
from weft.ops.linear_attention import causal_conv1d as conv
from weft.ops.linear_attention import gated_delta_net_step as step
from weft.ops.linear_attention import gated_delta_rule as delta
from weft.ops.linear_attention.delta_rule import DeltaSizes, Gates
from weft.ops.linear_attention.rms_norm_gated import rms_norm_gated_kernel
from weft.runtime.arithmetic import next_power_of_2
from weft.runtime.capabilities import launch_options

KERNELS = ("prepare", "scan", "outputs", "step", "conv", "norm")
STRIDE, CHANNELS = 12352, 1536


def parts_of(sizes, dtype):
    """Parts of ten chunks, to be described."""
    rows = 10 * sizes.value_heads
    shapes = (640, sizes.K), (rows * 64, sizes.K), (rows * sizes.V, 64), (rows * sizes.V, 64), (rows * sizes.V, sizes.K)
    x = torch.zeros(16, dtype=dtype)
    return delta.Prepared(x, FP32, *(torch.zeros(shape, dtype=dtype) for shape in shapes))


def built(name, arch, dtype=torch.bfloat16, D=128, queries=1, V=None, heads=(2, 8), fp8=None):
    x, caps = torch.zeros(16, dtype=dtype), caps_of(arch)
    sizes, gates, parts = DeltaSizes(*heads, D, V or D), Gates(x, x, FP32, FP32), delta.Prepared(x, FP32, x, x, x, x, x)
    options = {"arch": arch, **launch_options(caps)}
    shared = {"SIZES": sizes, "ROWS": 64, "PRECISION": delta.precision_of(caps), **options}
    given, strides = (x, STRIDE), (STRIDE, STRIDE)
    match name:
        case "prepare":
            arguments = *given, gates, strides, INTS, INTS, parts, 0.1, 640
            return compiled(delta.prepare_kernel, *arguments, **shared, **delta.prepare_options(sizes, dtype, caps))
        case "scan":
            shared |= {"COLUMNS": delta.columns_of(sizes, dtype), **delta.scan_options(sizes, dtype, caps)}
            described = delta.scanned(parts_of(sizes, dtype), sizes, delta.columns_of(sizes, dtype))
            return compiled(delta.scan_kernel, *described, parts, INTS, INTS, FP32, 640, **shared)
        case "outputs":
            shared |= delta.outputs_options(sizes, dtype)
            return compiled(delta.outputs_kernel, *given, INTS, INTS, parts, x, **shared)
        case "step":
            most = 2 * queries - 1
            constants = {"SIZES": sizes, "TAPS": 4, "RING": most + 3, "QUERIES": queries}
            constants |= {"SOME": next_power_of_2(queries), "MOST": next_power_of_2(most)}
            places = step.DeltaSlots(x, x, FP32), step.DeltaTokens(INTS, INTS, INTS if queries > 1 else None)
            arguments = *given, *given, gates, strides, x, x, *places, x, x, 0.1, 1e-6, fp8
            options |= step.step_options(sizes, caps)
            return compiled(step.gated_delta_net_step_kernel, *arguments, **constants, **options)
        case "norm":
            constants = {"HEADS": 8, "D": D, "ROWS": 2048 // D, "BLOCK": D}
            return compiled(rms_norm_gated_kernel, x, x, STRIDE, x, x, 640, 1e-6, **constants, **options)
    constants = {"CHANNELS": CHANNELS, "TAPS": 4, "RING": 3, "BLOCK": conv.CHANNELS, "ROWS": 64}
    return compiled(conv.causal_conv1d_kernel, *given, x, x, INTS, INTS, INTS, x, **constants, **options)


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles_and_fits(arch, name):
    kernel = built(name, arch)
    assert kernel.metadata.shared <= SHARED[arch]
    check_compiles(kernel, arch)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["prepare", "scan", "outputs", "step"])
@pytest.mark.parametrize(("dtype", "D"), [(torch.float32, 128), (torch.float16, 16)])
def test_other_heads_compile_and_fit(dtype, D, name):
    assert built(name, "sm_90", dtype, D).metadata.shared <= SHARED["sm_90"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", KERNELS)
def test_no_thread_has_a_stack(name, arch, tmp_path):
    # A step with the heads that were timed: with (2, 8) ptxas spills 80 bytes.
    kernel = built(name, arch, heads=(8, 24) if name == "step" else (2, 8))
    # sm_80 holds a part of the state and the operands of dots in registers: ten of them spill. A step holds a state.
    spilled = {("scan", "sm_80"): 40, ("step", "sm_80"): 64, ("step", "sm_90"): 8}.get((name, arch), 0)
    assert stack_bytes(kernel, tmp_path) <= spilled
    if arch == "sm_90":
        check_machine_code(kernel, tmp_path, spilled)


HEADS = [(K, V) for K in (16, 32, 64, 128) for V in (16, 32, 64, 128)]


@pytest.mark.triton_internals
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("K", "V"),
    [pytest.param(K, V, marks=[pytest.mark.sweep] * ((K, V) not in ((16, 32), (128, 128)))) for K, V in HEADS],
)
def test_descriptors_of_tensor_instructions_are_whole(K, V, dtype, tmp_path):
    """Of heads of 16 x 32 in four warps ptxas 12.8 made one that reads shared memory out of range (H200)."""
    for name in ("prepare", "scan", "outputs"):
        assert broken_sums(built(name, "sm_90", dtype, K, V=V), tmp_path) == []


def test_a_descriptor_that_is_not_whole_is_found(monkeypatch):
    def code(third):
        lines = [
            "R2UR UR8, R5 ;",
            "UIADD3 UR4, UP0, UR8, 0x40, URZ ;",
            f"UIADD3.X UR5, {third}, 0x80, URZ, UP0, !UPT ;",
        ]
        return "\n".join(f"        /*{16 * at:04x}*/   {line}" for at, line in enumerate(lines))

    for third, count in (("URZ", 0), ("UR8", 1), ("UR9", 1)):
        monkeypatch.setattr(compiling, "dumped", lambda *_, third=third: code(third))
        assert len(broken_sums(None, None)) == count


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_steps_with_drafts_spill_few_registers(arch, tmp_path):
    assert stack_bytes(built("step", arch, queries=4), tmp_path) <= 80


@pytest.mark.triton_internals
@pytest.mark.parametrize(("arch", "spilled"), [("sm_90", 56), ("gfx942", None)])
def test_steps_whose_rows_are_in_fp8_compile_and_fit(arch, spilled, tmp_path):
    x = torch.zeros(16, dtype=torch.bfloat16)
    fp8 = rows_argument(torch.zeros(40, 24).t(), RowFormat("group"), x.dtype, 128)
    kernel = built("step", arch, heads=(8, 24), fp8=fp8)
    assert kernel.metadata.shared <= SHARED[arch]
    if spilled is not None:
        assert stack_bytes(kernel, tmp_path) <= spilled
        assert "e4m3x2" in kernel.asm["ptx"]


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", TARGETS)
def test_steps_with_drafts_fit(arch):
    kernel = built("step", arch, queries=4)
    assert kernel.metadata.shared <= SHARED[arch]
    check_compiles(kernel, arch)


def transposed_results(ttir):
    """Dots of which an operand is the transposed result of a dot, through whatever is done with elements in between."""
    made, wrong = {}, []
    for line in ttir.splitlines():
        match = re.match(r"\s*(%[\w]+)(?::\d+)? = (?:\"?)([\w.]+)(?:\"?) ?(.*)", line)
        if match is None:
            continue
        name, operation, rest = match.groups()
        kinds = {kind for operand in re.findall(r"%\w+", rest) for kind in made.get(operand, ())}
        if operation == "tt.dot":
            wrong += [line.strip()] * any("transposed" in made.get(x, ()) for x in re.findall(r"%\w+", rest)[:2])
            kinds |= {"dot"}
        if operation == "tt.trans" and "dot" in kinds:
            kinds |= {"transposed"}
        made[name] = kinds
    return wrong


@pytest.mark.triton_internals
def test_no_dot_takes_the_transposed_result_of_a_dot():
    """Triton 3.4 to 3.7.0 miscompiles that on Hopper at blocks of 64."""
    for name in ("prepare", "scan", "outputs"):
        ttir = built(name, "sm_90").asm["ttir"]
        assert ttir.count("tt.dot") >= 2 and transposed_results(ttir) == []


def test_of_the_test_a_transposed_result_is_found():
    lines = [
        "%a = tt.dot %x, %y, %zero, inputPrecision = tf32 : t", "%b = arith.truncf %a : t", "%c = tt.trans %b {order = x} : t",
    ]  # fmt: skip
    assert transposed_results("\n".join([*lines, "%d = tt.dot %w, %c, %zero : t"])) != []
    assert transposed_results("\n".join([*lines, "%d = tt.dot %w, %b, %zero : t"])) == []


@pytest.mark.triton_internals
@pytest.mark.parametrize("queries", [1, 4])
def test_sums_over_keys_cross_no_warp(queries):
    """Sums over warps store partial sums in one bank of shared memory: 5 us a token in place of 1 (H200, estimated)."""
    kernel = built("step", "sm_90", queries=queries)
    lanes = "8, 1, 1, 4" if step.LANES_FIRST else "1, 1, 8, 4"
    assert f"threadsPerWarp = [{lanes}], warpsPerCTA = [1, 8, 1, 1]" in kernel.asm["ttgir"]
    assert kernel.metadata.shared <= 1024
