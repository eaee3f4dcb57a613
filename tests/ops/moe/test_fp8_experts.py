"""Experts with fp8 weights: forms of scales, rows written in fp8, planted mistakes, refused arguments, machine code."""

import re
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl

from tests.compiling import SHARED, stack_bytes
from tests.ops.checking import a_case_fails, assert_close, assert_identical
from tests.ops.gemm.quantized import alone
from tests.ops.layer_cases import DEVICES, check_refused, everywhere, mutated
from tests.ops.moe.test_moe_ops import SCHEDULE, built_grouped
from weft import ops
from weft.errors import InvalidAccess
from weft.kernels import fp8_tile
from weft.kernels.fp8 import E4M3, Fp8, RowFormat, by_torch
from weft.ops.case import BF16, FP16, agreed
from weft.ops.moe.grouped import gemms as grouped
from weft.ops.moe.grouped import kernel as grouped_kernel
from weft.ops.moe.grouped.cases import quantized_experts
from weft.ops.moe.grouped.gemms import GroupedCall, GroupedTiles
from weft.ops.moe.grouped.rule import grouped_tiles_for
from weft.ops.moe.routing import Experts
from weft.ops.op import find_op
from weft.plan.planned import machine
from weft.runtime.capabilities import Capabilities

H200 = Capabilities(device_name="NVIDIA H200", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,))
GROUP = RowFormat("group")


def drawn(T, k, experts, N, K, scheme="block", dtype=BF16, seed=0):
    """(rows, weight, choices); rows of very different sizes, and experts whose blocks are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((T, K), generator=generator) * 2.0 ** torch.randint(-6, 6, (T, 1), generator=generator)
    sizes = 2.0 ** torch.randint(-6, 6, (experts, -(-N // 16), 1), generator=generator)
    weight = torch.randn((experts, N, K), generator=generator) * sizes.repeat_interleave(16, 1)[:, :N]
    ids = torch.rand((T, experts), generator=generator).argsort(1)[:, :k].int()
    return x.to(dtype), quantized_experts(weight * K**-0.5, scheme), ids


def rows_of(x, weight):
    """``x`` as the weight's scales ask for it."""
    if weight.input_scale is not None:
        return Fp8((x.float() * (1 / weight.input_scale)).clamp(-448, 448).to(E4M3), weight.input_scale)
    return Fp8(*by_torch(x, 128 if weight.scales.shape[-1] > 1 else x.shape[1]))


def reference(x, weight, ids, gated):
    """Rows in the order of the experts' pairs, in fp64, by the definition: every byte times its scale."""
    rows, parts = rows_of(x, weight).dequantized(torch.float64), []
    for expert, matrix in enumerate(weight.dequantized(torch.float64)):
        part = rows[(ids == expert).any(1)] @ matrix.T
        if gated:
            gate, up = part.chunk(2, 1)
            part = torch.nn.functional.silu(gate) * up
        parts.append(part)
    return torch.cat(parts)


def close(out, expected, K, gated, what=""):
    assert_close(out, expected, 16 * K if gated else K, partials=1, levels=2, by_row=True, what=what)


def schedule_of(ids, experts, block=None):
    return ops.moe_schedule(ids, Experts.slices(experts), block=block)


SIZES = (7, 2, 4, 96, 272), (21, 3, 3, 200, 144), (40, 1, 2, 64, 400)


@pytest.mark.parametrize("scheme", ["block", "channel"])
@pytest.mark.parametrize("gated", [True, False])
def test_experts_of_any_shape_are_the_dequantized_product(scheme, gated):
    def main():
        for seed, (T, k, E, N, K) in enumerate(SIZES):
            for block in (16, 128):
                x, weight, ids = drawn(T, k, E, N, K, scheme, seed=seed)
                expected, what = reference(x, weight, ids, gated), f"{T}x{E}x{N}x{K} block {block}"
                schedule = schedule_of(ids, E, block)
                op, options = (ops.grouped_matmul_silu_mul, {}) if gated else (ops.grouped_matmul, {"gather": True})
                out = op(x, weight, schedule, **options)
                assert out.dtype == BF16
                close(out, expected, K, gated, what)
                assert_identical(op(rows_of(x, weight), weight, schedule, **options), out, what=f"{what} of fp8 rows")

    alone(main)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("features", [192, 256, 24])
def test_rows_written_in_fp8_are_the_quantized_ones(features, block, device):
    """Of 192 columns the last scale is of 64, as where a rank's edge cuts a group."""

    def main(device):
        x, weight, ids = drawn(21, 2, 4, 2 * features, 256)
        x, ids, weight = x.to(device), ids.to(device), Fp8(*(part.to(device) for part in weight[:2]))
        schedule = schedule_of(ids, 4, block)
        h = ops.grouped_matmul_silu_mul(x, weight, schedule)
        static = RowFormat("static", torch.tensor([[0.03]], device=device))
        for format in (GROUP, static):
            written = ops.grouped_matmul_silu_mul(x, weight, schedule, fp8=format)
            assert_identical(agreed(h, written, format), h)

    everywhere(main, device)


@pytest.mark.parametrize("format", [None, GROUP], ids=["bf16", "fp8"])
@pytest.mark.parametrize("features", [192, 320, 72])
@pytest.mark.parametrize("block", [16, 128])
def test_two_scales_of_ups_tile_give_the_bits_of_a_scale_for_each_row(block, features, format, monkeypatch):
    """Up's rows begin amid a scale of 128 rows where gate's end."""
    x, weight, ids = drawn(21, 2, 4, 2 * features, 320)
    of_gemm, forms = grouped.scales_of_gemm, []

    def multiplied():
        return ops.grouped_matmul_silu_mul(x, weight, schedule_of(ids, 4, block), fp8=format)

    def kept(*given):
        forms.append(of_gemm(*given))
        return forms[-1]

    def by_row(*given):
        return of_gemm(*given)._replace(uniform=tl.constexpr(False), two=tl.constexpr(False))

    monkeypatch.setattr(grouped, "scales_of_gemm", kept)
    out = alone(multiplied)
    assert forms[0].two.value and forms[0].uniform.value
    monkeypatch.setattr(grouped, "scales_of_gemm", by_row)
    expected = alone(multiplied)
    for one, other in zip(out, expected, strict=True) if format else [(out, expected)]:
        if one is not None:
            assert_identical(one.float(), other.float())


def test_a_layer_is_its_plain_model():
    """Both GEMMs, rows in fp8 between them, with few pairs and many."""

    def main():
        for T, block in ((6, 16), (70, 128)):
            x, gate_up, ids = drawn(T, 2, 3, 384, 256)
            _, down, _ = drawn(T, 2, 3, 200, 192, seed=1)
            schedule = schedule_of(ids, 3, block)
            h = ops.grouped_matmul_silu_mul(x, gate_up, schedule, fp8=GROUP)
            y = ops.grouped_matmul(h, down, schedule)
            rows = h.dequantized(torch.float64)
            expected, place = torch.zeros(2 * T, 200, dtype=torch.float64), 0
            for expert, matrix in enumerate(down.dequantized(torch.float64)):
                pairs = (ids.flatten() == expert).nonzero().flatten()
                expected[pairs] = rows[place : place + len(pairs)] @ matrix.T
                place += len(pairs)
            close(y, expected, 192, False)

    alone(main)


def test_blocks_that_a_rank_cuts_and_static_scales():
    def main():
        x, whole, ids = drawn(9, 2, 3, 384, 512)
        everything, schedule = slice(None), schedule_of(ids, 3)
        shards = {
            "rows from 64 on": (slice(64, 256), everything, whole.scales.repeat_interleave(2, 1)[:, 1:4]),
            "columns from 192 on": (everything, slice(192, 384), whole.scales.repeat_interleave(2, 2)[:, :, 3:6]),
        }
        for name, (rows, columns, scales) in shards.items():
            shard, of = Fp8(whole.data[:, rows, columns].contiguous(), scales.contiguous()), x[:, columns].contiguous()
            for gated in (True, False):
                op, options = (ops.grouped_matmul_silu_mul, {}) if gated else (ops.grouped_matmul, {"gather": True})
                out = op(of, shard, schedule, **options)
                close(out, reference(of, shard, ids, gated), of.shape[1], gated, f"{name} {gated}")
        x, weight, ids = drawn(9, 2, 3, 48, 272, "channel")
        schedule = schedule_of(ids, 3)
        for scale in (0.01, 30.0):  # some rows saturate, some vanish
            static = weight._replace(input_scale=torch.tensor([[scale]]))
            out = ops.grouped_matmul(x, static, schedule, gather=True)
            close(out, reference(x, static, ids, False), 272, False, f"scale {scale}")
            assert_identical(ops.grouped_matmul(rows_of(x, static), static, schedule, gather=True), out)

    alone(main)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_is_the_same_in_every_schedule_and_run(device):
    def main(device):
        x, weight, ids = drawn(40, 2, 4, 256, 256)
        x, ids, weight = x.to(device), ids.to(device), Fp8(*(part.to(device) for part in weight[:2]))
        out = ops.grouped_matmul(x, weight, schedule_of(ids, 4, 16), gather=True)
        assert_identical(ops.grouped_matmul(x, weight, schedule_of(ids, 4, 16), gather=True), out)
        few = ops.grouped_matmul(x[:9], weight, schedule_of(ids[:9], 4, 16), gather=True)
        kept = torch.cat([torch.arange(40)[(ids.cpu() == e).any(1)] < 9 for e in range(4)])
        assert_identical(few, out[kept.to(device)])

    everywhere(main, device)


def test_compiles_without_a_graph_break():
    def main():
        x, gate_up, ids = drawn(6, 2, 3, 96, 256)
        _, down, _ = drawn(6, 2, 3, 32, 48, seed=1)
        schedule = schedule_of(ids, 3)

        def experts(x, gate_up, down):
            return ops.grouped_matmul(ops.grouped_matmul_silu_mul(x, gate_up, schedule, fp8=GROUP), down, schedule)

        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert_identical(compiled(x, gate_up, down), experts(x, gate_up, down))

    alone(main)
    torch._dynamo.reset()


# --- planted mistakes ---------------------------------------------------------------------------------------------------

MUTANTS = {
    "another expert's scales": (fp8_tile, "tl.cast(expert, tl.int64) * fp8.expert", "tl.cast(expert, tl.int64) * 0"),
    "the block of the neighbour's columns": (
        fp8_tile, "source += k // fp8.columns", "source += tl.maximum(k // fp8.columns - 1, 0)"),
    "the block of the first rows": (fp8_tile, "source += first // fp8.weight_rows * fp8.weight_row", "source += 0"),
    "scales of the weight transposed": (
        fp8_tile, "source += first // fp8.weight_rows * fp8.weight_row", "source += first // fp8.weight_rows"),
    "scales of the rows transposed": (
        fp8_tile, "rows * fp8.x_row + k // 128 * fp8.x_column", "rows * fp8.x_column + k // 128 * fp8.x_row"),
    "scales one token off": (fp8_tile, "fp8.x + rows * fp8.x_row", "fp8.x + tl.maximum(rows - 1, 0) * fp8.x_row"),
    "scales of the step before": (
        grouped_kernel, "of_rows, of_weight, of_up = next_rows, next_weight, next_up", "of_rows = next_rows"),
    "gate's scales for up": (grouped_kernel, "weight_scales(fp8, N + column, 2 * N", "weight_scales(fp8, column, 2 * N"),
    "one scale for up's tile": (fp8_tile, "tl.arange(0, acc.shape[0]) < under_low", "tl.arange(0, acc.shape[0]) >= 0"),
    "up's scales swapped": (fp8_tile, "return low, high, (place", "return high, low, (place"),
    "gate twice": (grouped_kernel, "weight_tile(weight, expert, 1, column, k", "weight_tile(weight, expert, 0, column, k"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_cases_catch_a_planted_mistake(name, tmp_path, monkeypatch):
    module, old, new = MUTANTS[name]
    mutant = mutated(module, old, new, f"experts_mutant_{len(name)}", tmp_path)
    if module is fp8_tile:  # functions of the kernel of grouped GEMMs
        place = f"from {fp8_tile.__name__} import"
        mutant = mutated(grouped_kernel, place, f"from {mutant.__name__} import", "experts_by_mutant", tmp_path)
    monkeypatch.setattr(grouped, "grouped_matmul_kernel", mutant.grouped_matmul_kernel)
    assert alone(lambda: a_case_fails((find_op("grouped_matmul_silu_mul"), find_op("grouped_matmul")), "block_fp8"))


WRITTEN_MUTANTS = {
    "the place of the pair before": ("mask, written, target, there", "mask, written, tl.maximum(target - 1, 0), there"),
    "the first group's place": ("written, target, there, column, N", "written, target, there, 0, N"),
    "rows that are not rounded to 16 bits": ("result.to(written.dtype)", "result"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN_MUTANTS)
def test_a_planted_mistake_in_what_is_written_is_caught(name, tmp_path, monkeypatch):
    mutant = mutated(grouped_kernel, *WRITTEN_MUTANTS[name], f"written_mutant_{len(name)}", tmp_path)
    monkeypatch.setattr(grouped, "grouped_matmul_kernel", mutant.grouped_matmul_kernel)
    with pytest.raises((AssertionError, InvalidAccess)):
        test_rows_written_in_fp8_are_the_quantized_ones(192, 128, "cpu")


def test_the_cases_catch_rows_with_the_scales_of_the_call_before(monkeypatch):
    """Stale scales: new bytes beside what the buffer of scales held."""
    quantized = grouped.quantized_for

    def stale(weight, x, caps):
        rows = quantized(weight, x, caps)
        return rows._replace(scales=torch.full_like(rows.scales, 0.01))

    monkeypatch.setattr(grouped, "quantized_for", stale)
    assert alone(lambda: a_case_fails((find_op("grouped_matmul_silu_mul"), find_op("grouped_matmul")), "block_fp8"))


# --- refused arguments --------------------------------------------------------------------------------------------------


def weight_of(scales, N=6, K=256, dtype=E4M3, **fields):
    return Fp8(torch.zeros(4, N, K).to(dtype), torch.ones(scales), **fields)


HALF = torch.ones(3, 256).bfloat16()


@pytest.mark.parametrize(
    ("message", "x", "weight", "options"),
    [
        ("x.dtype=torch.float32 is not one of float16, bfloat16", HALF.float(), weight_of((4, 1, 2)), {}),
        ("x has K=128 columns and weight has 256", HALF[:, :128].contiguous(), weight_of((4, 1, 2)), {}),
        ("weight.scales has shape (4, 2) for a weight of 6 x 256", HALF, weight_of((4, 4, 2)), {}),
        ("weight.scales has shape (1, 2); it must be (4, n, k)", HALF, weight_of((1, 2)), {}),
        ("weight.dtype=torch.bfloat16 is not one of float8_e4m3fn", HALF, weight_of((4, 1, 2), dtype=BF16), {}),
        ("x.scales has shape (3, 1); this weight", Fp8(HALF.to(E4M3), torch.ones(3, 1)), weight_of((4, 1, 2)), {}),
        ("weight has 5 rows, an odd number", HALF, weight_of((4, 1, 2), N=5), {}),
        ("K=24 of torch.float8_e4m3fn is no multiple of 16", HALF[:, :24].contiguous(), weight_of((4, 6, 1), K=24), {}),
        ("fp8.kind='token', but several programs compute a row; quantize the result", HALF, weight_of((4, 1, 2)),
         {"fp8": RowFormat("token")}),
        ("is for fp8 weights and rows of fp8 or bf16; leave it out", HALF.half(), weight_of((4, 1, 2)), {"fp8": GROUP}),
        ("is for fp8 weights and rows of fp8 or bf16; leave it out", HALF, torch.zeros(4, 6, 256).bfloat16(), {"fp8": GROUP}),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(message, x, weight, options):
    check_refused(lambda: ops.grouped_matmul_silu_mul(x, weight, SCHEDULE, **options), (), message)


def test_refused_where_triton_has_no_e4m3(monkeypatch):
    def main():
        x, weight, ids = drawn(3, 2, 4, 32, 256)
        schedule = schedule_of(ids, 4)
        name = "weft.ops.moe.grouped_matmul.capabilities_of"
        monkeypatch.setattr(name, lambda device: H200.__class__(**{**as_fields(H200), "arch": "sm_80"}))
        with pytest.raises(ValueError, match="sm_80, which has no conversion"):
            ops.grouped_matmul(x, weight, schedule, gather=True)

    alone(main)


def as_fields(caps):
    return {name: getattr(caps, name) for name in caps.__dataclass_fields__}


def test_there_are_no_gradients():
    def main():
        x, weight, ids = drawn(3, 2, 4, 32, 256, dtype=FP16)
        with pytest.raises(RuntimeError, match="grouped_matmul: fp8 weights have no backward"):
            ops.grouped_matmul(x.requires_grad_(), weight, schedule_of(ids, 4), gather=True)

    alone(main)


# --- plans and machine code ---------------------------------------------------------------------------------------------


def test_the_plan_names_tiles_of_fp8():
    op = find_op("grouped_matmul_silu_mul")
    planned = op.plan(op.call_of((4096, 8, 128, 768, 2048), BF16, machine(H200, 1), block_fp8=True), machine(H200, 1))
    assert (planned.design.block_n, planned.design.block_k) == (256, 128)
    assert "scales of fp8 for each step of 128 columns" in planned.reason
    for block, pairs in ((16, 8), (16, 1024), (32, 1024), (64, 8192), (128, 32768)):
        call = GroupedCall(block, pairs, 768, 2048, BF16, True, block_fp8=True)
        # All of a scale's 128 columns are in a tile.
        assert grouped_tiles_for(call, H200, gated=True).block_n == 256
        in_16_bits, in_fp8 = (grouped_tiles_for(call._replace(written=w), H200, gated=True) for w in (False, True))
        assert in_16_bits.num_stages - in_fp8.num_stages == (block >= 64)


def test_the_plan_of_rows_that_are_gathered():
    """With scales of blocks they travel in fp8 within a node, else in 16 bits."""
    op, sizes = find_op("all_gather_grouped_matmul_silu_mul"), (4096, 8, 128, 768, 2048)
    here, nodes = machine(H200, 2), machine(H200, 4, nodes=2)
    planned = op.plan(op.call_of(sizes, BF16, here, block_fp8=True), here)
    assert planned.name == "fused" and planned.design.tiles.block_k == 128 and not planned.design.in_place
    for call, where in (({"channel_fp8": True}, here), ({"block_fp8": True}, nodes)):
        planned = op.plan(op.call_of(sizes, BF16, where, **call), where)
        assert planned.name == "sequential" and "rows travel in 16 bits" in planned.reason
    with pytest.raises(ValueError, match="algorithm='fused' sends fp8 rows with scales of 128 columns"):
        op.plan(op.call_of(sizes, BF16, here, "fused", channel_fp8=True), here)
    text = str(
        ops.explain("moe-rs+block_fp8", max_tokens=2048, k=8, experts=128, H=2048, N=768, world_size=4, caps=H200)
    )
    assert "scales of fp8 for each step" in text or "block_k=128" in text


@pytest.mark.parametrize("columns", [128, 0])
@pytest.mark.parametrize(("block", "pairs"), [(16, 64), (16, 4096), (32, 4096), (64, 8192), (128, 32768)])
def test_on_sm_90_by_fp8_instructions_from_shared_memory(block, pairs, columns, tmp_path):
    for gather, gated, N, K in ((True, True, 768, 2048), (False, False, 2048, 768)):
        kernel = built_grouped("sm_90", block, gather, gated, N=N, K=K, experts_fp8=columns, pairs=pairs)
        ptx = kernel.asm["ptx"]
        assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3", ptx)
        assert "cp.async.bulk.tensor" in ptx and ("cp.async.cg.shared.global" in ptx) == gather
        assert "ttg.local_load" not in kernel.asm["ttgir"]
        assert kernel.metadata.shared <= SHARED["sm_90"]
        # Two registers of the largest tile, once a tile.
        assert stack_bytes(kernel, tmp_path) <= (8 if gated and block == 128 else 0)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("block", "pairs"), [(16, 64), (32, 4096), (64, 8192), (128, 32768)])
def test_2880_features_are_read_16_bytes_at_a_time_without_spills(block, pairs, wide, tmp_path):
    """gpt-oss's: no whole steps of K, and up's rows begin amid a scale."""
    kernel = built_grouped("sm_90", block, True, True, N=2880, K=2880, experts_fp8=128, pairs=pairs, wide=wide)
    ptx = kernel.asm["ptx"]
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+)", ptx)) == {"0x10"}
    assert "ttg.local_load" not in kernel.asm["ttgir"] and "wgmma.mma_async" in ptx
    assert stack_bytes(kernel, tmp_path) == 0 and kernel.metadata.shared <= SHARED["sm_90"]


def test_a_result_of_16_bits_has_the_stages_with_which_its_loop_spills_little(tmp_path):
    kernel = built_grouped("sm_90", 128, True, True, experts_fp8=128, pairs=32768, wide=True)
    assert stack_bytes(kernel, tmp_path) <= 16 and kernel.metadata.shared <= SHARED["sm_90"]


def test_rows_of_tables_whose_tiles_would_cut_a_scale_do_not_decide_where_results_are_in_fp8(monkeypatch):
    for name, kind, W in (("grouped_matmul_silu_mul", "tiles", 1), ("all_gather_grouped_matmul_silu_mul", "fused", 2)):
        op, here = find_op(name), machine(H200, W)
        call, tiles = op.call_of((4096, 8, 128, 768, 2048), BF16, here, block_fp8=True), GroupedTiles(block_n=128)
        held = () if W == 1 else (call.held,)
        gemm = call if W == 1 else call.gemm(here)
        row = SimpleNamespace(design=kind, shape=(gemm.pairs, gemm.block, *held, 768, 2048))
        monkeypatch.setattr(op, "row_for", lambda *_, row=row: SimpleNamespace(row=row, reason=""))
        design = tiles if W == 1 else op.designs[kind](tiles=tiles)
        monkeypatch.setattr(op, "from_row", lambda *_, design=design: design)
        assert op.tuned(call, here).row is row and op.tuned(call._replace(written=True), here) is None
