"""Ops of a mixture of experts: planted mistakes that the cases catch, ties and NaN, refused arguments, machine code."""

import re
from functools import partial

import pytest
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
from tests.compiling import SHARED, TARGETS, a_view, compiled, stack_bytes
from tests.ops.checking import assert_identical, check, inputs_of
from tests.ops.gemm.test_sliced import noisy, operands
from tests.ops.layer_cases import DEVICES, changed, check_refused, everywhere, mutated
from tests.ops.moe.trained import by_torch
from tests.ops.test_compile_layer_kernels import caps_of, check_compiles
from weft import ops
from weft.errors import InvalidAccess
from weft.kernels import expert_choices
from weft.kernels.expert_choices import Scoring
from weft.kernels.fp8 import E4M3, Fp8Rows
from weft.kernels.fp8_tile import Fp8Scales
from weft.ops.moe import moe_schedule, moe_sum, route
from weft.ops.moe.exchange.exchange_op import PushRows, Sizes, copy_chosen_kernel
from weft.ops.moe.exchange.push import Mail, Partials, moe_combine_kernel, moe_dispatch_kernel
from weft.ops.moe.grouped import gemms as grouped
from weft.ops.moe.grouped import gradients as grouped_grad
from weft.ops.moe.grouped import kernel as grouped_kernel
from weft.ops.moe.grouped.gemms import GroupedCall, weight_descriptor
from weft.ops.moe.grouped.kernel import Biases, Form, grouped_matmul_kernel
from weft.ops.moe.grouped.rule import fixed_tiles_for, grouped_tiles_for
from weft.ops.moe.routing import ClampedSwiGLU, Experts, Routing, Schedule
from weft.ops.op import find_op
from weft.runtime.capabilities import launch_options
from weft.runtime.team.channel import ChannelView
from weft.transport.halves import Half

# --- planted mistakes ---------------------------------------------------------------------------------------------------

MUTANTS = {
    "no renormalisation": (route, "if SCORING.renormalize:", "if False:"),
    "the bias in the weights": (expert_choices, "tl.where(expert == best, score, 0.0), axis=1, keep_dims=True), weight",
                                "tl.where(expert == best, rank_by, 0.0), axis=1, keep_dims=True), weight"),
    "the highest expert among equals": (expert_choices, "return 2147483647 - expert", "return expert"),
    "groups by their best expert in spite of a bias": (expert_choices, "value += tl.sum", "tl.sum"),
    "groups ignored": (expert_choices, "if SCORING.groups > 1:", "if False:"),
    "the neighbour's pairs": (moe_schedule, "== first + expert", "== first + expert + 1"),
    "tokens from 0 on": (moe_schedule, "token = (place + start) % T", "token = place"),
    "tokens beyond the last": (moe_schedule, "mask=(place < T)[:, None] & (choice < K)", "mask=choice < K"),
    "the wrong choice": (moe_schedule, "token * K + chosen_by - 1", "token * K"),
    "a tile too few": (moe_schedule, "(count + BLOCK - 1) // BLOCK", "tl.maximum(count // BLOCK, 1)"),
    "the neighbour's weight": (moe_sum, "tl.load(weights + pair + j)", "tl.load(weights + pair)"),
    "other ranks' rows": (moe_sum, "(expert >= 0) & (expert < count)", "(expert >= -99)"),
    "the neighbour's gate": (moe_sum, "shared.gate + token.to(tl.int64) * shared.stride", "shared.gate + token"),
    "a shared result without its gate": (moe_sum, "row *= 1.0 / (1.0 + tl.exp(-gate))", "row *= 1.0"),
    "a gated result twice": (moe_sum, "total += row\n", "total += 2.0 * row\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_cases_catch_a_planted_mistake(name, tmp_path):
    module, old, new = MUTANTS[name]
    mutant = mutated(module, old, new, f"mutant_{len(name)}", tmp_path)
    if module is expert_choices:  # functions of the kernel of route
        place = f"from {module.__name__} import"
        module, mutant = route, mutated(route, place, f"from {mutant.__name__} import", "route_by_mutant", tmp_path)
    op = vars(mutant)[module.__name__.rsplit(".", 1)[1].upper()]

    def main(team):
        for case in op.cases():
            if case.dtype in (torch.bfloat16, torch.float32, torch.int32):
                inputs = inputs_of(case, 0)
                check(case, 0, [inputs], op.call(case, None, *inputs))

    with pytest.raises((AssertionError, InvalidAccess)):
        weft.simulate(main, 1)


GROUPED_MUTANTS = {
    "swapped gate and up": ("gate, up = halves(acc)", "up, gate = halves(acc)"),
    "the neighbour's expert": ("expert, first = tl.load(entry)", "expert, first = tl.maximum(tl.load(entry) - 1, 0)"),
    "rows by pair, not by token": ("source = pair // FORM.choices", "source = pair // (FORM.choices + 1)"),
    "the whole tile stored": ("exists = local < count", "exists = local < 99"),
    "no tail of K": ("mask=(deep < K - k)[None, :]", "mask=(deep < K)[None, :]"),
    "the neighbour's bias": ("expert.to(tl.int64) * biases.stride", "tl.maximum(expert - 1, 0).to(tl.int64) * biases.stride"),
    "a gate's bias for up": ("expert, N + column, N - column", "expert, column, N - column"),
    "gate clamped on both sides": ("FORM.limit, gate)", "FORM.limit, tl.where(gate < -FORM.limit, -FORM.limit, gate))"),
    "up clamped on one side": ("tl.where(up < -FORM.limit, -FORM.limit, up)", "up"),
    "up without one": ("* (up + 1.0)", "* up"),
    "silu for alpha": ("tl.exp(-FORM.alpha * gate)", "tl.exp(-gate)"),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPED_MUTANTS)
def test_the_grouped_cases_catch_a_planted_mistake(name, tmp_path, monkeypatch):
    mutant = mutated(grouped_kernel, *GROUPED_MUTANTS[name], f"grouped_mutant_{len(name)}", tmp_path)
    monkeypatch.setattr(grouped, "grouped_matmul_kernel", mutant.grouped_matmul_kernel)

    def main(team):
        for op in (find_op("grouped_matmul_silu_mul"), find_op("grouped_matmul")):
            # Cases with the most in them first: they catch most.
            for case in sorted(op.cases(), key=lambda case: not (case.field("bias") or case.field("clamped"))):
                inputs = inputs_of(case, 0)
                try:
                    check(case, 0, [inputs], op.call(case, None, *inputs))
                except (AssertionError, InvalidAccess):
                    return True  # the rest would only cost time
        return False

    assert weft.simulate(main, 1) == [True]


# --- values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_ties_take_the_lowest_experts_and_nan_the_last_place(device):
    def check_choices(device):
        nan = torch.nan
        logits = torch.tensor(
            [[0.0, 1, 1, 1, 0], [-0.0, 0, -0.0, 0, 0], [nan, 2, nan, -9, nan], [nan] * 5], device=device
        )
        routing = ops.route(logits, 3)
        assert routing.ids.tolist() == [[1, 2, 3], [0, 1, 2], [1, 3, 0], [0, 1, 2]]
        assert torch.allclose(routing.weights[:2], torch.full((2, 3), 1 / 3, device=device))
        assert routing.weights[2:].isnan().all()
        by_sigmoid = ops.route(logits, 2, scoring="sigmoid", renormalize=False)
        assert by_sigmoid.ids[2].tolist() == [1, 3]
        assert by_sigmoid.weights[2].tolist() == pytest.approx(logits[2, [1, 3]].sigmoid().tolist())

    everywhere(check_choices, device)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_of_the_weights_are_torch_s(scoring, renormalize):
    def main(team):
        logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
        bias = torch.linspace(-1, 1, 12)
        routing = ops.route(logits, 4, scoring=scoring, renormalize=renormalize, bias=bias, scale=2.5)
        factors = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        [found] = torch.autograd.grad((routing.weights * factors).sum(), logits)
        scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
        chosen = scores.gather(1, routing.ids.long())
        weights = chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen
        [expected] = torch.autograd.grad((2.5 * weights * factors).sum(), logits)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)

    weft.simulate(main, 1)


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("skew", [False, True])
def test_a_layer_s_gradients_are_torch_s(block, skew):
    """Of the rows, the router and both weights; with experts that nobody chose, and summed over two ranks' experts."""

    def main(team):
        generator = torch.Generator().manual_seed(5)
        shapes = (21, 24), (6, 24), (6, 40, 24), (6, 24, 20)
        given = [torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for shape in shapes]
        if skew:
            given[1][3:] -= 100 * given[1][:3].abs().sum()  # of a constant column
            given[0][:, 0] = 1.0
            given[1][3:, 1:] = 0
        wanted = [tensor.clone().requires_grad_() for tensor in given]
        grad = torch.randn(21, 24, generator=generator, dtype=torch.float64)
        by_torch(*wanted, 3).backward(grad)
        found = [tensor.float().requires_grad_() for tensor in given]
        x, router, gate_up, down = found
        routing, total = ops.route(x @ router.T, 3), 0
        for rank in range(2):
            experts = Experts.whole(6, rank, 2)
            mine = slice(experts.first, experts.first + experts.count)
            schedule = ops.moe_schedule(routing.ids, experts, block=block)
            h = ops.grouped_matmul_silu_mul(x, gate_up[mine], schedule)
            # The same first GEMM without its gate, so that its gradients are seen too.
            raw = ops.grouped_matmul(x, gate_up[mine], schedule, gather=True)
            gate, up = raw.chunk(2, dim=-1)
            h = h / 2 + torch.nn.functional.silu(gate) * up / 2
            total = total + ops.moe_sum(ops.grouped_matmul(h, down[mine], schedule), routing, experts)
        total.backward(grad.float())
        for name, one, other in zip(("x", "router", "gate_up", "down"), found, wanted, strict=True):
            torch.testing.assert_close(
                one.grad.double(), other.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
        if skew:
            assert (gate_up.grad[3:] == 0).all() and (down.grad[3:] == 0).all()

    weft.simulate(main, 1)


@pytest.mark.parametrize("gated", [True, False])
def test_gradients_of_a_shared_summand_are_torch_s(gated):
    def main(team):
        generator = torch.Generator().manual_seed(7)
        y, shared, wide = (torch.randn(shape, generator=generator) for shape in ((10, 12), (5, 12), (5, 3)))
        routing = Routing(torch.tensor([[0, 2]] * 5, dtype=torch.int32), torch.rand(5, 2, generator=generator))
        shared.requires_grad_(), wide.requires_grad_()
        gate = wide[:, 1] if gated else None
        ops.moe_sum(y, routing, Experts.slices(3), shared=shared, gate=gate).square().sum().backward()
        found = shared.grad.clone(), wide.grad
        shared.grad = wide.grad = None
        routed = (y.view(5, 2, 12) * routing.weights[..., None]).sum(1)
        (routed + (shared * wide[:, 1:2].sigmoid() if gated else shared)).square().sum().backward()
        torch.testing.assert_close(found, (shared.grad, wide.grad), rtol=1e-4, atol=1e-4)

    weft.simulate(main, 1)


def test_gradients_of_rows_that_begin_anywhere():
    def main(team):
        generator = torch.Generator().manual_seed(6)
        x, weight = torch.randn(9, 8, generator=generator), torch.randn(3, 18, 8, generator=generator)
        ids = torch.tensor([[0, 2], [1, 0], [2, 1]] * 3, dtype=torch.int32)
        schedule = ops.moe_schedule(ids, Experts.slices(3))
        x.requires_grad_(), weight.requires_grad_()
        ops.grouped_matmul(x, weight, schedule, gather=True).square().sum().backward()
        found = x.grad.clone(), weight.grad.clone()
        x.grad = weight.grad = None
        torch.einsum("tk,tcnk->tcn", x, weight[ids.long()]).square().sum().backward()
        torch.testing.assert_close(found, (x.grad, weight.grad), rtol=1e-4, atol=1e-4)

    weft.simulate(main, 1)


def experts_of_one_rank(team):
    """A layer's result, run four times with one counter: routing, both GEMMs, sum."""
    generator = torch.Generator().manual_seed(3)
    x, router = torch.randn(33, 64, generator=generator), torch.randn(6, 64, generator=generator)
    gate_up, down = torch.randn(6, 80, 64, generator=generator) / 8, torch.randn(6, 64, 40, generator=generator) / 8
    tickets, experts, results = torch.zeros(1, dtype=torch.int32), Experts.slices(6), []
    for _ in range(2):
        routing = ops.route(x @ router.T, 3)
        schedule = ops.moe_schedule(routing.ids, experts, block=16, tickets=tickets)
        h = ops.grouped_matmul_silu_mul(x, gate_up, schedule)
        results.append(ops.moe_sum(ops.grouped_matmul(h, down, schedule), routing, experts))
    assert_identical(results[1], results[0])
    return results[0]


def test_every_schedule_gives_the_same_bits():
    first, *others = (weft.simulate(experts_of_one_rank, 1, seed=seed)[0] for seed in range(4))
    for other in others:
        assert_identical(other, first)


# --- refused arguments --------------------------------------------------------------------------------------------------

LOGITS, IDS = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int32)
SCHEDULE = Schedule(*(torch.zeros(shape, dtype=torch.int32) for shape in ((4, 3), (4,), (5, 4), (1,))), 2, 16)
WEIGHT = torch.zeros(4, 6, 16)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("route: k=0 is not a positive integer", {"k": 0}),
        ("route: k=9 is more than 16, or than the 8 experts to choose from", {"k": 9}),
        ("route: k=3 is more than 16, or than the 2 experts to choose from", {"k": 3, "groups": 4}),
        ("route: groups=3 does not divide the 8 experts", {"groups": 3}),
        ("route: group_limit=3 is more than groups=2", {"groups": 2, "group_limit": 3}),
        ("route: scoring='relu' is not one of 'softmax', 'sigmoid'", {"scoring": "relu"}),
        ("route: renormalize=1 is not True or False", {"renormalize": 1}),
        ("route: bias has shape (7,); it must be (8,)", {"bias": torch.zeros(7)}),
        ("route: bias.dtype=torch.bfloat16 is not one of float32", {"bias": torch.zeros(8).bfloat16()}),
        ("route: scale='2' is not a finite number", {"scale": "2"}),
        ("route: scale=nan is not a finite number", {"scale": float("nan")}),
        ("route: scale=inf is not a finite number", {"scale": float("inf")}),
        ("route: logits has shape (8,); it must be (T, E)", {"logits": torch.zeros(8)}),
        ("route: logits has shape (1, 1025); it must have 1 to 1024 experts", {"logits": torch.zeros(1, 1025)}),
    ],
)
def test_wrong_arguments_of_route_are_refused(message, fields):
    given = {"logits": LOGITS, "k": 2, **fields}
    check_refused(lambda: ops.route(given.pop("logits"), given.pop("k"), **given), (), message)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("shared has shape (3, 5); it must be (3, 4)", {"shared": torch.zeros(3, 5)}),
        ("shared.dtype=torch.float16 is not one of float32", {"shared": torch.zeros(3, 4).half()}),
        ("gate has shape (3, 1); it must be (3,)", {"shared": torch.zeros(3, 4), "gate": torch.zeros(3, 1)}),
        ("gate is that of shared, which is None; pass both", {"gate": torch.zeros(3)}),
    ],
)
def test_wrong_shared_summands_are_refused(message, fields):
    given = torch.zeros(6, 4), Routing(IDS, torch.zeros(3, 2)), Experts(8, 0, 4)
    check_refused(lambda: ops.moe_sum(*given, **fields), (), f"moe_sum: {message}")


@pytest.mark.parametrize(
    ("op", "message", "position", "value"),
    [
        ("moe_schedule", "ids.dtype=torch.int64 is not one of int32", 0, IDS.long()),
        ("moe_schedule", "ids has shape (3, 17); a token has 1 to 16 choices", 0, torch.zeros(3, 17).int()),
        ("moe_schedule", "experts=8 is not an Experts", 1, 8),
        ("moe_schedule", "block=8 is not one of 16, 32, 64, 128", 2, 8),
        ("moe_schedule", "start=3 is not an integer in 0 .. 2", 3, 3),
        ("moe_schedule", "tickets has shape (0,); it must be a contiguous row of 1 or more", 4, IDS[0, :0]),
        ("moe_sum", "y has shape (5, 4); it must be (6, N)", 0, torch.zeros(5, 4)),
        ("moe_sum", "routing=None is not a Routing", 1, None),
        ("moe_sum", "weights has shape (3, 1); it must be (3, 2)", 1, Routing(IDS, torch.zeros(3, 1))),
        ("moe_sum", "experts=(8, 0, 4) is not an Experts", 2, (8, 0, 4)),
        ("grouped_matmul_silu_mul", "x has 4 rows; with gather=True a schedule of 3 tokens", 0, torch.zeros(4, 16)),
        ("grouped_matmul_silu_mul", "weight has 5 rows, an odd number", 1, torch.zeros(4, 5, 16)),
        ("grouped_matmul_silu_mul", "weight has shape (3, 6, 16); it must be (4, 2 N, 16)", 1, WEIGHT[:3]),
        ("grouped_matmul_silu_mul", "weight.dtype=torch.float16 is not one of float32", 1, WEIGHT.half()),
        ("grouped_matmul_silu_mul", "schedule=() is not a Schedule", 2, ()),
        ("grouped_matmul", "x has 3 rows; with gather=False a schedule of 3 tokens with 2 choices each takes 6", 0, LOGITS),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(op, message, position, value):
    given = {
        "moe_schedule": (IDS, Experts(8, 0, 4), None, 0, None),
        "moe_sum": (torch.zeros(6, 4), Routing(IDS, torch.zeros(3, 2)), Experts(8, 0, 4)),
        "grouped_matmul_silu_mul": (torch.zeros(3, 16), WEIGHT, SCHEDULE),
        "grouped_matmul": (torch.zeros(6, 8), torch.zeros(4, 6, 8), SCHEDULE),
    }[op]
    function = getattr(ops, op)

    def call(*arguments):
        if op == "moe_schedule":
            return function(*arguments[:2], **dict(zip(("block", "start", "tickets"), arguments[2:], strict=True)))
        return function(*arguments)

    check_refused(call, changed(position, value, given), f"{op}: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": torch.zeros(4, 8)}, "bias.dtype=torch.float32"),
        ({"bias": torch.zeros(4, 16, dtype=torch.bfloat16)}, "bias has shape (4, 16)"),
        (
            {"bias": torch.zeros(8, 4, dtype=torch.bfloat16).T},
            "bias has stride 4 along its rows; pass bias.contiguous()",
        ),
        ({"bias": [0.0]}, "bias"),
        ({"swiglu": (1.702, 0.0)}, "swiglu=(1.702, 0.0) is not ClampedSwiGLU(alpha, limit) of positive finite numbers"),
        ({"swiglu": (torch.inf, 7.0)}, "is not ClampedSwiGLU(alpha, limit)"),
        ({"swiglu": 7.0}, "swiglu=7.0 is not ClampedSwiGLU(alpha, limit)"),
    ],
    ids=str,
)
def test_other_biases_and_activations_are_refused(options, message):
    arguments = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(4, 8, 8, dtype=torch.bfloat16), SCHEDULE
    check_refused(lambda *given: ops.grouped_matmul_silu_mul(*given, **options), arguments, message)
    if "bias" in options:
        check_refused(lambda *given: ops.grouped_matmul(*given, gather=True, **options), arguments, message)


def test_biases_and_activations_have_no_backward():
    x, weight = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(4, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    for options in ({"bias": torch.zeros(4, 8, dtype=torch.bfloat16)}, {"swiglu": ClampedSwiGLU(1.702, 7.0)}):
        with pytest.raises(RuntimeError, match="bias and swiglu have no backward; leave them out, or call it under"):
            ops.grouped_matmul_silu_mul(x, weight, SCHEDULE, **options)
    bias = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="bias and swiglu have no backward"):
        ops.grouped_matmul(x, weight.detach(), SCHEDULE, gather=True, bias=bias)


def test_rows_that_do_not_begin_on_16_bytes_are_refused():
    arguments = torch.zeros(3, 6, dtype=torch.bfloat16), torch.zeros(4, 6, 6, dtype=torch.bfloat16), SCHEDULE
    check_refused(ops.grouped_matmul_silu_mul, arguments, "K=6 of torch.bfloat16 is 12 bytes, no multiple of 16")


@pytest.mark.parametrize(
    ("message", "sizes"),
    [("total=0 is not a positive integer", (0, 0, 1)), ("first=6 and count=4 reach beyond total=8", (8, 6, 4))],
)
def test_experts_that_there_are_not_are_refused(message, sizes):
    check_refused(Experts, sizes, message)
    check_refused(Experts.whole, (8, 0, 3), "total=8 experts cannot be shared by world_size=3")


# --- compiled -----------------------------------------------------------------------------------------------------------

INTS = torch.zeros(16, dtype=torch.int32)


def built_grouped(
    arch,
    block,
    gather,
    gated,
    dtype=torch.bfloat16,
    N=768,
    K=2048,
    fp8=False,
    experts_fp8=None,
    pairs=4096,
    clamped=False,
    fixed=False,
    wide=False,
):
    """fp8: rows beside a weight of 16 bits; experts_fp8: both operands, columns of the weight under a scale.

    fixed: of the invariant design; wide: the result of a gated GEMM with such scales has 16 bits, else it is in fp8.
    """
    caps, experts = caps_of(arch), 8
    in_fp8 = gated and bool(experts_fp8) and not wide
    call = GroupedCall(block, pairs, N, K, dtype, gather, block_fp8=experts_fp8 is not None, written=in_fp8)
    rule = partial(fixed_tiles_for, "grouped_matmul") if fixed else grouped_tiles_for
    design = rule(call, caps, gated=gated)
    out, weight = torch.zeros(64, K, dtype=dtype), torch.zeros(experts, N * (1 + gated), K, dtype=dtype)
    rows, scales, of_both, written = out.to(E4M3) if fp8 else out, torch.zeros(64) if fp8 else None, None, None
    if experts_fp8 is not None:
        rows, weight, columns = out.to(E4M3), weight.to(E4M3), experts_fp8
        forms = map(tl.constexpr, (128 if columns else 1, columns, columns > 0))
        of_scales = torch.zeros(64)
        width = design.block_n // 2 if gated else design.block_n
        two = tl.constexpr(gated and columns > 0 and N % width != 0)
        of_both = Fp8Scales(of_scales, 1, 64, of_scales, -(-K // 128), *forms, 96, two)
        if in_fp8:
            out, written = rows, Fp8Rows(of_scales, 1, 64, *map(tl.constexpr, (128, tl.bfloat16, False, 0)))
    x = rows if gather else TensorDescriptor(rows, [64, K], [K, 1], [block, design.block_k])
    apart = gated and (design.transposed or experts_fp8 is not None)
    swiglu = (1.702, 7.0) if clamped and gated else (0.0, 0.0)
    even = K % design.block_k == 0
    form = Form(gated, 8 if gather else 0, block, even, not gather, False, apart, False, *swiglu, fixed)
    biases = Biases(torch.zeros(experts, N * (1 + gated), dtype=dtype), N * (1 + gated)) if clamped else None
    constants = {"FORM": form, "BLOCK_N": design.block_n, "BLOCK_K": design.block_k, "TRANSPOSED": design.transposed}
    options = {"num_warps": design.num_warps, "num_stages": design.num_stages, **launch_options(caps)}
    schedule, described = Schedule(INTS, INTS, INTS, INTS, 8, block), weight_descriptor(design, weight, form)
    arguments = x, scales, of_both, None, None, described, biases, out, written, schedule, N, K, 4, None, None, 0
    return compiled(grouped_matmul_kernel, *arguments, arch=arch, **constants, **options)


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("block", [16, 128])
def test_grouped_gemms_compile_and_fit(arch, block):
    for gather, gated in ((True, True), (False, False)):
        kernel = built_grouped(arch, block, gather, gated)
        assert kernel.metadata.shared <= SHARED[arch]
        check_compiles(kernel, arch)


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("block", [16, 128])
def test_grouped_gemms_with_biases_compile_and_fit(arch, block, tmp_path):
    """gpt-oss's: 2880 features of 2880, whose steps of K are not whole ones."""
    for gather, gated in ((True, True), (False, False)):
        kernel = built_grouped(arch, block, gather, gated, N=2880, K=2880, clamped=True)
        assert kernel.metadata.shared <= SHARED[arch]
        check_compiles(kernel, arch)
        assert arch != "sm_90" or stack_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("block", [16, 64, 128])
def test_grouped_gemms_on_sm_90_use_its_hardware_and_no_stack(block, tmp_path):
    """wgmma from shared memory; both operands by TMA where rows are in order, else rows by 16-byte copies."""
    for gather, gated in ((True, True), (False, False)):
        kernel = built_grouped("sm_90", block, gather, gated)
        ptx = kernel.asm["ptx"]
        assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
        assert ("cp.async.cg.shared.global" in ptx) == gather
        assert stack_bytes(kernel, tmp_path) == 0
        # Nothing is read from shared memory into registers to be multiplied; gate and up are one product but in few rows.
        assert "ttg.local_load" not in kernel.asm["ttgir"]
        products = len(re.findall("ttng.warp_group_dot ", kernel.asm["ttgir"]))
        assert products == (2 if gated and block == 16 else 1)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_fixed_tiles_on_sm_90_multiply_by_one_family_of_instructions(block, tmp_path):
    for gather, gated, columns in ((True, True, None), (False, False, None), (False, False, 128)):
        kernel = built_grouped("sm_90", block, gather, gated, fixed=True, experts_fp8=columns)
        ptx = kernel.asm["ptx"]
        used = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", ptx))
        assert used == {f"m64n{block}k{16 if columns is None else 32}"} and "mma.sync" not in ptx
        assert kernel.metadata.shared <= SHARED["sm_90"] and stack_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("arch", ("sm_80", "gfx942"))
def test_fixed_tiles_compile_and_fit(arch):
    for block in (16, 128):
        kernel = built_grouped(arch, block, True, True, fixed=True)
        assert kernel.metadata.shared <= SHARED[arch]


def check_fixed_tiles(device, tokens, sizes):
    """The results of the first tokens are those of all tokens, whatever the tiles of pairs."""
    x, weight = noisy(tokens, 16 * 192, 512, 1, device=device)
    down = operands(1, 16 * 80, 96, device=device)[1].view(16, 80, 96)
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(tokens)]).int().to(device)

    def rows(M):
        schedule = ops.moe_schedule(ids[:M], Experts(16, 0, 16))
        h = ops.grouped_matmul_silu_mul(x[:M], weight.view(16, 192, 512), schedule, invariant=True)
        return ops.grouped_matmul(h, down, schedule, invariant=True)

    whole = rows(tokens)
    for M in sizes:
        assert_identical(rows(M), whole[: M * 4], what=f"M={M}")


def test_rows_of_experts_do_not_depend_on_other_rows():
    weft.simulate(lambda team: check_fixed_tiles("cpu", 40, (1, 9)), 1)


@pytest.mark.gpu(1)
def test_on_a_gpu_rows_of_experts_do_not_depend_on_other_rows():
    check_fixed_tiles("cuda", 600, (1, 7, 30, 64, 100, 250))


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", TARGETS)
def test_a_sum_with_a_gated_summand_compiles(arch):
    rows, logits = torch.zeros(16, 2048, dtype=torch.bfloat16), torch.zeros(2, 61, dtype=torch.bfloat16)
    shared = moe_sum.Shared(rows[:2], logits[:, 60], 61)
    arguments = rows, INTS.view(2, 8), logits[:, :8].contiguous(), shared, rows[:2], 2048, 0, 60
    constants = {"K": 8, "BLOCK": moe_sum.BLOCK, **launch_options(caps_of(arch))}
    check_compiles(compiled(moe_sum.moe_sum_kernel, *arguments, arch=arch, **constants), arch)


@pytest.mark.triton_internals
@pytest.mark.parametrize(
    "arch", ["sm_90", "gfx942", *(pytest.param(a, marks=pytest.mark.sweep) for a in ("sm_80", "sm_100"))]
)
def test_kernels_that_push_rows_compile(arch, tmp_path):
    sizes, caps, rows = Sizes.of(PushRows(), 128, 7168, 8, 64), caps_of(arch), torch.zeros(16, dtype=torch.bfloat16)
    constants = {"SIZES": sizes, "CHUNKS": sizes.chunks, "num_warps": 8, **launch_options(caps)}
    end = Half(ChannelView(INTS, INTS, tl.constexpr(sizes.chunks)), INTS, INTS), a_view()
    for kernel, arguments in (
        (moe_dispatch_kernel, (rows, INTS, rows, 128, Mail(rows, INTS, rows))),
        (moe_combine_kernel, (rows, INTS, rows, rows, 128, Partials(rows))),
        (moe_combine_kernel, (rows, INTS, None, rows, 128, Partials(rows))),
    ):
        made = compiled(kernel, *arguments, *end, arch=arch, **constants)
        check_compiles(made, arch)
        assert arch != "sm_90" or stack_bytes(made, tmp_path) == 0
    constants.pop("CHUNKS")
    made = compiled(copy_chosen_kernel, rows, INTS, rows, 256, a_view(), arch=arch, **constants)
    check_compiles(made, arch)
    assert arch != "sm_90" or stack_bytes(made, tmp_path) == 0


ROWS = torch.zeros(16, dtype=torch.bfloat16)
GROUPED_SCORING = Scoring(softmax=False, biased=True, renormalize=True, groups=8, group_limit=4)
LOCAL = {
    "route": (route.route_kernel, (ROWS, 128, ROWS, INTS, ROWS, None, 64, 128, 1.0),
              {"SCORING": Scoring(True, False, True, 1, 1), "K": 8, "ROWS": 16, "BLOCK": 128, "PARTS": 0}),
    "route of parts": (route.route_kernel, (torch.zeros(16), 129, ROWS, INTS, ROWS, ROWS, 64, 128, 1.0),
                       {"SCORING": Scoring(True, False, True, 1, 1), "K": 8, "ROWS": 1, "BLOCK": 128, "PARTS": 16}),
    "route in groups": (route.route_kernel, (ROWS, 256, ROWS, INTS, ROWS, None, 64, 256, 2.5),
                        {"SCORING": GROUPED_SCORING, "K": 8, "ROWS": 8, "BLOCK": 256, "PARTS": 0}),
    "moe_schedule": (moe_schedule.moe_schedule_kernel, (INTS, INTS, INTS, INTS, INTS, INTS, 4096, 0, 64),
                     {"K": 8, "EXPERTS": 64, "CHOICES": 8, "TOKENS": 256, "BLOCK": 128}),
    "moe_sum": (moe_sum.moe_sum_kernel, (ROWS, INTS, ROWS, moe_sum.Shared(None, None, 0), ROWS, 2048, 0, 64),
                {"K": 8, "BLOCK": 1024}),
    "gradients of moe_sum": (moe_sum.moe_sum_grad_kernel, (ROWS, INTS, ROWS, ROWS, ROWS, ROWS, 2048, 0, 64),
                             {"K": 8, "BLOCK": 1024}),
    "gradients of weights": (grouped_grad.grouped_weight_grad_kernel,
                             (ROWS, ROWS, ROWS, Schedule(INTS, INTS, INTS, INTS, 8, 128), 4096, 768, 2048),
                             {"CHOICES": 8, "EXPERTS": 64, "BLOCK_N": 64, "BLOCK_K": 64, "STEP": 32}),
}  # fmt: skip


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("name", LOCAL)
def test_kernels_of_one_rank_compile(name, arch, tmp_path):
    kernel, arguments, constants = LOCAL[name]
    made = compiled(kernel, *arguments, arch=arch, **constants, **launch_options(caps_of(arch)))
    check_compiles(made, arch)
    assert made.metadata.shared <= SHARED[arch]
    assert arch != "sm_90" or stack_bytes(made, tmp_path) == 0
