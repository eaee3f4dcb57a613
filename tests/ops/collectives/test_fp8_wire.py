"""Rows of all-reduces that travel in fp8: cases, the stated bound on their error, refused arguments, planted bugs."""

from types import SimpleNamespace

import pytest
import torch

import weft
from tests.compiling import a_view, compiled, pairs_taken_apart
from tests.ops.checking import assert_identical, check_replicated, run_cases
from tests.ops.layer_cases import mutated
from tests.sampled import sampled
from weft import ops
from weft.errors import WeftError
from weft.ops.case import BF16, FP16
from weft.ops.collectives import fp8_kernels, fp8_wire
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.collectives.all_reduce_rms_norm import ALL_REDUCE_RMS_NORM
from weft.ops.collectives.cases import FEW_FP8, fp8_wire_cases, fp8_wire_norm_cases
from weft.ops.collectives.collective import OneShot, TwoShot
from weft.plan.planned import machine
from weft.runtime import capabilities
from weft.transport import fp8_push

CASES = [
    *fp8_wire_cases(ALL_REDUCE),
    *(case for deferred in ({}, {"deferred": True}) for case in fp8_wire_norm_cases(ALL_REDUCE_RMS_NORM, deferred)),
]
SHOTS = {"one_shot": OneShot(push=FEW_FP8), "two_shot": TwoShot(push=FEW_FP8)}


@pytest.mark.parametrize(
    ("world_size", "one_in"), sampled([(2, 1), (2, 3), (3, 1), (3, 2), (4, 1)], lambda world_size, one_in: one_in > 1)
)
def test_cases_on_slow_ranks(world_size, one_in):
    cases = [case for case in CASES if case.world_size == world_size][::one_in]
    slow = {world_size - 1: 20.0}
    check_replicated(weft.simulate(run_cases, world_size, seed=world_size, slow=slow, sms=8, args=(cases, 2)))


def rounding(x):
    """(bound on the error of each element of rows that are put in fp8 once, largest magnitudes), by the contract."""
    columns, rows = x.shape[-1], x.reshape(-1, x.shape[-1]).double()
    largest = torch.cat([group.abs().amax(1, keepdim=True).expand_as(group) for group in rows.split(128, 1)], 1)
    scale = torch.where(largest > 0, (largest / 448).clamp(min=2.0**-126), 0.0) * (1 + 2**-23)
    bound = torch.minimum(16 * scale, torch.maximum(rows.abs() / 16, scale / 1024)) + 2**-22 * rows.abs()
    assert (bound <= (largest / 28).clamp(min=448 * 2.0**-126 / 16) * (1 + 2**-17)).all()
    return bound.view(-1, columns), largest.view(-1, columns)


def hard_rows(dtype, generator):
    """Rows of 300 columns, whose last group is ragged: of what rounds worst."""
    normal = torch.randn(4, 300, generator=generator)
    powers = torch.randint(-20, 8, (4, 300), generator=generator).double().exp2()
    ties = (torch.randint(8, 16, (2, 300), generator=generator) + 0.5) * 2
    ties[:, ::128] = 448.0
    outlier = torch.randn(2, 300, generator=generator) * 1e-3
    outlier[:, 5] = 2e4
    small = torch.randn(2, 300, generator=generator) * torch.finfo(dtype).smallest_normal
    zeros = torch.zeros(2, 300)
    zeros[1, 299] = -torch.finfo(dtype).smallest_normal
    return torch.cat([normal, (normal * powers).float(), ties, outlier, small, zeros]).to(dtype)


@pytest.mark.parametrize("shot", SHOTS)
@pytest.mark.parametrize(("world_size", "dtype"), [(2, BF16), (3, FP16), (4, BF16)])
def test_the_stated_bound_on_the_error(world_size, dtype, shot):
    generator = torch.Generator().manual_seed(world_size)
    parts = [hard_rows(dtype, generator) for _ in range(world_size)]
    parts[1][:2] = -parts[0][:2]  # the sum is zero, but not that of what was rounded

    def main(team):
        return ops.all_reduce(parts[team.rank], team, shot, wire="fp8")

    results = weft.simulate(main, world_size)
    for other in results[1:]:
        assert_identical(other, results[0], what="the same bits on all ranks")
    exact = sum(part.double() for part in parts)
    bounds, largest = zip(*map(rounding, parts), strict=True)
    bound = sum(bounds) + (world_size - 1) * 2**-24 * sum(largest) * (1 + 1 / 28)
    if shot == "two_shot":
        reached = fp8_wire.sum_by_torch(parts, False)
        bound += rounding(reached)[0]
        assert (rounding(reached)[1] <= sum(largest) * (1 + 1 / 27)).all()
    half_ulp = torch.finfo(dtype).eps / 2 * (exact.abs() + bound) + torch.finfo(dtype).smallest_normal * 2**-8
    error = (results[0].double() - exact).abs()
    assert (error <= bound + half_ulp).all(), (error / (bound + half_ulp)).max()
    # The bound is no empty one: some element errs by a third of it.
    assert (error[:4] / bound[:4]).max() > 0.3


def test_values_that_are_not_finite_become_nan_and_spoil_no_other():
    def main(team):
        x = torch.ones(2, 256, dtype=BF16)
        x[0, 3], x[0, 200], x[1, 7] = torch.inf, torch.nan, -torch.inf if team.rank else 1.0
        return ops.all_reduce(x, team, wire="fp8")

    for out in weft.simulate(main, 2):
        assert out.isnan().nonzero().tolist() == [[0, 3], [0, 200], [1, 7]]
        assert (out[~out.isnan()] == 2).all()


def test_a_row_depends_on_no_other_row():
    """Its groups are its own, ragged or not."""

    def main(team):
        generator = torch.Generator().manual_seed(team.rank)
        results = []
        for columns in (128, 200, 300):
            x = torch.randn(6, columns, generator=generator).bfloat16()
            whole = ops.all_reduce(x, team, wire="fp8")
            results += [(whole[4:5], ops.all_reduce(x[4:5], team, wire="fp8"))]
        return results

    for results in weft.simulate(main, 3):
        for whole, alone in results:
            assert_identical(alone, whole.contiguous())


def test_one_rank_sends_and_rounds_nothing():
    x = torch.randn(3, 200)
    out = weft.simulate(lambda team: ops.all_reduce(x.bfloat16(), team, wire="fp8"), 1)[0]
    assert_identical(out, x.bfloat16())
    assert ops.explain("all-reduce+fp8_wire", (3, 200), BF16, 1).algorithm == "copy"


def test_explain_says_which_design_and_why():
    for shape, world_size, design in (((4096, 5120), 2, "one_shot"), ((4096, 5120), 8, "two_shot")):
        told = ops.explain("all-reduce+fp8_wire", shape, BF16, world_size)
        assert (told.algorithm, told.plan.push.transport) == (design, "fp8")
        assert told.reason.startswith("predicted µs in a row: ") and "all_reduce+fp8_wire" in str(told)
    designs = list(ALL_REDUCE.space(ALL_REDUCE.call_of(((4096, 5120),), BF16, team_of(2), fp8_wire=True), team_of(2)))
    assert {design.push.transport for design in designs} == {"fp8"} and len(designs) > 8


def team_of(world_size, nodes=1):
    return machine(capabilities.simulated(world_size), world_size, nodes=nodes)


@pytest.mark.parametrize(("world_size", "rows", "pays"), [(2, 512, False), (4, 1, False), (4, 512, True)])
def test_auto_takes_fp8_where_it_is_predicted_to_pay(world_size, rows, pays):
    here = team_of(world_size)
    norm = ALL_REDUCE_RMS_NORM.call_of(((rows, 5120),), BF16, here)
    alone = ALL_REDUCE.call_of(((rows, 5120),), BF16, here)
    for op, call in ((ALL_REDUCE, alone), (ALL_REDUCE_RMS_NORM, norm)):
        assert fp8_wire.asked(op, "same", call, here) == call
        assert fp8_wire.asked(op, "auto", call, here).fp8_wire == pays
        assert fp8_wire.asked(op, "fp8", call, here).fp8_wire
        assert not fp8_wire.asked(op, "auto", call, team_of(1)).fp8_wire


def normed(x, team, **options):
    return ops.all_reduce_rms_norm(x, x, x.new_ones(x.shape[-1]), 1e-6, team, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, team: ops.all_reduce(x.float(), team, wire="fp8"),
            "wire='fp8' rounds rows of 16 bits, not of float32",
        ),
        (lambda x, team: ops.all_reduce(x, team, wire="fp4"), "wire='fp4' is not one of 'same', 'fp8', 'auto'"),
        (
            lambda x, team: ops.all_reduce(x, team, "copy_engine", wire="fp8"),
            "algorithm='copy_engine' sends rows in x's",
        ),
        (lambda x, team: ops.all_reduce(x, team, invariant=True, wire="fp8"), "wire='fp8' with invariant=True"),
        (lambda x, team: normed(x, team, invariant=True, wire="fp8"), "wire='fp8' with invariant=True"),
        (lambda x, team: normed(x, team, wire="fp4"), "wire='fp4' is not one of 'same', 'fp8', 'auto'"),
        (lambda x, team: normed(x.float(), team, wire="fp8"), "wire='fp8' rounds rows of 16 bits, not of float32"),
    ],
)
def test_what_is_refused(call, message):
    def main(team):
        with pytest.raises(ValueError, match=message):
            call(torch.ones(2, 256, dtype=BF16), team)

    weft.simulate(main, 2)


def test_over_nodes_is_refused():
    with pytest.raises(ValueError, match="wire='fp8' is for one node, and the team has 2"):
        ALL_REDUCE.plan(ALL_REDUCE.call_of(((4, 256),), BF16, team_of(4, 2), fp8_wire=True), team_of(4, 2))


@pytest.mark.parametrize("op", [ALL_REDUCE, ALL_REDUCE_RMS_NORM], ids=lambda op: op.name)
def test_gpus_without_e4m3_are_refused(op):
    here = machine(capabilities.simulated(2, like="a100"), 2)
    call = op.call_of(((512, 5120),), BF16, here)
    assert fp8_wire.asked(op, "auto", call, here) == call
    with pytest.raises(ValueError, match="on sm_80, which has no conversion"):
        fp8_wire.asked(op, "fp8", call, here)


@pytest.mark.parametrize(("world_size", "row_bytes", "num_warps"), [(4, 4096, 16), (8, 512, 2)])
def test_no_pair_of_bytes_comes_apart(world_size, row_bytes, num_warps):
    """As ptxas 12.8 takes them wrong: with four octets in one sum, every eighth column of these tiles was wrong on H200s."""
    x, words = torch.zeros(16, dtype=BF16), torch.zeros(16, dtype=torch.int32)
    sizes = {"BLOCK": row_bytes, "ROWS": world_size, "TRANSPORT": "fp8", "TWO_SHOT": True}
    options = {"num_warps": num_warps, "maxnreg": 128, "enable_fp_fusion": False, "arch": "sm_90"}
    arguments = x, x, 1 << 24, words, words, a_view(world_size), 1 << 24
    kernel = compiled(fp8_kernels.fp8_all_reduce_kernel, *arguments, **sizes, **options)
    assert "e4m3x2" in kernel.asm["ptx"] and not pairs_taken_apart(kernel)


def test_pairs_that_come_apart_are_seen():
    apart = SimpleNamespace(
        asm={
            "ptx": """
	cvt.rn.satfinite.e4m3x2.f32  %rs42, %r1, %r2;
	shr.u16 	%rs53, %rs42, 8;
	mov.b32 	%r3, {%rs42, %rs55};
"""
        }
    )
    whole = SimpleNamespace(asm={"ptx": apart.asm["ptx"].replace("%rs53, %rs42", "%rs53, %rs41")})
    assert pairs_taken_apart(apart) == ["%rs42"] and not pairs_taken_apart(whole)


def same_as_torch(team):
    """Whether results on this GPU, of a call and of replays of four in a row, have the bits that torch computes on the host.

    Tiles of the larger tensor have more scales than a warp has threads.
    """
    results = []
    for call, shape in enumerate(((700, 1304), (4096, 5120), (700, 1304), (4096, 5120))):
        generators = [torch.Generator().manual_seed(10 * call + rank) for rank in range(team.size)]
        parts = [torch.randn(shape, generator=generator).bfloat16() for generator in generators]
        x = parts[team.rank].to(team.device)
        for shot in SHOTS:
            made = [ops.all_reduce(x, team, shot, wire="fp8")]
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made += [ops.all_reduce(x, team, shot, wire="fp8") for _ in range(4)]
            for _ in range(5):
                graph.replay()
            wanted = fp8_wire.sum_by_torch(parts, shot == "two_shot").bfloat16()
            results += [torch.equal(out.cpu(), wanted) for out in made]
    return results


@pytest.mark.parametrize("world_size", [pytest.param(w, marks=pytest.mark.gpu(w), id=f"{w} GPUs") for w in (2, 4)])
def test_calls_and_replays_on_gpus_have_the_bits_of_torch(world_size):
    for results in weft.launch(same_as_torch, world_size, "cuda"):
        assert all(results), results


# Mistakes by module: of the transport, of the kernel.
RECEIVED = """    words, scales = wl.lamport_receive_keyed(
        stage + here, old + here, tl.broadcast_to(from_others, (ROWS, WIDTH)),
        stage + of_scales, old + of_scales, tl.broadcast_to(from_others, (ROWS, GROUPS)), team, ordered, stage,
    )  # fmt: skip
"""
WORDS_ALONE = """    there = tl.broadcast_to(from_others, (ROWS, WIDTH))
    words = wl.lamport_receive(stage + here, old + here, there, team, ordered)
    there = tl.broadcast_to(from_others, (ROWS, GROUPS))
    scales = {}
"""
TRANSPORT = {
    "scales that are not waited for": (RECEIVED, WORDS_ALONE.format("tl.load(stage + of_scales, mask=there, other=0)")),
    "scales that are not cleared": (RECEIVED, WORDS_ALONE.format("wl.lamport_load(stage + of_scales, there, team)")),
    "wrong group": ("rank(team) * GROUPS) + tl.arange(0, GROUPS)", "rank(team) * GROUPS) + (tl.arange(0, GROUPS) ^ 1)"),
    "transposed": ("ranks * GROUPS + tl.arange(0, GROUPS)[None, :]", "ranks + world * tl.arange(0, GROUPS)[None, :]"),
}
KERNEL = {
    "own rows by the next tile's scales": ("own_words, own_scales, slot, epoch,", "own_words, scales, slot, epoch,"),
    "a part's scales by the tile's": ("wl.rank(team) * GROUPS + groups, end", "groups, end"),
}


@pytest.mark.parametrize("mistake", ["", *TRANSPORT, *KERNEL])
def test_planted_bugs_are_caught(mistake, monkeypatch, tmp_path):
    stem = f"fp8_wire_{[*TRANSPORT, *KERNEL].index(mistake) if mistake else 'right'}"
    if mistake in KERNEL:
        old, new = KERNEL[mistake]
    else:
        transport = mutated(fp8_push, *TRANSPORT.get(mistake, (RECEIVED, RECEIVED)), f"{stem}_push", tmp_path)
        old, new = "from weft.transport.fp8_push", f"from {transport.__name__}"
    kernels = mutated(fp8_kernels, old, new, stem, tmp_path)
    monkeypatch.setattr(fp8_wire, "fp8_all_reduce_kernel", kernels.fp8_all_reduce_kernel)

    def main(team):
        results = []
        for call in range(3):
            parts = [
                torch.randn(8, 1280, generator=torch.Generator().manual_seed(10 * call + rank)) * 4.0**rank
                for rank in range(team.size)
            ]
            parts = [(part * torch.arange(1, 1281) ** 2).bfloat16() for part in parts]
            for shot, design in SHOTS.items():
                out = ALL_REDUCE.run(design, team, parts[team.rank])
                results.append(torch.equal(out, fp8_wire.sum_by_torch(parts, shot == "two_shot").bfloat16()))
        return all(results)

    try:
        right = all(all(weft.simulate(main, 2, seed=seed, sms=2, slow={1: 20.0})) for seed in range(2))
    except WeftError:
        right = False
    assert right == (not mistake)
