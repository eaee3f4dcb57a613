"""Every collective kernel compiles for every target without a GPU, and the PTX shows what it promises."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests.compiling import TARGETS, a_view, compiled, compiled_exchange, sums_of
from tests.sampled import sampled
from weft.kernels.fp8 import E4M3, RowFormat, rows_argument
from weft.kernels.slices import SLICES
from weft.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from weft.ops.collectives.all_reduce_rms_norm import ALL_REDUCE_RMS_NORM, push_of
from weft.ops.collectives.barrier import barrier_kernel
from weft.ops.collectives.collective import FP8_HOPS, ONE_HOP, TWO_HOPS, OneShot, TwoShot, of_world
from weft.ops.collectives.copy_engine import ADD_BYTES, COPY_BYTES, WARPS, add_kernel, copy_kernel
from weft.ops.collectives.fp8_kernels import fp8_all_reduce_kernel
from weft.ops.collectives.norm_kernel import Norm, Summands, all_reduce_rms_norm_kernel
from weft.ops.gemm.small_m_rule import MAX_PARTIALS_LEFT
from weft.plan import table
from weft.plan.planned import machine
from weft.runtime.capabilities import Capabilities
from weft.runtime.platforms.cuda import resident_programs
from weft.transport.exchange import Body
from weft.transport.plans import PushPlan
from weft.transport.push import WIDE_BYTES, registers_of

WIDTH = 6144
# name -> (kernel or body of an exchange, transport, constants of its own)
KERNELS = {
    "one_shot": (all_reduce.ONE_SHOT, "lamport", {"sizes": 1}),
    "two_shot": (all_reduce.two_shot_all_reduce_kernel, "lamport", {}),
    "one_shot_of_parts": (all_reduce.ONE_SHOT, "lamport", {"sizes": MAX_PARTIALS_LEFT}),
    "one_shot_wire": (fp8_all_reduce_kernel, "fp8", {"TWO_SHOT": False}),
    "two_shot_wire": (fp8_all_reduce_kernel, "fp8", {"TWO_SHOT": True}),
    "reduce_scatter": (reduce_scatter.BODY, "lamport", {}),
    "all_gather": (all_gather.BODY, "keyed", {}),
    "all_to_all": (all_to_all.BODY, "keyed", {}),
} | {
    f"norm_{'two' if two_shot else 'one'}_shot{'_factored' if factored else ''}{'_of_parts' if parts > 1 else ''}": (
        all_reduce_rms_norm_kernel, "lamport",
        {"TWO_SHOT": two_shot, "DEFERRED": factored, "WIDTH": WIDTH, "PART": 512},
    )
    for two_shot in (False, True) for factored in (False, True) for parts in (1, MAX_PARTIALS_LEFT)
}  # fmt: skip
# In a tree, of a rank's nodes.
KERNELS |= {
    f"norm_{'two' if two_shot else 'one'}_shot_tree{fp8}": (
        all_reduce_rms_norm_kernel, "lamport",
        {"TWO_SHOT": two_shot, "DEFERRED": False, "WIDTH": WIDTH, "PART": 256, "TREE": True},
    )
    for two_shot in (False, True) for fp8 in ("", "_fp8")
}  # fmt: skip
# With rows that travel in fp8.
KERNELS |= {
    f"{name}_wire": (kernel, "fp8", constants)
    for name, (kernel, _, constants) in KERNELS.items() if name.startswith("norm") and "of_parts" in name
}  # fmt: skip
# With normed rows in fp8; whole norms with rows in 16 bits beside.
KERNELS |= {
    f"{name}{beside}_fp8": row
    for name, row in KERNELS.items() if name.startswith("norm") and name.endswith("of_parts")
    for beside in (("",) if "factored" in name else ("", "_beside"))
}  # fmt: skip


def kernels_of(arch):
    """Names of the kernels that ``arch`` has: E4M3 needs sm_89."""
    return [name for name in KERNELS if arch != "sm_80" or not name.endswith(("fp8", "wire"))]


def plans(name, world_size):
    """Every plan that may be chosen for this kernel: of the rules, then of the rows that are shipped."""
    if name.startswith("norm"):
        caps = Capabilities(device_name="GPU", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,) * world_size)
        here = machine(caps, world_size)
        in_fp8 = name.endswith("wire")
        call = ALL_REDUCE_RMS_NORM.call_of(((16, WIDTH),), torch.bfloat16, here, fp8_wire=in_fp8)
        if in_fp8:
            return [ALL_REDUCE_RMS_NORM.default("two_shot" if "two_shot" in name else "one_shot", call, here).push]
        push = ALL_REDUCE_RMS_NORM.plan(call, here).design.push
        if "tree" in name:
            push = ALL_REDUCE_RMS_NORM.plan(call._replace(invariant=True), here).design.hops.design.push
        design = (TwoShot if "two_shot" in name else OneShot)(push=push)
        return [push_of(design, 2, RowFormat("group") if name.endswith("fp8") else None)]
    hops = FP8_HOPS if KERNELS[name][1] == "fp8" else TWO_HOPS if name == "two_shot" else ONE_HOP
    limits = of_world(hops, world_size)
    ruled = [
        PushPlan(transport=KERNELS[name][1], row_bytes=row, num_warps=warps, programs_per_sm=per_sm)
        for _, row, warps, per_sm in limits
    ]
    found = dict.fromkeys([*ruled, *shipped(name, world_size)])
    # Wide rows are for large messages; split-K partials have few rows, and may spill there.
    return [plan for plan in found if not name.endswith("_of_parts") or plan.row_bytes < WIDE_BYTES.value]


def shipped(name, world_size):
    for file in (Path(table.__file__).parent / "tables").glob(f"*.w{world_size}.json"):
        for row in table.read(file).rows:
            if name.removesuffix("_of_parts") in (row.op, row.design) and "push" in row.config:
                yield PushPlan(**row.config["push"])


def compiled_for(arch, name, world_size=4, dtype=torch.bfloat16, n=1 << 20, plan=None):
    kernel, transport, constants = KERNELS[name]
    if transport == "keyed":
        dtype = torch.int32
    plan = plan or plans(name, world_size)[0]
    x, words = torch.zeros(16, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    first, more = torch.zeros(16) if "of_parts" in name else x, ()
    if name.startswith("norm"):
        count = MAX_PARTIALS_LEFT if "of_parts" in name else SLICES // world_size if "tree" in name else 1
        summands, normed, fp8 = tl.constexpr(count), x, None
        if name.endswith("fp8"):
            beside = (x,) if "beside" in name else ()
            normed, fp8 = x.to(E4M3), rows_argument(torch.zeros(48, 16).t(), RowFormat("group"), dtype, 128, *beside)
        first, more = Summands(first, n, summands), (Norm(normed, x, x, 1e-6, torch.zeros(4), words, fp8),)
    buffer, item = x, dtype.itemsize
    if transport == "fp8":
        buffer, item, more = words, 1, more or (n,)  # columns
    unfused = {"enable_fp_fusion": False} if transport == "fp8" else {}
    options = unfused | {"maxnreg": registers_of(plan, world_size), "launch_pdl": arch in ("sm_90", "sm_100")}
    make = compiled_exchange if isinstance(kernel, Body) else compiled
    return make(
        kernel, first, x, n, buffer, words, a_view(world_size), *more, arch=arch,
        BLOCK=triton.next_power_of_2(plan.row_bytes // item), ROWS=triton.next_power_of_2(world_size),
        TRANSPORT=transport, num_warps=plan.num_warps, **constants, **(options if arch.startswith("sm_") else {}),
    )  # fmt: skip


# Of rows that travel in fp8 the smallest and the largest form are compiled each time.
WIRES_SELDOM = ("norm_one_shot_of_parts_wire", "norm_two_shot_of_parts_wire")
# Off Hopper two of the eight forms of the norm, the smallest and the largest.
NORMS_EVERYWHERE = ("norm_one_shot", "norm_two_shot_factored_of_parts")


@pytest.mark.triton_internals
@pytest.mark.parametrize(
    ("arch", "name"),
    sampled(
        ((arch, name) for arch in TARGETS for name in kernels_of(arch)),
        lambda arch, name: (
            name not in WIRES_SELDOM
            and (
                arch == "sm_90" or not name.startswith("norm") and not name.endswith("wire") or name in NORMS_EVERYWHERE
            )
        ),
    ),
)
def test_compiles(arch, name):
    asm = compiled_for(arch, name).asm
    if arch == "sm_90":
        ptx = asm["ptx"]
        # Tiles move 16 bytes a thread, to peers too: no element is stored or loaded alone.
        assert re.search(r"st\.global\.v4\.b32", ptx), ptx
        assert not re.search(r"(st|ld)(\.volatile)?\.global(\.\w+)*\.b16", ptx), ptx
        assert ".local" not in ptx
        # What team.max_programs() was told, so that all programs are resident.
        assert f".maxnreg {registers_of(plans(name, 4)[0], 4)}" in ptx
        # Nothing is read before what the kernel before has written is there.
        assert ptx.index("griddepcontrol.wait") < re.search(r"\b(ld|st)(\.\w+)*\.global", ptx).start()
        assert "griddepcontrol.launch_dependents" in ptx
    elif arch == "sm_80":
        assert "griddepcontrol" not in asm["ptx"]


@pytest.mark.triton_internals
@pytest.mark.parametrize(
    "name", [name for name in KERNELS if name.startswith("norm") and name.endswith("fp8") and "tree" not in name]
)
def test_rows_in_fp8_come_of_the_sums_of_16_bits(name):
    plain = name.removesuffix("_fp8").removesuffix("_beside")
    rows, halves = (sums_of(compiled_for("sm_90", one, 2)) for one in (name, plain))
    assert rows == halves
    assert rows


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_no_warp_clears_a_key_that_another_still_loads(world_size, name):
    """Keys are loaded by each warp for itself, and cleared by the next receive: a barrier of the program lies between."""
    for plan in plans(name, world_size):
        ptx = compiled_for("sm_90", name, world_size, plan=plan).asm["ptx"]
        last = max(match.start() for match in re.finditer(r"ld\.volatile\.global", ptx))
        barrier, stored = ptx.index("bar.sync", last), ptx.index("st.global", last)
        assert plan.num_warps == 1 or barrier < stored, (plan, world_size)


@pytest.mark.parametrize("name", ["one_shot", "two_shot", "reduce_scatter"])
@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float16), (3, torch.bfloat16), (8, torch.float32)])
def test_compiles_for_world_size(world_size, dtype, name):
    ptx = compiled_for("sm_90", name, world_size, dtype).asm["ptx"]
    assert "st.global.v4.b32" in ptx
    assert ".local" not in ptx


@pytest.mark.parametrize("name", ["one_shot", "two_shot", "all_to_all"])
@pytest.mark.parametrize("n", [1, 1001])
def test_ragged_and_tiny_sizes_compile(n, name):
    compiled_for("sm_90", name, n=n)


def one_plan_in(one_in, world_size, arch="sm_90"):
    return [(name, plan) for name in kernels_of(arch) for plan in plans(name, world_size)][::one_in]


@pytest.mark.triton_internals
@pytest.mark.parametrize(
    ("world_size", "one_in"),
    sampled([(2, 1), (4, 1), (4, 7)], lambda world_size, one_in: one_in > 1),
)
def test_plans_need_no_more_registers_than_they_are_given(world_size, one_in):
    """Spills would show as a stack: every plan of the measured world sizes, whole tiles."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not cuobjdump.exists():
        pytest.skip("this Triton has no cuobjdump")
    for name, plan in one_plan_in(one_in, world_size):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled_for("sm_90", name, world_size, plan=plan).asm["cubin"])
            file.flush()
            command = [str(cuobjdump), "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 16, f"{name} {plan}: {usage}"


@pytest.mark.triton_internals
@pytest.mark.parametrize(
    ("world_size", "arch", "shared", "one_in"),
    sampled(
        [(2, "sm_80", 163 << 10, 1), (4, "sm_80", 163 << 10, 1), (4, "sm_90", 227 << 10, 1), (8, "sm_90", 227 << 10, 1)]
        + [(8, "sm_90", 227 << 10, 9)],
        lambda world_size, arch, shared, one_in: one_in > 1,  # more ranks take more rows
    ),
)
def test_all_programs_of_a_plan_are_resident(world_size, arch, shared, one_in):
    """They wait for one another, and no cooperative launch refuses what does not fit."""
    for name, plan in one_plan_in(one_in, world_size, arch):
        registers = registers_of(plan, world_size)
        made = compiled_for(arch, name, world_size, plan=plan)
        assert f".maxnreg {registers}" in made.asm["ptx"]
        resident = min(plan.programs_per_sm, resident_programs(plan.num_warps, registers))
        # The driver keeps 1 KiB for each program.
        assert resident * (made.metadata.shared + 1024) <= shared, f"{name} {plan}: {made.metadata.shared} bytes"


def test_lamport_stages_are_cleared_to_minus_zero():
    """Two bf16 of -0.0 are 0x80008000; a plain fill of -0.0 would be compiled to +0.0, which reads as written."""
    ptx = compiled_for("sm_90", "one_shot").asm["ptx"]
    cleared = re.findall(r"mov\.b32\s+(%r\d+), -2147450880;", ptx)
    assert cleared and any(f"{{ {r}, {r}, {r}, {r} }}" in ptx for r in cleared)


def test_kernels_of_staging_move_16_bytes_a_thread():
    for dtype in (torch.int32, torch.bfloat16):
        x, arrays = torch.zeros(16, dtype=dtype), {"num_warps": WARPS}
        for arch in TARGETS:
            copied = compiled(copy_kernel, x, x, 1 << 20, BLOCK=COPY_BYTES // dtype.itemsize, arch=arch, **arrays)
            summed = compiled(
                add_kernel, x, x, x, 1 << 20, 1 << 20, BUFFERS=3, BLOCK=ADD_BYTES // dtype.itemsize, arch=arch, **arrays
            )
            if arch == "sm_90":
                for kernel, loads, stored in ((copied, 1, COPY_BYTES), (summed, 4, ADD_BYTES)):
                    # All loads are under way before the first store.
                    ptx, many = kernel.asm["ptx"], stored // (WARPS * 32 * 16)
                    found = re.findall(r"(ld|st)\.global\.v4\.b32", ptx)
                    assert (found.count("ld"), found.count("st")) == (loads * many, many)
                    assert ptx.rindex("ld.global.v4") < ptx.index("st.global.v4")
                    assert ".local" not in ptx


def test_barrier_compiles():
    for arch in TARGETS:
        compiled(barrier_kernel, a_view(), arch=arch, num_warps=1)
