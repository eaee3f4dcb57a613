"""A mixture of experts as one function: the whole layer in every layout, both ways of rows, gradients, refusals."""

from types import SimpleNamespace

import pytest
import torch

import weft
from tests.ops.moe.trained import by_torch
from tests.ops.test_compile_layer_kernels import caps_of
from tests.sampled import sampled
from weft import ops
from weft.kernels.fp8 import Fp8
from weft.kernels.fp8 import by_torch as by_torch_in_fp8
from weft.ops.moe.grouped.cases import quantized_experts
from weft.ops.moe.moe_dispatch import DispatchCall
from weft.parallel import mixture
from weft.plan.planned import machine

HIDDEN, FEATURES, MOST = 16, 32, 6
LAYOUTS = [
    (4, (2, 2)), (1, "whole"), (2, "slices"), (3, "whole"), (4, "whole"), (4, (1, 4)), (8, (2, 4)), (8, (4, 2)), (8, "slices")
]  # fmt: skip


def whole(experts):
    """(router, gate_up, down) of all experts in fp64."""
    generator = torch.Generator().manual_seed(0)
    shapes = (experts, HIDDEN), (experts, 2 * FEATURES, HIDDEN), (experts, HIDDEN, FEATURES)
    return [torch.randn(one, generator=generator, dtype=torch.float64) * one[-1] ** -0.5 for one in shapes]


def share(weights, layout, team):
    """This rank's part, in fp32."""
    router, gate_up, down = (weight.float() for weight in weights)
    tp = {"whole": 1, "slices": team.size}[layout] if isinstance(layout, str) else layout[1]
    mine, width = ops.Experts.grouped(len(router), team.rank, team.size // tp, tp), FEATURES // tp
    held, first = slice(mine.first, mine.first + mine.count), team.rank % tp * width
    parts = [part[held, first : first + width] for part in gate_up.chunk(2, dim=1)]
    return router, torch.cat(parts, dim=1), down[held, :, first : first + width].contiguous()


def tokens_of(rank):
    count = (6, 0, 3, 1, 5, 6, 2, 4)[rank]
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.parametrize(
    ("world_size", "layout", "alone"),
    sampled(
        ((*one, alone) for one in LAYOUTS for alone in (False, True)), lambda w, layout, _: (w, layout) == (4, (2, 2))
    ),
)
def test_it_is_the_whole_layer_in_every_layout(world_size, layout, alone, monkeypatch):
    monkeypatch.setattr(mixture, "sends_needed_alone", lambda *call: alone)
    monkeypatch.delattr(ops, "all_gather_grouped_matmul_silu_mul" if alone else "moe_dispatch")
    weights = whole(24 if world_size == 3 else 8)

    def main(team):
        x, named = tokens_of(team.rank).float(), {"k": 2, "max_tokens": MOST, "experts": layout}
        return mixture.moe(x, *share(weights, layout, team), team, **named)

    for rank, found in enumerate(weft.simulate(main, world_size)):
        torch.testing.assert_close(found.double(), by_torch(tokens_of(rank), *weights, 2), rtol=1e-5, atol=1e-5)


def in_fp8(rows, columns=128):
    """``rows`` in bf16 after e4m3, in fp64."""
    return Fp8(*by_torch_in_fp8(rows.bfloat16(), columns)).dequantized(torch.float64)


@pytest.mark.parametrize("scheme", ["block", "channel"])
@pytest.mark.parametrize("alone", [False, True])
def test_experts_in_fp8_take_rows_in_fp8(alone, scheme, monkeypatch):
    """Of blocks they stay in fp8 from where they are sent through both GEMMs."""
    monkeypatch.setattr(mixture, "sends_needed_alone", lambda *call: alone)
    generator, (E, H, N) = torch.Generator().manual_seed(1), (4, 256, 192)
    router, gate_up, down = (
        torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in ((E, H), (E, 2 * N, H), (E, H, N))
    )
    first, second = (quantized_experts(weight, scheme) for weight in (gate_up, down))
    tokens = [torch.randn((count, H), generator=generator).bfloat16() for count in (5, 3)]

    def main(team):
        mine = slice(2 * team.rank, 2 * team.rank + 2)
        held = [Fp8(weight.data[mine].contiguous(), weight.scales[mine].contiguous()) for weight in (first, second)]
        return mixture.moe(tokens[team.rank], router.bfloat16(), *held, team, k=2, max_tokens=5)

    wide = [weight.dequantized(torch.float64) for weight in (first, second)]
    for x, found in zip(tokens, weft.simulate(main, 2), strict=True):
        weights, ids = (x.double() @ router.bfloat16().double().T).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        rows, expected = in_fp8(x, 128 if scheme == "block" else H), torch.zeros(x.shape, dtype=torch.float64)
        for token, expert, weight in zip(
            torch.arange(len(x)).repeat_interleave(2), ids.flatten(), weights.flatten(), strict=True
        ):
            gate, up = (wide[0][expert] @ rows[token]).chunk(2)
            h = in_fp8((torch.nn.functional.silu(gate) * up)[None], 128 if scheme == "block" else N)[0]
            expected[token] += weight * (wide[1][expert] @ h)
        error = (found.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < 0.01, error


@pytest.mark.sweep
@pytest.mark.parametrize("alone", [False, True])
def test_gradients_of_tokens_and_experts_are_those_of_the_whole_layer(alone, monkeypatch):
    monkeypatch.setattr(mixture, "sends_needed_alone", lambda *call: alone)
    weights, layout, every = whole(8), (2, 2), [tokens_of(rank) for rank in range(4)]

    def main(team):
        leaves = [
            one.detach().clone().requires_grad_()
            for one in (tokens_of(team.rank).float(), *share(weights, layout, team))
        ]
        y = mixture.moe(*leaves, team, k=2, max_tokens=MOST, experts=layout)
        (y * tokens_of(team.rank + 1).float()[:1].sum(0)).sum().backward()
        return [leaf.grad for leaf in leaves]

    leaves = [one.requires_grad_() for one in (*every, *weights)]
    for rank, x in enumerate(leaves[:4]):
        (by_torch(x, *leaves[4:], 2) * tokens_of(rank + 1)[:1].sum(0)).sum().backward()
    for rank, (of_x, _, *of_experts) in enumerate(weft.simulate(main, 4)):
        torch.testing.assert_close(of_x.double(), leaves[rank].grad, rtol=1e-4, atol=1e-5)
        team = SimpleNamespace(rank=rank, size=4)
        expected = share([leaf.grad for leaf in leaves[4:]], layout, team)[1:]
        for one, other in zip(of_experts, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("k", "tp", "alone"), [(8, 1, False), (3, 1, True), (3, 2, False), (1, 2, True)])
def test_rows_go_to_all_ranks_where_most_of_them_need_each(k, tp, alone):
    """A rank needs 0.90 and 0.58 of the rows of another of four, and 0.88 and 0.5 where two share their experts."""
    call = DispatchCall(4096, k, 4096, torch.bfloat16, tp=tp)
    assert mixture.sends_needed_alone(call, machine(caps_of("sm_90"), 4)) == alone


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("experts='rows' is neither 'whole' nor 'slices' nor (ep, tp) with ep * tp = 2 ranks", {"experts": "rows"}),
        ("experts=(2, 2) is neither", {"experts": (2, 2)}),
        ("experts=2 is neither", {"experts": 2}),
        ("gate_up has 4 experts; slices gives each of 2 ranks 8", {"experts": "slices"}),
        ("moe: max_tokens=2 is not an integer of at least 3", {"max_tokens": 2}),
    ],
)
def test_wrong_arguments_are_refused(message, fields):
    def main(team):
        x, named = torch.zeros(3, HIDDEN), {"k": 2, "max_tokens": 3, **fields}
        with pytest.raises(ValueError) as refused:
            mixture.moe(x, *share(whole(8), "whole", team), team, **named)
        assert message in str(refused.value) and "\n" not in str(refused.value)

    weft.simulate(main, 2)
