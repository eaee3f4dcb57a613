"""matmul_route_schedule: planted mistakes, all designs on one router, schedules of programs, plans, refusals, machine code."""

import pytest
import torch

import weft
from tests.compiling import SHARED, compiled, stack_bytes
from tests.ops.checking import assert_identical, check, inputs_of
from tests.ops.layer_cases import check_refused, mutated
from tests.ops.test_compile_layer_kernels import caps_of, check_compiles
from weft import ops
from weft.errors import InvalidAccess
from weft.kernels.expert_choices import Scoring
from weft.ops.moe import matmul_route_schedule as module
from weft.ops.moe import route, router_kernel
from weft.ops.moe.matmul_route_schedule import MATMUL_ROUTE_SCHEDULE, OneLaunch, RouterCall
from weft.ops.moe.moe_schedule import MOE_SCHEDULE
from weft.ops.moe.router_kernel import Found, RouterForm, Rows, matmul_route_schedule_kernel, router_parts_kernel
from weft.ops.moe.routing import Experts
from weft.plan.planned import machine
from weft.runtime.arithmetic import next_power_of_2
from weft.runtime.capabilities import launch_options

MUTANTS = {
    "a part too few": ("T * FORM.rows\n", "0\n"),
    "no last columns": ("(part + 1) * steps // FORM.parts", "(part + 1) * (steps - 1) // FORM.parts"),
    "an expert's logits for the gate's": ("one * FORM.rows + FORM.experts", "one * FORM.rows + FORM.experts - 1"),
    "no renormalisation": ("if SCORING.renormalize:", "if False:"),
    "a bias in each part": ("(row < FORM.experts) & (part == 0)", "row < FORM.experts"),
    "a bias of the gate": ("(row < FORM.experts) & (part == 0)", "part == 0"),
    "padding that chooses": ("(place > 0) & (token < T)", "(place > 0)"),
    "other ranks' experts": ("taken & (expert >= first) & (expert < first + FORM.count)", "taken & (expert >= first)"),
    "tokens in no order": ("tl.cumsum(number, 0) - number", "tl.cumsum(number, 0) * 0"),
    "the wrong choice": ("token * FORM.k + place - 1", "token * FORM.k + tl.maximum(place - 2, 0)"),
    "an arrival counter that is not reset": ("tl.store(arrivals, 0)", "pass"),
}  # fmt: skip


# Of route_kernel, where it adds up parts.
ROUTE_MUTANTS = {
    "a part for all": ("asked, there, T * stride", "asked, there, 0"),
    "an expert's logit for the gate": ("row.to(tl.int64) * stride + E, row < T", "row.to(tl.int64) * stride + E - 1, row < T"),
    "a part too few": ("there, T * stride, PARTS, dtype", "there, T * stride, PARTS - 1, dtype"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_cases_catch_a_planted_mistake(name, tmp_path, monkeypatch):
    mutant = mutated(router_kernel, *MUTANTS[name], f"router_mutant_{len(name)}", tmp_path)
    monkeypatch.setattr(module, "matmul_route_schedule_kernel", mutant.matmul_route_schedule_kernel)
    check_caught("fused")


@pytest.mark.parametrize("name", ROUTE_MUTANTS)
def test_the_cases_catch_a_planted_mistake_in_sums_of_parts(name, tmp_path, monkeypatch):
    mutant = mutated(route, *ROUTE_MUTANTS[name], f"route_mutant_{len(name)}", tmp_path)
    monkeypatch.setattr(route, "route_kernel", mutant.route_kernel)
    check_caught("split")


@pytest.mark.parametrize("name", ["a part too few of H", "no last columns"])
def test_the_cases_catch_a_planted_mistake_in_parts(name, tmp_path, monkeypatch):
    change = MUTANTS.get(name) or ("steps // FORM.parts * STEP, (part + 1)", "steps // FORM.parts * STEP, part")
    mutant = mutated(router_kernel, *change, f"parts_mutant_{len(name)}", tmp_path)
    monkeypatch.setattr(module, "router_parts_kernel", mutant.router_parts_kernel)
    check_caught("split")


def check_caught(name):
    """Some case of a design fails."""
    kind = MATMUL_ROUTE_SCHEDULE.designs[name]

    def main(team):
        for case in MATMUL_ROUTE_SCHEDULE.cases():
            if not (case.design in ("auto", name) or isinstance(case.design, kind)):
                continue
            inputs = inputs_of(case, 0)
            given = MATMUL_ROUTE_SCHEDULE.arguments(case, None, *inputs)
            for _ in range(2):  # with one counter
                out = MATMUL_ROUTE_SCHEDULE.results(case, None, *given)
                check(case, 0, [inputs], MATMUL_ROUTE_SCHEDULE.defined(case, None, out, *inputs))

    with pytest.raises((AssertionError, InvalidAccess)):
        weft.simulate(main, 1)


def test_all_designs_give_the_same_choices_and_lists():
    """Of logits that are exact in any order, with ties; a strided x and router; and gradients by the sequential one."""

    def main(team):
        generator = torch.Generator().manual_seed(2)
        x, router = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((6, 80), (13, 80)))
        x, router, experts = x[:, :50], router[:, 8:58] / 4, Experts(12, 3, 6)
        *others, apart = (
            ops.matmul_route_schedule(x, router, experts, 4, algorithm=a) for a in MATMUL_ROUTE_SCHEDULE.designs
        )
        for found in others:
            assert_identical(found.routing.ids, apart.routing.ids)
            torch.testing.assert_close(found.routing.weights, apart.routing.weights, rtol=1e-6, atol=0)
            assert_identical(found.gate, apart.gate.contiguous())
            for one, other in zip(lists_of(found), lists_of(apart), strict=True):
                assert_identical(one, other)
        leaves = [tensor.clone().requires_grad_() for tensor in (x, router)]
        trained = ops.matmul_route_schedule(*leaves, experts, 4)
        (trained.routing.weights.square().sum() + trained.gate.sum()).backward()
        wanted = [tensor.clone().requires_grad_() for tensor in (x, router)]
        logits = wanted[0] @ wanted[1].T
        weights = logits[:, :12].softmax(-1).gather(1, apart.routing.ids.long())
        ((weights / weights.sum(-1, keepdim=True)).square().sum() + logits[:, 12].sum()).backward()
        for one, other in zip(leaves, wanted, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)

    weft.simulate(main, 1)


def lists_of(routed):
    """The defined part of a schedule."""
    return MOE_SCHEDULE.defined(None, None, routed.schedule[:4], routed.routing.ids)


def routed(team, algorithm="fused"):
    """Results of two calls of other sizes with one counter, on one stream."""
    generator, tickets, results = torch.Generator().manual_seed(4), torch.zeros(1, dtype=torch.int32), []
    for tokens in (5, 3):
        x, router = torch.randn(tokens, 96, generator=generator), torch.randn(21, 96, generator=generator)
        found = ops.matmul_route_schedule(x, router, Experts(20, 0, 10), 3, tickets=tickets, algorithm=algorithm)
        results += [*found.routing, found.gate, *lists_of(found)]
    assert not tickets.any()
    return results


@pytest.mark.parametrize("algorithm", ["fused", "split"])
def test_every_order_of_programs_gives_the_same_bits(algorithm):
    first, *others = (weft.simulate(routed, 1, args=(algorithm,), seed=seed)[0] for seed in range(4))
    for other in others:
        for one, wanted in zip(other, first, strict=True):
            assert_identical(one, wanted)


@pytest.mark.parametrize("algorithm", ["fused", "split"])
@pytest.mark.weft(world_size=1, schedules=6)
def test_no_program_reads_a_part_too_early(team, algorithm):
    routed(team, algorithm)


@pytest.mark.parametrize(
    ("tokens", "experts", "name"),
    [(1, 128, "fused"), (1, 256, "fused"), (2, 128, "split"), (8, 8, "split"), (128, 256, "split"), (129, 128, "sequential"),
     (4096, 128, "sequential")],
)  # fmt: skip
def test_one_token_takes_one_launch_and_few_take_parts(tokens, experts, name):
    planned = MATMUL_ROUTE_SCHEDULE.plan(
        RouterCall(tokens, 2048, experts, 2, torch.bfloat16), machine(caps_of("sm_90"), 1)
    )
    assert planned.name == name and f"{tokens} tokens and {experts} experts" in planned.reason
    text = str(ops.explain("matmul_route_schedule", T=tokens, H=2048, E=experts, k=2, world_size=1))
    assert "matmul_route_schedule" in text


def test_amd_takes_three_launches():
    call = RouterCall(1, 2048, 128, 8, torch.bfloat16)
    assert MATMUL_ROUTE_SCHEDULE.plan(call, machine(caps_of("gfx942"), 1)).name == "sequential"


X, ROUTER, EXPERTS = torch.zeros(3, 8), torch.zeros(4, 8), Experts(4, 0, 2)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("router has shape (6, 8); it must be (4, 8), or (5, 8) with the gate", {"router": torch.zeros(6, 8)}),
        ("router has shape (4, 9); it must be (4, 8)", {"router": torch.zeros(4, 9)}),
        ("router.dtype=torch.bfloat16 is not one of float32", {"router": ROUTER.bfloat16()}),
        ("experts.total=1025 is more than 1024", {"router": torch.zeros(1025, 8), "experts": Experts(1025, 0, 1)}),
        ("k=5 is more than 16, or than the 4 experts", {"k": 5}),
        ("bias has shape (3,); it must be (4,)", {"bias": torch.zeros(3)}),
        ("block=8 is not one of 16, 32, 64, 128", {"block": 8}),
        ("algorithm='lists' is not one of 'auto', 'fused', 'split', 'sequential'", {"algorithm": "lists"}),
        ("algorithm='split' has no backward", {"algorithm": "split", "x": X.clone().requires_grad_()}),
        ("algorithm='split' takes up to 128 tokens, not tokens=129", {"algorithm": "split", "x": X.new_zeros(129, 8)}),
        ("algorithm='fused' has no backward", {"algorithm": "fused", "x": X.clone().requires_grad_()}),
        ("tokens=600 and experts=4 are 16384; pass 'sequential' or 'auto'", {"algorithm": "fused", "x": X.new_zeros(600, 8)}),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(message, fields):
    given = {"x": X, "router": ROUTER, "experts": EXPERTS, "k": 2, **fields}

    def main(team):
        check_refused(lambda: ops.matmul_route_schedule(**given), (), message)

    weft.simulate(main, 1)


@pytest.mark.parametrize(("field", "value"), [("parts", 33), ("rows_of", 8), ("step", 48)])
def test_designs_that_there_are_not_are_refused(field, value):
    check_refused(lambda: OneLaunch(**{field: value}), (), f"{field}={value} is not")


def built(arch, tokens, H, E, k, dtype=torch.bfloat16, name="fused"):
    """The kernel with parts of a design by the rule; with a gate, in groups with a bias where there are 256 experts."""
    call, x, ints, sums = (
        RouterCall(tokens, H, E, k, dtype),
        torch.zeros(16, dtype=dtype),
        torch.zeros(16).int(),
        torch.zeros(16),
    )
    design = MATMUL_ROUTE_SCHEDULE.default(name, call, machine(caps_of(arch), 1))
    sizes = design.parts, design.rows_of, design.step
    form = RouterForm(E, E // 2, E + 1, k, next_power_of_2(tokens), 16, *sizes, True, E == 128)
    scoring = Scoring(False, True, True, 8, 4) if E == 256 else Scoring(True, False, True, 1, 1)
    options = {"num_warps": design.num_warps, "num_stages": design.num_stages, **launch_options(caps_of(arch))}
    rows, found = Rows(x, H, x, H, sums, x), Found(ints, x, x, ints, ints, ints, ints)
    if name == "split":
        return compiled(router_parts_kernel, rows, sums, tokens, H, arch=arch, FORM=form, **options)
    given = rows, found, sums, ints, tokens, H, 64, 1.0
    return compiled(matmul_route_schedule_kernel, *given, arch=arch, SCORING=scoring, FORM=form, **options)


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", ["fused", "split"])
@pytest.mark.parametrize(
    ("arch", "sizes"),
    [
        ("sm_90", (1, 2048, 128, 8)), ("sm_90", (8, 7168, 256, 8)), ("gfx942", (1, 2048, 128, 8)),
        pytest.param("sm_80", (8, 2048, 128, 8), marks=pytest.mark.sweep),
        pytest.param("sm_100", (8, 7168, 256, 8), marks=pytest.mark.sweep),
    ],
)  # fmt: skip
def test_it_compiles_and_fits(arch, sizes, name, tmp_path):
    kernel = built(arch, *sizes, name=name)
    assert kernel.metadata.shared <= SHARED[arch]
    check_compiles(kernel, arch)
    if arch == "sm_90":
        ptx = kernel.asm["ptx"]
        # Before the previous kernel has ended the router is prefetched, and nothing is loaded.
        assert "prefetch" in ptx[: ptx.index("griddepcontrol.wait")]
        assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]
        assert "mma" in ptx and stack_bytes(kernel, tmp_path) == 0


@pytest.mark.triton_internals
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "tokens"), [("fused", 2), ("fused", 8), ("fused", 16), ("fused", 32), ("split", 32), ("split", 128)]
)
def test_other_sizes_compile_without_a_stack(name, tokens, tmp_path):
    assert stack_bytes(built("sm_90", tokens, 2048, 128, 8, torch.float16, name), tmp_path) == 0
