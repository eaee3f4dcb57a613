"""Experts of fp8 rows: a layer over ranks, its check, refused arguments, machine code."""

from dataclasses import replace

import pytest
import torch
import triton.language as tl

import weft
import weft.check
from tests.compiling import SHARED, a_view, compiled, stack_bytes
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import check_refused
from tests.ops.moe.test_moe_exchange import EXPERTS, MOST, K, tokens_of, weights
from tests.ops.moe.test_moe_ops import SCHEDULE, WEIGHT, built_grouped, by_torch
from tests.ops.test_compile_layer_kernels import caps_of, check_compiles
from weft import ops
from weft.kernels.fp8 import E4M3, RowFormat, quantize_rows_kernel, rows_argument
from weft.kernels.fp8 import by_torch as by_blocks
from weft.ops.moe.exchange.exchange_op import DispatchArguments, PushRows, Sizes
from weft.ops.moe.exchange.lamport import DispatchWords
from weft.ops.moe.exchange.push import Mail, moe_dispatch_kernel
from weft.ops.moe.grouped.gemms import GroupedArguments, GroupedTiles
from weft.ops.moe.grouped_matmul import GROUPED_MATMUL
from weft.ops.moe.moe_dispatch import DispatchCall
from weft.ops.moe.routing import Routing
from weft.ops.op import find_op
from weft.plan.planned import machine
from weft.runtime.capabilities import launch_options
from weft.runtime.team.channel import ChannelView
from weft.transport.halves import Half

# --- a layer ------------------------------------------------------------------------------------------------------------


def layer(team, x, algorithm, of_layer):
    """(result, by hand from the rows that were sent) of a mixture of experts whose rows are sent in fp8."""
    router, gate_up, down = of_layer
    routing = ops.route(x @ router.T, K)
    sizes = {"experts": EXPERTS, "max_tokens": MOST, "algorithm": algorithm}
    found = ops.moe_dispatch(x, routing, team, dtype=E4M3, **sizes)
    mine = slice(found.experts.first, found.experts.first + found.experts.count)
    schedule = ops.moe_schedule(found.routing.ids, found.experts)
    h = ops.grouped_matmul_silu_mul(found.rows, gate_up[mine], schedule, scales=found.scales)
    raw = ops.grouped_matmul(found.rows, gate_up[mine], schedule, gather=True, scales=found.scales)
    gate, up = raw.float().chunk(2, dim=-1)
    pairs = int(schedule.counts.sum())
    torch.testing.assert_close(h[:pairs].float(), (torch.nn.functional.silu(gate) * up)[:pairs], rtol=2e-2, atol=2e-2)
    return ops.moe_combine(ops.grouped_matmul(h, down[mine], schedule), found, len(x), team)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.sweep), 3])
def test_a_layer_in_fp8_is_the_whole_one_in_every_algorithm(world_size):
    of_layer = weights(torch.float32)

    def main(team):
        x = tokens_of(team.rank, 1, torch.float32)
        return [layer(team, x, algorithm, of_layer) for algorithm in ("push", "pipelined", "lamport")]

    for rank, (first, *others) in enumerate(weft.simulate(main, world_size)):
        expected = by_torch(tokens_of(rank, 1, torch.float64), *(w.double() for w in of_layer), K)
        if len(expected):
            error = (first.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
            assert error < 0.06  # half a step of e4m3 is 1/32 of a number or less
        for other in others:
            assert_identical(other, first)


# --- refused arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "run"),
    [
        ("moe_dispatch: dtype=torch.float16 is not None or torch.float8_e4m3fn",
         lambda team, x, routing: ops.moe_dispatch(x, routing, team, experts=8, max_tokens=4, dtype=torch.float16)),
        ("algorithm='lamport' for rows of 201 torch.bfloat16, which are no whole 4-byte words; use 'push'",
         lambda team, x, routing: ops.moe_dispatch(torch.zeros(3, 201).bfloat16(), routing, team, experts=8, max_tokens=4,
                                                   algorithm="lamport")),
        ("rounds=True for rows of 200, no multiple of 128 columns; pass rounds=False",
         lambda team, x, routing: find_op("moe_dispatch").run(
             DispatchWords(row_bytes=1024, rounds=True), team,
             DispatchArguments(x, routing, 8, 4, True, False, team.name, "lamport"))),
        ("row_bytes=4096 with rounds=True and num_warps=2 is not in 256 .. 2048",
         lambda team, x, routing: DispatchWords(row_bytes=4096, num_warps=2, rounds=True)),
        ("block=64 is less than the 128 columns of a scale",
         lambda team, x, routing: find_op("moe_dispatch").run(
             PushRows(block=64), team, DispatchArguments(x, routing, 8, 4, True, False, team.name, "push"))),
    ],
)  # fmt: skip
def test_wrong_arguments_of_dispatch_are_refused(message, run):
    def main(team):
        routing = Routing(torch.arange(2).expand(3, 2).int(), torch.zeros(3, 2).bfloat16())
        check_refused(run, (team, torch.zeros(3, 200).bfloat16(), routing), message)

    weft.simulate(main, 2)


@pytest.mark.parametrize(
    ("message", "x", "scales", "fields"),
    [
        ("x.dtype=torch.float32 is not one of float8_e4m3fn", torch.zeros(3, 16), torch.zeros(3, 1), {}),
        ("scales has shape (3, 2); it must be (3, 1)", torch.zeros(3, 16).to(E4M3), torch.zeros(3, 2), {}),
        ("scales.dtype=torch.float16 is not one of float32", torch.zeros(3, 16).to(E4M3), torch.zeros(3, 1).half(), {}),
        ("scales with gather=False", torch.zeros(6, 16).to(E4M3), torch.zeros(6, 1), {"gather": False}),
        ("K=8 of torch.float8_e4m3fn is 8 bytes", torch.zeros(3, 8).to(E4M3), torch.zeros(3, 1), {}),
    ],
)
def test_wrong_scales_are_refused(message, x, scales, fields):
    def call(x, weight):
        return ops.grouped_matmul(x, weight, SCHEDULE, **{"gather": True, **fields}, scales=scales)

    check_refused(call, (x, WEIGHT[:, :, : x.shape[1]].contiguous()), f"grouped_matmul: {message}")


def test_tiles_of_a_row_for_16_bits_take_steps_under_one_scale_of_fp8_rows():
    """Rows of the tables and plans do not know of scales beside a weight of 16 bits."""

    def main(team):
        generator, experts = torch.Generator().manual_seed(1), ops.Experts.slices(2)
        weight = torch.randn((2, 32, 512), generator=generator).bfloat16()
        rows, scales = by_blocks(torch.randn((5, 512), generator=generator) * torch.arange(1, 513))[:2]
        schedule = ops.moe_schedule(torch.arange(2).int().repeat(5, 1), experts, block=16)
        given = GroupedArguments.of(rows, weight, schedule, True, scales)
        tiles = GroupedTiles(block_n=32, block_k=128, num_warps=4, num_stages=2)
        return [GROUPED_MATMUL.run(replace(tiles, block_k=k), None, given) for k in (128, 256)]

    [(one, other)] = weft.simulate(main, 1)
    assert_identical(other, one)


def test_fp8_rows_have_no_gradients():
    def main(team):
        schedule = ops.moe_schedule(torch.zeros(3, 2).int() + torch.tensor([0, 1]).int(), ops.Experts.slices(4))
        weight = WEIGHT.clone().requires_grad_()
        out = ops.grouped_matmul_silu_mul(torch.zeros(3, 16).to(E4M3), weight, schedule, scales=torch.ones(3, 1))
        with pytest.raises(RuntimeError, match="grouped_matmul_silu_mul has no backward for fp8 rows"):
            out.sum().backward()

    weft.simulate(main, 1)


# --- compiled -----------------------------------------------------------------------------------------------------------

INTS = torch.zeros(16, dtype=torch.int32)


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_kernels_that_send_fp8_compile(arch, tmp_path):
    x, rows, scales, caps = (
        torch.zeros(16, dtype=torch.bfloat16),
        torch.zeros(16).to(E4M3),
        torch.zeros(16),
        caps_of(arch),
    )
    design = (
        find_op("moe_dispatch")
        .choose(DispatchCall(128, 8, 7168, torch.bfloat16, "push", True), machine(caps, 2))
        .design
    )
    sizes = Sizes.of(design, 128, 7168, 8, 64, fp8=True)
    mail, flags = Mail(rows, INTS, x, scales), Half(ChannelView(INTS, INTS, tl.constexpr(sizes.chunks)), INTS, INTS)
    constants = {"SIZES": sizes, "CHUNKS": sizes.chunks, "num_warps": 8, **launch_options(caps)}
    sending = compiled(moe_dispatch_kernel, x, INTS, x, 128, mail, flags, a_view(), arch=arch, **constants)
    constants = {"WIDTH": 7168, "PIECES": 16, "BLOCK": 128, **launch_options(caps)}
    fp8 = rows_argument(torch.zeros(56, 128).t(), RowFormat("group"), torch.bfloat16, 128)
    alone = compiled(quantize_rows_kernel, x, rows, fp8, 128, 128, arch=arch, **constants)
    for kernel in (sending, alone):
        check_compiles(kernel, arch)
        if arch == "sm_90":
            ptx = kernel.asm["ptx"]
            assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "div.full" not in ptx and ".ftz" not in ptx
            assert "ld.global.v4.b32" in ptx and stack_bytes(kernel, tmp_path) == 0


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("block", [16, 128])
def test_grouped_gemms_of_fp8_rows_compile_and_fit(arch, block, tmp_path):
    kernel = built_grouped(arch, block, True, True, fp8=True)
    assert kernel.metadata.shared <= SHARED[arch]
    if arch == "sm_90":
        assert "wgmma.mma_async" in kernel.asm["ptx"] and stack_bytes(kernel, tmp_path) == 0
