"""all_reduce_rms_norm(invariant=True): bits of an all-reduce in a tree and a norm; planted mistakes; refused arguments."""

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import mutated
from weft import ops
from weft.kernels.fp8 import RowFormat
from weft.ops.collectives import all_reduce_rms_norm, norm_kernel, tree_norm
from weft.ops.collectives.all_reduce import ALL_REDUCE, all_reduce_nodes
from weft.ops.collectives.all_reduce_rms_norm import ALL_REDUCE_RMS_NORM
from weft.ops.collectives.collective import CollectiveCall
from weft.ops.collectives.tree import Tree
from weft.plan.planned import Planned, machine_of
from weft.runtime.capabilities import Capabilities

EPS = 1e-6
# Rows, columns, and neighbouring slices that a node has from the GEMM: of a part and of several, whole and ragged.
SHAPES = ((1, 48, 1), (128, 24, 8), (33, 40, 2), (5, 760, 1), (2, 4096, 4), (1, 5120, 2))


# Its square is 0.4 of the last bit of 2**24.
ABSORBED = 0.89453125


def in_pairs(x, add):
    while x.shape[0] > 1:
        x = add(x[::2], x[1::2])
    return x[0]


def drawn(M, H, seed=0):
    """(eight slices of x, residual, weight), of which the first row shows the order of its squares, the others that of the sum.

    One square is so large that it absorbs smaller ones that are added to it alone. hidden * scale * weight lies near the middle
    between two numbers of 16 bits, a little farther in each column, so that every fp32 bit of the scale shows.
    """
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(shape, generator=generator).bfloat16() for shape in ((8, M, H), (M, H)))
    x[:, 0], residual[0], residual[0, 0] = 0.0, 2.0**-8, 2.0**12
    residual[0, 8:128:8] = ABSORBED
    for part in (1, 2, 4, 9, 10, 12):
        residual[0, 256 * part : 256 * part + 1] = ABSORBED
    first = summed(x, residual)[0].double()
    middle, scale = 1 + 2.0**-8, (first.square().mean() + EPS).rsqrt()
    near = 1 + (torch.arange(H) - H // 2) * 2.0**-24
    return x, residual, (middle / (first * scale) * near).float()


def summed(x, residual):
    """hidden in plain torch."""
    total = in_pairs(x, lambda a, b: (a.float() + b.float()).bfloat16())
    return (total.float() + residual.float()).bfloat16()


def design_of(name, shape, dtype, team):
    if name == "tree_then_norm":
        call = CollectiveCall(shape.numel() * dtype.itemsize, dtype, invariant=True)
        return tree_norm.TreeThenNorm(reduce=ALL_REDUCE.plan(call, machine_of(team)))
    machine = machine_of(team)
    hops = ALL_REDUCE_RMS_NORM.default(name, ALL_REDUCE_RMS_NORM.call_of((shape,), dtype, machine), machine)
    return Tree(hops=Planned(name, tree_norm.in_powers_of_two(hops), "asked for"))


def both(team, given, per=1, names=("one_shot", "two_shot", "tree_then_norm"), fp8=None):
    """The results of two launches, to which those of every design are compared, two calls in a row."""
    slices, residual, weight = given
    own = slices.chunk(team.size)[team.rank]
    per = min(per, len(own))  # slices that a program of the GEMM has added up
    nodes = torch.stack([in_pairs(some, lambda a, b: (a.float() + b.float()).bfloat16()) for some in own.split(per)])
    options = {"invariant": True, "fp8": fp8}
    total = all_reduce_nodes(nodes, team)
    normed, hidden = expected = ops.add_rms_norm(total, residual, weight, EPS, **options)
    for name in names:
        if name != "two_shot" or team.size > 1:
            design = design_of(name, residual.shape, residual.dtype, team)
            for _ in range(2 if len(residual) < 9 else 1):
                results = ALL_REDUCE_RMS_NORM.run(design, team, nodes, residual, weight, EPS, format=fp8)
                if fp8 is not None:
                    if fp8.kind == "group":
                        assert_identical(results[1], normed.scales, what=f"scales by {name}")
                    results = results[0].view(torch.uint8), results[2]
                rows = normed if fp8 is None else normed.data.view(torch.uint8)
                for actual, wanted in zip(results, (rows, hidden), strict=True):
                    assert_identical(actual, wanted, what=f"{tuple(residual.shape)} on {team.size} ranks by {name}")
    public = ops.all_reduce_rms_norm(nodes, residual, weight, EPS, team, **options)
    if fp8 is None:
        assert_identical(public[0], normed)
    return expected


@pytest.mark.parametrize(
    ("world_size", "shapes"),
    [
        (1, SHAPES[::2]), (2, SHAPES[1:4]), (4, ((3, 264, 2),)), (8, ((1, 48, 1),)),
        *(pytest.param(world_size, SHAPES, marks=pytest.mark.sweep) for world_size in (1, 2, 4, 8)),
    ],
)  # fmt: skip
def test_it_has_the_bits_of_two_launches_on_any_number_of_ranks(world_size, shapes):
    for seed, (M, H, per) in enumerate(shapes):
        given = drawn(M, H, seed)
        [alone] = weft.simulate(both, 1, args=(given, per, ()))
        assert_identical(alone[1], summed(*given[:2]))
        for normed, hidden in weft.simulate(both, world_size, args=(given, per), seed=seed):
            assert_identical(hidden, alone[1])
            assert_identical(normed, alone[0])


def on_gpus(team):
    for seed, (M, H, per) in enumerate((*SHAPES, *((M, H, 1) for M in (1, 32, 128, 600) for H in (4096, 5120)))):
        given = tuple(one.to(team.device) for one in drawn(M, H, seed))
        names = ("tree_then_norm",) if M > 128 else ("one_shot", "two_shot", "tree_then_norm")
        for fp8 in (None, RowFormat("group")) if H % 128 == 0 else (None,):
            both(team, given, per, names, fp8)


@pytest.mark.gpu(2)
def test_on_two_gpus_it_has_the_bits_of_two_launches():
    weft.launch(on_gpus, 2, "cuda")


@pytest.mark.parametrize("kind", ["group", "static"])
def test_rows_in_fp8_have_the_bits_of_two_launches(kind):
    format = RowFormat(kind, torch.full((1, 1), 0.0131) if kind == "static" else None)
    weft.simulate(both, 2, args=(drawn(3, 640), 2, ("one_shot", "two_shot", "tree_then_norm"), format))


def test_a_tensor_is_a_node_and_a_sum_carries_no_negative_zero():
    x, residual, weight = torch.full((2, 40), -0.0).bfloat16(), torch.full((2, 40), -0.0).bfloat16(), torch.ones(40)

    def main(team):
        results = ops.all_reduce_rms_norm(x, residual, weight.bfloat16(), EPS, team, invariant=True)
        assert not any(one.signbit().any() for one in results)

    for world_size in (1, 2):
        weft.simulate(main, world_size)


# --- planted mistakes ---------------------------------------------------------------------------------------------------

PARTS = "sum_of_rows(wl.lamport_receive(arriving + now, arriving + before, there, team), TREE)"
MISTAKES = {
    "ranks are added without the tree's roundings": ("return node_of_ranks(received)", "return sum_of_ranks(received)"),
    "the residual is added before the sum is rounded": (
        "return node_of_ranks(received)",
        "return tl.sum(received.to(tl.float32), axis=0)",
    ),
    "nodes are added in order": (
        "return node_of(x.first + place, there, x.stride, x.count, True, dtype).to(dtype)",
        "return rounded_sum(x.first + place, there, x.stride, x.count, dtype)",
    ),
    "squares of a part are added in the layout's order": ("squares_of(total, TREE)", "squares_of(total)"),
    "parts are added in the layout's order": (PARTS, PARTS.replace("TREE", "False")),
}


def differs(kernel, monkeypatch):
    """True if results by ``kernel`` differ from those of two launches."""
    monkeypatch.setattr(all_reduce_rms_norm, "all_reduce_rms_norm_kernel", kernel)
    try:
        weft.simulate(both, 2, args=(drawn(2, 4000), 1, ("one_shot",)))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake, tmp_path, monkeypatch):
    mutant = mutated(norm_kernel, *MISTAKES[mistake], f"tree_norm_{list(MISTAKES).index(mistake)}", tmp_path)
    assert differs(mutant.all_reduce_rms_norm_kernel, monkeypatch)


def calls(team):
    """Ten calls in a row of one hop, then of two, so that every stage is used again while a peer is a call ahead."""
    x, residual, weight = drawn(3, 520)
    nodes = x.chunk(team.size)[team.rank]
    for name in ("one_shot", "two_shot"):
        design = design_of(name, residual.shape, residual.dtype, team)
        for _ in range(10):
            ALL_REDUCE_RMS_NORM.run(design, team, nodes, residual, weight, EPS)


def test_calls_in_a_row_are_clean():
    report = weft.check.check(calls, 2, schedules=2, sms=8, compile=False)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "mistake",
    [
        (PARTS, "sum_of_rows(tl.load(arriving + now, mask=there, other=0.0), TREE)"),
        ("count % STAGES * SIZE", "0 * SIZE"),
    ],
)
def test_the_checker_finds_parts_that_are_not_waited_for(mistake, tmp_path, monkeypatch):
    kernel = mutated(norm_kernel, *mistake, f"tree_norm_race_{len(mistake[0])}", tmp_path).all_reduce_rms_norm_kernel
    monkeypatch.setattr(all_reduce_rms_norm, "all_reduce_rms_norm_kernel", kernel)
    assert not weft.check.check(calls, 2, schedules=2, sms=8, compile=False).ok


# --- choosing and refusing ----------------------------------------------------------------------------------------------


def test_one_kernel_while_its_tiles_are_resident_at_once():
    caps = Capabilities(device_name="NVIDIA H200", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True, True))
    for rows, name in ((1, "tree"), (128, "tree"), (4096, "tree_then_norm")):
        plan = ops.explain("all_reduce_rms_norm+invariant", (rows, 4096), world_size=2, caps=caps)
        assert plan.algorithm == name and plan.bits == "are invariant"


def test_refused_arguments():
    x, weight = torch.ones((2, 16)).bfloat16(), torch.ones(16).bfloat16()

    def main(team):
        def refused(match, *given, **options):
            with pytest.raises(ValueError, match=match):
                ops.all_reduce_rms_norm(*given, EPS, team, **{"invariant": True, **options})

        refused("algorithm='one_shot' with invariant=True, which is a tree", x, x, weight, algorithm="one_shot")
        refused("factored=True with invariant=True, whose norms are whole", x, x, weight, factored=True)
        refused("invariant=True with x of torch.float32", x.float(), x.float(), weight.float())
        refused(r"shape \(8, 2, 16\), 8 nodes; .* on 2 ranks .* at most 4", x.expand(8, 2, 16), x, weight)
        refused("invariant='yes' is not", x, x, weight, invariant="yes")
        with pytest.raises(ValueError, match="add_rms_norm: invariant=True with x of torch.float32"):
            ops.add_rms_norm(x.float(), None, weight.float(), EPS, invariant=True)

    weft.simulate(main, 2)
    with pytest.raises(ValueError, match="all_reduce_rms_norm: invariant=True on 3 ranks"):
        weft.simulate(lambda team: ops.all_reduce_rms_norm(x, x, weight, EPS, team, invariant=True), 3)
