"""AG-MoE and MoE-RS: the same bits from every design, gradients, planted bugs, refused arguments, compiled kernels."""

import functools
from dataclasses import replace

import pytest
import torch
import triton.language as tl

import weft
import weft.check
from tests.check.calls import experts_gathered, experts_scattered
from tests.compiling import SHARED, TARGETS, a_view, compiled, stack_bytes
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import mutated
from tests.ops.moe.test_moe_exchange import calls_of
from tests.ops.moe.test_moe_ops import by_torch
from tests.ops.test_compile_layer_kernels import caps_of, check_compiles
from weft import ops
from weft.kernels import fp8
from weft.ops.gemm.gemm_op import FOUR_BIT
from weft.ops.moe import all_gather_grouped_matmul_silu_mul as ag_moe
from weft.ops.moe import by_nodes, overlapped
from weft.ops.moe import grouped_matmul_reduce_scatter as moe_rs
from weft.ops.moe.exchange.exchange_op import PushRows
from weft.ops.moe.grouped import gemms as grouped
from weft.ops.moe.grouped import kernel as grouped_kernel
from weft.ops.moe.grouped.cases import quantized_experts
from weft.ops.moe.grouped.gemms import GroupedArguments, GroupedCall, GroupedTiles, weight_descriptor
from weft.ops.moe.grouped.kernel import Arriving, Form, grouped_matmul_kernel
from weft.ops.moe.grouped.rule import grouped_tiles_for
from weft.ops.moe.moe_combine import MOE_COMBINE
from weft.ops.moe.overlapped import ScatterArguments
from weft.ops.moe.routing import Experts, Routing, Schedule
from weft.plan.planned import Planned, machine_of
from weft.runtime.capabilities import launch_options
from weft.runtime.team.channel import ChannelView

EXPERTS, K, HIDDEN, FEATURES, MOST = 12, 3, 24, 48, 9
LAYOUTS = ("whole", "slices", (2, 2))


def share(team, layout, gate_up, down):
    """(this rank's experts, their weights) of whole weights."""
    ep, tp = {"whole": (team.size, 1), "slices": (1, team.size)}.get(layout, layout)
    experts = Experts.whole(EXPERTS, team.rank // tp, ep)
    mine, features = slice(experts.first, experts.first + experts.count), FEATURES // tp
    part = slice(team.rank % tp * features, (team.rank % tp + 1) * features)
    gate, up = gate_up[mine].chunk(2, dim=1)
    return experts, torch.cat((gate[:, part], up[:, part]), dim=1), down[mine][:, :, part].contiguous()


def whole(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (EXPERTS, HIDDEN), (EXPERTS, 2 * FEATURES, HIDDEN), (EXPERTS, HIDDEN, FEATURES)
    return [(torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype) for shape in shapes]


def tokens_of(rank, call, dtype):
    """Another number of tokens at every rank and call, often none."""
    count = (0, 9, 7, 5, 1, 0, 8)[(2 * rank + call) % 7]
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 * rank + call)).to(dtype)


def layer(team, x, weights, layout, first="auto", second="auto"):
    router, gate_up, down = weights
    experts, gate_up, down = share(team, layout, gate_up, down)
    routing = ops.route(x @ router.T, K)
    h, schedule, found = ops.all_gather_grouped_matmul_silu_mul(
        x, routing, gate_up, experts, team, max_tokens=MOST, algorithm=first
    )
    return ops.grouped_matmul_reduce_scatter(h, down, schedule, found, len(x), team, algorithm=second)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "slices"),
        pytest.param(4, (2, 2), marks=pytest.mark.sweep),
        *(pytest.param(w, layout, marks=pytest.mark.sweep) for w in (1, 2, 3) for layout in ("whole", "slices")),
    ],
)
def test_a_layer_over_ranks_is_the_whole_one_in_every_call(world_size, layout):
    weights = whole(torch.float32)

    def main(team):
        inputs = [tokens_of(team.rank, call, torch.float32) for call in range(3)]
        return [layer(team, x, weights, layout) for x in inputs]

    for rank, results in enumerate(weft.simulate(main, world_size, seed=world_size, slow={0: 20})):
        for call, found in enumerate(results):
            x = tokens_of(rank, call, torch.float64)
            expected = by_torch(x, *(w.double() for w in weights), K)
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("world_size", "layout"), [(3, "whole"), *(pytest.param(2, one, marks=pytest.mark.sweep) for one in LAYOUTS[:2])]
)
def test_every_design_gives_the_same_bits(world_size, layout):
    """Also those of moe_combine's "push", which adds up the ranks in their order."""
    weights = whole(torch.bfloat16)
    small = GroupedTiles(block_n=16, block_k=16, num_warps=4)

    def main(team):
        x = tokens_of(team.rank, 1, torch.bfloat16)
        experts, gate_up, down = share(team, layout, *weights[1:])
        routing, given = ops.route(x @ weights[0].T, K), {"max_tokens": MOST}
        found = []
        for algorithm in ("sequential", "fused"):
            h, schedule, gathered = ops.all_gather_grouped_matmul_silu_mul(
                x, routing, gate_up, experts, team, **given, algorithm=algorithm
            )
            found.append((h[: int(schedule.counts.sum())].clone(), schedule.counts, *gathered.routing))
        here, shape = machine_of(team), (MOST, K, EXPERTS, HIDDEN, FEATURES)
        call = moe_rs.MOE_RS.call_of(shape, x.dtype, here)._replace(held=experts.count)
        sequential = moe_rs.MOE_RS.default("sequential", call, here)
        if layout == "whole":
            push = Planned("push", MOE_COMBINE.designs["push"](), "")
            sequential = replace(sequential, combine=push)
        mine = experts.total, experts.first, experts.count
        gemm = GroupedArguments(h, down, schedule, False, None)
        given = ScatterArguments(gemm, gathered.routing, *mine, len(x), team.name, "auto")
        designs = sequential, moe_rs.Slabs(tiles=small, slabs=2), moe_rs.Slabs(tiles=small, slabs=1)
        return found, [moe_rs.MOE_RS.run(design, team, given) for design in designs]

    for found, sums in weft.simulate(main, world_size):
        for one, other in zip(*found, strict=True):
            assert_identical(other, one)
        for other in sums[1:]:
            assert_identical(other, sums[0])


@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, "slices"), *(pytest.param(w, "whole", marks=pytest.mark.sweep) for w in (2, 3))]
)
def test_rows_in_fp8_have_the_bits_of_the_ops_one_by_one(world_size, layout):
    """Those of torch's bytes and scales, of rows that are multiplied by their scales as they are loaded."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn((EXPERTS, 2 * FEATURES, 144), generator=generator).bfloat16() / 12

    def main(team):
        x = torch.randn((7 - 3 * team.rank, 144), generator=torch.Generator().manual_seed(team.rank)).bfloat16()
        experts, mine, _ = share(team, layout, gate_up, gate_up)
        ids = x[:, :EXPERTS].topk(K).indices.int()
        routing, given = Routing(ids, x[:, :K]), {"max_tokens": MOST, "dtype": torch.float8_e4m3fn}
        found = []
        for algorithm in ("sequential", "fused"):
            h, schedule, gathered = ops.all_gather_grouped_matmul_silu_mul(
                x, routing, mine, experts, team, **given, algorithm=algorithm
            )
            found.append((h[: int(schedule.counts.sum())].clone(), schedule.counts, *gathered.routing))
        rows = ops.all_gather(torch.nn.functional.pad(x, (0, 0, 0, MOST - len(x))), team)
        rounded = fp8.read_back(*fp8.by_torch(rows), x.dtype)
        by_hand = ops.grouped_matmul_silu_mul(rounded, mine, schedule)
        return found, by_hand[: len(found[0][0])].clone()

    for found, by_hand in weft.simulate(main, world_size):
        for one, other in zip(*found, strict=True):
            assert_identical(other, one)
        assert_identical(found[0][0], by_hand)


@pytest.mark.parametrize("head", [4, 64])
def test_tiles_of_this_rank_s_rows_come_first(head):
    """In the head alone: in both of its parts, and behind it, tiles keep their order."""

    def main(team):
        ids = torch.randint(0, 4, (2 * 80, 1), generator=torch.Generator().manual_seed(0)).int()
        schedule = ops.moe_schedule(ids, Experts.slices(4), block=16, start=80 * team.rank)
        found, count = overlapped.order_tiles(team, schedule, 80, head), int(schedule.tile_count)
        tiles, pairs = schedule.tiles[:count].tolist(), schedule.pairs.view(-1)
        late = [int(pairs[first + rows - 1]) // 80 != team.rank for _, first, _, rows in tiles]
        order = sorted(range(count), key=lambda tile: (tile, 0) if tile >= head else (-1, late[tile]))
        assert found.tiles[:count].tolist() == [tiles[tile] for tile in order]
        assert 0 < sum(late[:head]) < min(head, count)

    weft.simulate(main, 2)


@pytest.mark.parametrize("layout", [pytest.param("whole", marks=pytest.mark.sweep), "slices"])
def test_gradients_are_torch_s(layout):
    """Those of the rows, the router and both weights, of ranks with different numbers of tokens."""
    weights = whole(torch.float64)
    grads = [torch.randn(len(tokens_of(r, 1, torch.float32)), HIDDEN, dtype=torch.float64) for r in range(2)]

    def main(team):
        x = tokens_of(team.rank, 1, torch.float32).requires_grad_()
        given = [w.float().requires_grad_() for w in weights]
        layer(team, x, given, layout).backward(grads[team.rank].float())
        return [tensor.grad for tensor in (x, *given)]

    results = weft.simulate(main, 2)
    inputs = [tokens_of(rank, 1, torch.float64).requires_grad_() for rank in range(2)]
    wanted = [w.clone().requires_grad_() for w in weights]
    torch.autograd.backward([by_torch(x, *wanted, K) for x in inputs], grads)
    for rank, (of_x, *_) in enumerate(results):
        torch.testing.assert_close(of_x.double(), inputs[rank].grad, rtol=1e-4, atol=1e-4)
    for number, tensor in enumerate(wanted):
        total = sum(result[1 + number] for result in results)
        torch.testing.assert_close(total.double(), tensor.grad, rtol=1e-4, atol=1e-4)


# --- planted bugs -------------------------------------------------------------------------------------------------------

FORK = "        team.copy_engine.fork()\n        part ="
SEND = "            channel.send(team, target, source, team.rank, number, peer)\n"
SCALES = """            if scales is not None and len(source) > 0:
                team.copy_engine.put(*part(number, *scales), peer)
"""
# Source that changes, what to, the function that a mutant replaces in which module, the finding.
BUGS = {
    "the last rank of a tile not awaited": (
        grouped_kernel, "tl.maximum(begin, 1), end + 1)", "tl.maximum(begin, 1), end)", "grouped_matmul_kernel", grouped,
        "race"),
    "the chunk before awaited": (
        grouped_kernel, "row // arriving.chunk, team)", "0, team)", "grouped_matmul_kernel", grouped, "race"),
    "a rank without rows sends no flags": (
        overlapped, SEND, SEND.replace("channel", "len(source) and channel"), "send_rows", overlapped, "deadlock"),
    "scales behind the flag of their rows": (overlapped, SCALES + SEND, SEND + SCALES, "send_rows", overlapped, "race"),
    "scales behind the flag of their rows, of experts in fp8": (
        overlapped, SCALES + SEND, SEND + SCALES, "send_rows", overlapped, "race"),
    "rows of experts in fp8 not awaited": (
        grouped_kernel, "tl.maximum(begin, 1), end + 1)", "tl.maximum(begin, 1), end)", "grouped_matmul_kernel", grouped,
        "race"),
    "a slab sent before its sums": (
        moe_rs, FORK, FORK.replace("team.copy_engine.fork()", "number or team.copy_engine.fork()"), "run_slabs", moe_rs,
        "race"),
    "a slab not awaited": (
        moe_rs, "wl.chunk_wait(call, (me + step) % world, slab, team)", "wl.chunk_wait(call, (me + step) % world, 0, team)",
        "sum_slabs_kernel", moe_rs, "race"),
}  # fmt: skip


@pytest.mark.sweep  # the zoo plants two of them in kernels of its own
@pytest.mark.parametrize("name", BUGS)
def test_the_check_finds_a_planted_bug(name, tmp_path, monkeypatch):
    source, old, new, changed, module, kind = BUGS[name]
    mutant = mutated(source, old, new, f"overlap_mutant_{len(name)}", tmp_path)
    monkeypatch.setattr(module, changed, getattr(mutant, changed))
    in_fp8 = functools.partial(experts_gathered, width=144, fp8=True, in_fp8="experts" in name)
    run = experts_scattered if source is moe_rs else in_fp8 if "scales" in name or "fp8" in name else experts_gathered
    report = weft.check.check(calls_of(run), 3 if kind == "deadlock" else 2, schedules=6)
    kinds = {found.finding.kind for found in report.wrong}
    assert kinds and all(kind in found for found in kinds), report


# --- refused arguments --------------------------------------------------------------------------------------------------

X, IDS = torch.zeros(3, 8), torch.zeros(3, 2).int()
EXPERTS_FP8 = fp8.Fp8(torch.zeros(4, 6, 16).to(fp8.E4M3), torch.ones(4, 6, 1))
HALF = {"x": torch.zeros(3, 16).bfloat16(), "weights": torch.zeros(3, 2).bfloat16()}
SCHEDULE = Schedule(*(torch.zeros(shape, dtype=torch.int32) for shape in ((4, 8), (4,), (9, 4), (1,))), 2, 16)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("x has shape (3, 8); it must be (2, K)", {"ids": IDS[:2]}),
        ("weights.dtype=torch.float16 is not one of float32", {"weights": torch.zeros(3, 2).half()}),
        ("experts=8 is not an Experts", {"experts": 8}),
        ("experts=Experts(total=8, first=0, count=3) is no equal share", {"experts": Experts(8, 0, 3)}),
        ("gate_up has shape (3, 6, 8); it must be (4, 2 N, 8)", {"gate_up": torch.zeros(3, 6, 8)}),
        ("gate_up has shape (4, 5, 8); pass gate's N rows, then up's N", {"gate_up": torch.zeros(4, 5, 8)}),
        ("K=6 of torch.float32 is 24 bytes, no multiple of 16", {"x": X[:, :6], "gate_up": torch.zeros(4, 6, 6)}),
        ("max_tokens=2 is not an integer of at least 3", {"max_tokens": 2}),
        ("dtype=torch.float16 is not None or torch.float8_e4m3fn", {"dtype": torch.float16}),
        ("K=8 of torch.float8_e4m3fn is 8 bytes, no multiple of 16", {"dtype": torch.float8_e4m3fn}),
        ("algorithm='slabs' is not one of 'auto', 'fused', 'sequential'", {"algorithm": "slabs"}),
        ("x.dtype=torch.float32 is not one of float16, bfloat16", {"gate_up": EXPERTS_FP8}),
        (
            "gate_up.scales has shape (4, 6); it must be (4, n, k)",
            {"gate_up": EXPERTS_FP8._replace(scales=torch.ones(4, 6)), **HALF},
        ),
        (
            "dtype=torch.float8_e4m3fn has scales of 128 columns, and gate_up asks for other ones",
            {"gate_up": EXPERTS_FP8, "dtype": torch.float8_e4m3fn, **HALF},
        ),
        (
            "fp8=RowFormat(kind='group', static_scale=None, beside=False) is for fp8 weights and rows",
            {"fp8": fp8.RowFormat("group")},
        ),
    ],
)
def test_wrong_arguments_of_ag_moe_are_refused(message, fields):
    def main(team):
        ids = fields.get("ids", IDS)
        given = {
            "x": X,
            "routing": Routing(ids, fields.get("weights", torch.zeros(ids.shape))),
            "gate_up": torch.zeros(4, 6, 8),
            "experts": Experts.whole(8, team.rank, 2),
            "team": team,
            "max_tokens": 4,
        }
        with pytest.raises(ValueError) as refused:
            ops.all_gather_grouped_matmul_silu_mul(
                **given | {name: x for name, x in fields.items() if name not in ("ids", "weights")}
            )
        assert f"all_gather_grouped_matmul_silu_mul: {message}" in str(refused.value)
        assert "\n" not in str(refused.value)

    weft.simulate(main, 2)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("x has 15 rows; with gather=False a schedule of 8 tokens", {"h": torch.zeros(15, 8)}),
        ("dispatched=None is not a Dispatched", {"dispatched": None}),
        ("ids has shape (6, 2); it must be (8, 2)", {"tokens_of_all": 6}),
        ("schedule of 4 experts; it must be of the 8 experts of dispatched", {"experts": Experts.slices(8)}),
        ("experts=Experts(total=8, first=0, count=2) is no equal share", {"experts": Experts(8, 0, 2)}),
        ("down is in 4 bits, of which no slab is cut", {"down": FOUR_BIT["int4"](torch.zeros(4, 6, 8).bfloat16())}),
        ("tokens=5 is not an integer in 0 .. 4", {"tokens": 5}),
        ("algorithm='push' is not one of 'auto', 'slabs', 'sequential'", {"algorithm": "push"}),
    ],
)
def test_wrong_arguments_of_moe_rs_are_refused(message, fields):
    def main(team):
        rows = fields.get("tokens_of_all", 8)
        routing = Routing(torch.zeros(rows, 2).int(), torch.zeros(rows, 2))
        given = {
            "h": torch.zeros(16, 8),
            "down": torch.zeros(4, 6, 8),
            "schedule": SCHEDULE,
            "dispatched": ops.Dispatched(X, routing, fields.get("experts", Experts.whole(8, team.rank, 2))),
            "tokens": 4,
            "team": team,
        }
        changed = {name: x for name, x in fields.items() if name not in ("tokens_of_all", "experts")}
        with pytest.raises(ValueError) as refused:
            ops.grouped_matmul_reduce_scatter(**given | changed)
        assert f"grouped_matmul_reduce_scatter: {message}" in str(refused.value)
        assert "\n" not in str(refused.value)

    weft.simulate(main, 2)


@pytest.mark.parametrize(("scheme", "dtype"), [("block", torch.bfloat16), ("channel", torch.float16)])
def test_what_is_traced_of_fp16_rows_has_the_dtype_of_what_is_computed(scheme, dtype, monkeypatch):
    """Rows that are sent in fp8 give h in bf16, others in their own dtype, which is that of biases too."""
    op, asked = ag_moe.AG_MOE, []
    monkeypatch.setattr(op, "dispatch", lambda given: asked.append(given) or op.forward(given))

    def main(team):
        weight = quantized_experts(torch.ones(2, 32, 256), scheme)
        routing = Routing(torch.arange(2).int().repeat(3, 1), torch.ones(3, 2).half())
        given = torch.ones(3, 256).half(), routing, weight, Experts.whole(4, team.rank, 2), team
        bias = torch.ones(2, 32, dtype=dtype)
        h, *_ = ops.all_gather_grouped_matmul_silu_mul(*given, max_tokens=3, bias=bias)
        traced, *_ = op.fake(asked[0])
        return (traced.shape, traced.dtype) == (h.shape, h.dtype) and h.dtype == dtype

    assert all(weft.simulate(main, 2))


def test_is_traced_by_torch_compile_before_any_call_has_made_a_plan():
    """A machine's heap, the logger of plans and their memory cannot be traced."""

    def main(team):
        def layer(x, ids, weights, gate_up):
            given = x, Routing(ids, weights), gate_up, Experts.slices(8), team
            return ops.all_gather_grouped_matmul_silu_mul(*given, max_tokens=1)[0]

        given = X[:1], IDS[:1, :1], torch.ones(1, 1), torch.ones(8, 2, 8)
        return torch.compile(layer, fullgraph=True, backend="eager")(*given).shape

    assert weft.simulate(main, 1) == [(1, 1)]
    torch._dynamo.reset()


def test_wrong_designs_are_refused():
    tiles = GroupedTiles()
    for make, message in (
        (lambda: ag_moe.Fused(tiles=tiles, chunks=9), "chunks=9 is not in 1 .. 8"),
        (lambda: ag_moe.Fused(tiles=tiles, head=3), "head=3 is neither 0 nor a power of two"),
        (lambda: moe_rs.Slabs(tiles=tiles, slabs=0), "slabs=0 is not in 1 .. 8"),
        (lambda: moe_rs.MOE_RS.check_design(PushRows()), "design=PushRows.* is not one of slabs, sequential"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


# --- compiled -----------------------------------------------------------------------------------------------------------

INTS, FLOATS = torch.zeros(16, dtype=torch.int32), torch.zeros(64, 2048, dtype=torch.bfloat16)
LANDED = ChannelView(INTS, INTS, tl.constexpr(8))
ARCHS = ["sm_90", *(pytest.param(arch, marks=pytest.mark.sweep) for arch in TARGETS if arch != "sm_90")]


@pytest.mark.triton_internals
@pytest.mark.parametrize(
    ("block", "fp8"),
    [(128, False), *(pytest.param(*one, marks=pytest.mark.sweep) for one in ((16, False), (128, True)))],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_grouped_gemm_that_waits_compiles(arch, block, fp8, tmp_path):
    if fp8 and arch == "sm_80":
        pytest.skip("sm_80 has no conversion from e4m3")
    (N, width, experts), caps = (768, 2048, 8), caps_of(arch)
    design = grouped_tiles_for(GroupedCall(block, 4096, N, width, torch.bfloat16, True), caps, gated=True)
    form = Form(True, 8, block, True, False, False, design.transposed, not (fp8 or arch.startswith("gfx")))
    weight = weight_descriptor(design, torch.zeros(experts, 2 * N, width, dtype=torch.bfloat16), form)
    schedule = Schedule(INTS, INTS, INTS, INTS, 8, block)
    x, scales = (FLOATS.to(torch.float8_e4m3fn), torch.zeros(64 * 16)) if fp8 else (FLOATS, None)
    arriving, end = Arriving(x, 2048, 512), (N, width, 4, LANDED, a_view(), 0)
    arguments = x, scales, None, None, arriving, weight, None, FLOATS, None, schedule, *end
    kernel = compiled(
        grouped_matmul_kernel,
        *arguments,
        arch=arch,
        FORM=form,
        BLOCK_N=design.block_n,
        BLOCK_K=design.block_k,
        TRANSPOSED=design.transposed,
        num_warps=design.num_warps,
        num_stages=design.num_stages,
        **launch_options(caps),
    )
    check_compiles(kernel, arch)
    assert kernel.metadata.shared <= SHARED[arch]
    if fp8 and arch == "sm_90":
        assert "wgmma.mma_async" in kernel.asm["ptx"] and stack_bytes(kernel, tmp_path) == 0
    elif arch == "sm_90":
        # Rows of both bases by 16-byte copies, and nothing back from shared memory.
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"] and "wgmma.mma_async" in kernel.asm["ptx"]
        assert "ttg.local_load" not in kernel.asm["ttgir"]
        assert stack_bytes(kernel, tmp_path) == 0


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", ARCHS)
def test_the_order_of_tiles_and_the_sum_of_slabs_compile(arch, tmp_path):
    schedule, options = Schedule(INTS, INTS, INTS, INTS, 8, 128), launch_options(caps_of(arch))
    constants = {"CHOICES": 8, "HEAD": overlapped.MAX_HEAD}
    kernel = compiled(overlapped.order_tiles_kernel, INTS, schedule, 2048, 1, arch=arch, **constants, **options)
    check_compiles(kernel, arch)
    assert arch != "sm_90" or stack_bytes(kernel, tmp_path) == 0
    constants = {"NODES": 2, "SIZE": 8, "CHOICES": 8, "ARRIVING": True}
    arguments = INTS, INTS, 512, schedule, 2048, 1
    kernel = compiled(by_nodes.group_tiles_kernel, *arguments, arch=arch, **constants, **options)
    check_compiles(kernel, arch)
    assert arch != "sm_90" or stack_bytes(kernel, tmp_path) == 0
    arguments = FLOATS, FLOATS, FLOATS, LANDED, 100, 128, 2048, 512, a_view()
    options = {"ROWS": moe_rs.ROWS, "BLOCK": moe_rs.BLOCK, "num_warps": moe_rs.WARPS}
    kernel = compiled(moe_rs.sum_slabs_kernel, *arguments, arch=arch, **options, **launch_options(caps_of(arch)))
    check_compiles(kernel, arch)
    assert arch != "sm_90" or stack_bytes(kernel, tmp_path) == 0
