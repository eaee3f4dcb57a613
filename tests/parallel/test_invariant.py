"""The invariant recipe: bits of a row on 1, 2, 4 and 8 virtual ranks, among any other rows; and violations, which show."""

import zlib

import pytest
import torch

import weft
from tests.ops.checking import assert_identical
from tests.ops.gemm.test_sliced import noisy, operands
from weft import ops
from weft.kernels import slices
from weft.kernels.fp8 import Fp8, quantized_weight
from weft.layers import TPMLP, MoE
from weft.ops.collectives import tree
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.collectives.collective import OneShot, TwoShot
from weft.ops.overlap import sliced_reduce
from weft.parallel import invariant_local
from weft.parallel.step_plan import plan_layer, plan_step
from weft.plan.planned import Planned
from weft.transport.plans import PushPlan

WORLD_SIZES = (1, 2, 4, 8)
K = 2048
ROWS, WEIGHT = noisy(130, 48, K, 8)


def part(x, team):
    """This rank's columns."""
    return x.chunk(team.size, 1)[team.rank].contiguous()


def reduced(team, M):
    return ops.matmul_all_reduce(part(ROWS[:M], team), part(WEIGHT, team), team, invariant=True)


def on_ranks(main, world_size, *args, seed=0):
    """The result of ``main``, the same on all ranks."""
    results = weft.simulate(main, world_size, args=args, seed=seed)
    for one in results[1:]:
        assert_identical(one, results[0])
    return results[0]


@pytest.fixture(scope="module")
def whole():
    return on_ranks(reduced, 1, len(ROWS))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_row_parallel_gemm_has_the_same_bits_on_any_number_of_ranks_and_rows(world_size, whole):
    for seed, M in enumerate((1, 17, 130) if world_size < 8 else (3,)):
        assert_identical(on_ranks(reduced, world_size, M, seed=seed), whole[:M], what=f"M={M}")


def hops(design, **push):
    return tree.Tree(hops=Planned("hops", design(push=PushPlan(transport="lamport", **push)), "asked for"))


@pytest.mark.parametrize("world_size", (2, 4, 8))
def test_one_hop_and_two_add_the_same_tree(world_size):
    x = torch.randn((8, 3000), generator=torch.Generator().manual_seed(0)).bfloat16()

    def main(team, design):
        count = 8 // team.size
        nodes = x[team.rank * count : (team.rank + 1) * count].contiguous()
        return ALL_REDUCE.run_of_nodes(design, team, nodes, x.dtype)

    expected = on_ranks(main, 1, tree.Tree())
    level = x.float()
    while len(level) > 1:
        level = (level[::2] + level[1::2]).bfloat16().float()
    assert_identical(expected, level[0].bfloat16())
    for design in (OneShot, TwoShot):
        plan = hops(design, row_bytes=512, num_warps=1)
        assert_identical(on_ranks(main, world_size, plan), expected, what=design.__name__)


def test_a_sum_carries_no_negative_zero_at_any_world_size():
    x = torch.full((5,), -0.0).bfloat16()
    for world_size in WORLD_SIZES:
        total = on_ranks(lambda team: ops.all_reduce(x, team, invariant=True), world_size)
        assert not total.signbit().any()


def planted(monkeypatch, kind):
    """Break the tree in one way."""
    run, nodes_added = sliced_reduce.sliced.run, type(ALL_REDUCE).run_of_nodes

    def other_step(design, x, *given, step, **more):
        return run(design, x, *given, step=16 if len(x) < 16 else step, **more)

    def unrounded_on_one_rank(design, x, weight, count, *, rounded, **more):
        return run(design, x, weight, count, rounded=count < 8, **more)

    def rolled(self, design, team, nodes, *more):
        return nodes_added(self, design, team, nodes.roll(1, 0) if team.size == 1 else nodes, *more)

    if kind == "K order by W":  # four longer slices
        monkeypatch.setattr(sliced_reduce, "SLICES", 4)
    elif kind == "K order by M":
        monkeypatch.setattr(sliced_reduce.sliced, "run", other_step)
    elif kind == "rank order":
        monkeypatch.setattr(type(ALL_REDUCE), "run_of_nodes", rolled)
    else:
        assert kind == "a leaf that is not rounded"
        monkeypatch.setattr(sliced_reduce.sliced, "run", unrounded_on_one_rank)


@pytest.mark.parametrize("kind", ("K order by W", "K order by M", "rank order", "a leaf that is not rounded"))
def test_a_planted_violation_shows(kind, monkeypatch, whole):
    x, w = operands(9, 48, K) if "leaf" in kind or "rank" in kind else (ROWS[:9], WEIGHT)

    def main(team):
        return ops.matmul_all_reduce(part(x, team), part(w, team), team, invariant=True)

    right = on_ranks(main, 2)
    planted(monkeypatch, kind)
    assert not torch.equal(on_ranks(main, 1 if kind != "K order by M" else 2), right)


def fp8_sums(team, M):
    """(sum over ranks of a row-parallel GEMM, this rank's columns of a column-parallel one) of blocks of 128 x 128."""
    x, w = operands(40, 256, 1024)
    data, scales, _ = quantized_weight(w, "block")
    blocks, columns = scales.chunk(team.size, 1)[team.rank], part(data.view(torch.uint8), team).view(data.dtype)
    summed = ops.matmul_all_reduce(part(x[:M], team), Fp8(columns, blocks.contiguous()), team, invariant=True)
    rows = 256 // team.size
    finer = scales.repeat_interleave(128 // min(128, rows), 0)
    own = Fp8(data[rows * team.rank : rows * (team.rank + 1)], finer.chunk(team.size, 0)[team.rank].contiguous())
    return summed, ops.matmul(x[:M], own, invariant=True)


def test_gemms_in_fp8_blocks_have_the_same_bits_on_any_number_of_ranks_and_rows():
    whole = weft.simulate(fp8_sums, 1, args=(40,))[0]
    for world_size, M in ((2, 9), (4, 40), (4, 1)):
        results = weft.simulate(fp8_sums, world_size, args=(M,))
        for summed, _ in results:
            assert_identical(summed, whole[0][:M], what=f"W={world_size} M={M}")
        assert_identical(torch.cat([own for _, own in results], 1), whole[1][:M], what=f"W={world_size} M={M}")


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_an_mlp_has_the_same_bits_on_any_number_of_ranks_and_rows(activation):
    hidden, features = 128, 256
    full = {f"{name}.weight": operands(1, features, hidden)[1] for name in ("gate_proj", "up_proj")}
    full["down_proj.weight"] = operands(1, hidden, features)[1]
    x = operands(40, 1, hidden)[0]

    def main(team, M):
        options = {"team": team, "mode": "invariant", "dtype": torch.bfloat16, "activation": activation}
        mlp = TPMLP(hidden_size=hidden, intermediate_size=features, **options)
        for name, shard in mlp.shards().items():
            shard.target.copy_(full[name].narrow(shard.dim, shard.start, shard.target.shape[shard.dim]))
        return mlp(x[:M])

    expected = on_ranks(main, 1, 40)
    for world_size, M in ((2, 1), (4, 40), (8, 3)):
        assert_identical(on_ranks(main, world_size, M), expected[:M])


def experts(layout, shared=False):
    """Function of a team and a number of rows: what 16 experts make of that many rows of 40."""
    features = 96 if layout == "whole" else 256
    sizes = {"hidden_size": 128, "intermediate_size": features, "num_experts": 16, "num_experts_per_tok": 4}
    sizes |= {"shared_intermediate_size": 256, "shared_gate": True} if shared else {}
    x = operands(40, 1, 128)[0]

    def main(team, M):
        moe = MoE(**sizes, layout=layout, team=team, mode="invariant", dtype=torch.bfloat16)
        for name, shard in moe.shards().items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(shard.shape, generator=generator) / 8
            size = shard.target.shape[shard.dim]
            shard.target.copy_(whole.narrow(shard.dim, shard.start, size))
        return moe(x[:M])

    return main


@pytest.mark.parametrize(("layout", "shared"), (("whole", False), ("whole", True), ("slices", False)))
def test_experts_have_the_same_bits_on_any_number_of_ranks_and_rows(layout, shared):
    main = experts(layout, shared)
    expected = on_ranks(main, 1, 40)
    for world_size, M in ((2, 1), (4, 40), (8, 3)):
        assert_identical(on_ranks(main, world_size, M), expected[:M], what=f"W={world_size} M={M}")


@pytest.mark.parametrize("layout", ("whole", "slices"))
def test_sums_of_experts_in_an_order_of_the_ranks_are_seen(layout, monkeypatch):
    main, added = experts(layout), invariant_local.moe_nodes
    expected = on_ranks(main, 2, 9)
    monkeypatch.setattr(invariant_local, "moe_nodes", lambda *given, **more: added(*given, **more).roll(1, 0))
    assert not torch.equal(on_ranks(main, 1, 9), expected)


def test_experts_refuse_gradients_and_numbers_that_eight_does_not_divide():
    def main(team):
        sizes = {"hidden_size": 128, "intermediate_size": 96, "num_experts_per_tok": 2, "dtype": torch.bfloat16}
        x = operands(3, 1, 128)[0]
        moe = MoE(**sizes, num_experts=12, team=team, mode="invariant")
        with pytest.raises(
            ValueError, match="6 of 12 experts on each of 2 ranks; use expert_layout='whole'.*8 divides"
        ):
            moe(x)
        moe = MoE(**sizes, num_experts=16, layout="slices", team=team, mode="invariant").requires_grad_()
        with pytest.raises(RuntimeError, match="mode='invariant' has no gradients of experts"):
            moe(x)
        with torch.no_grad(), pytest.raises(ValueError, match="K=96 is not divisible by 128"):
            moe(x)

    weft.simulate(main, 2)


def chunks_of(before, length, device):
    return ops.SequenceChunks.make([(before, length)], [0]).to(torch.device(device))


def row_ops(device):
    """Name of an op whose kernel computes a row alike among any rows -> its result for the first M of up to 600 rows."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    x, residual, weight, gate_up, ids = draw(600, 640), draw(600, 640), draw(640), draw(600, 1200), torch.arange(600)
    qkv, angles, heads = draw(600, 6 * 32), draw(600, 32).float(), draw(32)
    ids, taps, parts = ids.to(device), draw(192, 4), draw(3, 600, 2, 48)

    def rotated(M):
        keys = torch.zeros((40, 1, 16, 32), dtype=torch.bfloat16, device=device)
        q = ops.qk_norm_rope(qkv[:M], heads, heads, 1e-6, angles, ids[:M], ids[:M], keys, torch.zeros_like(keys))
        return q, keys.transpose(1, 2).reshape(640, 32)[:M]

    def latents(M):
        cache = torch.zeros((40, 16, 48), dtype=torch.bfloat16, device=device)
        q, kv = qkv[:M, :64].view(M, 4, 16), qkv[:M, :48]
        rows = ops.mla_norm_rope(q, kv, heads, 1e-6, angles[:, :16].contiguous(), ids[:M], ids[:M], cache)
        return *rows, cache.view(640, 48)[:M]

    def convolved(M):
        """By two calls: the second one's first tokens read rows from the state that the first one has left."""
        state, cuts = torch.zeros((1, 3, 192), dtype=torch.bfloat16, device=device), (0, M // 3, M)
        spans = [(begin, end - begin) for begin, end in zip(cuts, cuts[1:], strict=False) if begin < end]
        outs = [
            ops.causal_conv1d(qkv[begin : begin + length], taps, state, chunks_of(begin, length, device))
            for begin, length in spans
        ]
        return (torch.cat(outs),)

    return {
        "add_rms_norm": lambda M: ops.add_rms_norm(x[:M], residual[:M], weight, 1e-6),
        "silu_mul": lambda M: (ops.silu_mul(gate_up[:M]),),
        "sigmoid_mul": lambda M: (ops.sigmoid_mul(x[: min(M, 130)], residual[: min(M, 130)]),),
        "rms_norm_gated": lambda M: (ops.rms_norm_gated(x[:M].view(M, 20, 32), residual[:M], heads, 1e-6),),
        "mla_norm_rope": lambda M: latents(min(M, 130)),
        "causal_conv1d": convolved,
        "merge_attention": lambda M: ops.merge_attention(parts[:, :M], parts[:, :M, :, 0].float()),
        "qk_norm_rope": rotated,
        "vocab_embedding": lambda M: (ops.vocab_embedding(ids[:M], x, 0),),
        "route": lambda M: tuple(ops.route(x[: min(M, 512), :128], 8)),
    }


def check_rows(device, sizes):
    for name, of_rows in row_ops(device).items():
        whole = of_rows(600)
        for M in sizes:
            for part, of_all in zip(of_rows(M), whole, strict=True):
                assert_identical(part[: len(of_all)], of_all[:M], what=f"{name} M={M}")


def test_ops_of_rows_compute_a_row_alike_among_any_rows():
    weft.simulate(lambda team: check_rows("cpu", (1, 33)), 1)
    for name in row_ops("cpu"):
        stated = ops.explain(name).bits
        if name in ("route", "merge_attention"):  # of up to 512 tokens, and of one number of parts
            assert stated.endswith("and on nothing else")
        else:
            assert stated.startswith("are invariant")


@pytest.mark.gpu(1)
def test_on_a_gpu_ops_of_rows_compute_a_row_alike_among_any_rows():
    check_rows("cuda", (1, 2, 7, 33, 128, 513))


def same_on_gpus(team):
    """Compare this team's sums with those of one rank, which holds all slices."""
    for K, N, sizes in ((2048, 520, (1, 2, 17, 64, 130)), (4096, 4096, (33, 2500))):
        x, w = (tensor.to(team.device) for tensor in noisy(max(sizes), N, K, 8))
        step = sliced_reduce.sliced.step_of("test", K, 8, 8)
        for M in sizes:
            design = sliced_reduce.sliced.default_sliced(M, N, 8, team.caps)
            nodes = sliced_reduce.sliced.run(design, x[:M], w, 8, rounded=True, step=step)
            alone = sliced_reduce.sliced.total(nodes, x.dtype, rounded=True)
            for _ in range(3):
                out = ops.matmul_all_reduce(part(x[:M], team), part(w, team), team, invariant=True)
                assert_identical(out, alone, what=f"K={K} M={M}")


@pytest.mark.gpu(2)
def test_two_gpus_give_the_bits_of_one():
    weft.launch(same_on_gpus, 2, "cuda")


def test_plans_say_that_they_are_invariant_and_refuse_what_is_not():
    def main(team):
        plan = plan_step(5000, mode="invariant", hidden_size=64, dtype=torch.bfloat16, team=team)
        assert plan.invariant and plan.fused and str(plan) == "invariant, invariant: asked for"
        with pytest.raises(ValueError, match="fused=False beside mode='invariant'"):
            plan_layer(1, mode="invariant", team=team, fused=False)

    weft.simulate(main, 2)
    with pytest.raises(ValueError, match="on 3 ranks.*1, 2, 4 or 8 ranks"):
        weft.simulate(lambda team: plan_layer(1, mode="invariant", team=team), 3)
    with pytest.raises(ValueError, match="matmul: bits of design 'cublas' depend on M, .* and the design; pass sliced"):
        ops.explain("matmul+invariant", M=4, N=64, K=64, world_size=1, algorithm="cublas")
    assert "bits  are invariant" in str(ops.explain("matmul_all_reduce+invariant", M=4, N=64, K=64, world_size=2))
    assert "bits  depend on M, a rank's N and K, and the" in str(ops.explain("matmul", M=4, N=64, K=64, world_size=1))
    assert slices.SLICES == 8
