"""MoE against the whole modules of transformers, and against a loop, in both layouts, and modules that it refuses."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from tests.layers.test_layers import joined, randomised, share
from tests.sampled import sampled
from weft import ops
from weft.layers import MoE, plan_layer
from weft.layers.gradients import SummedGradient
from weft.parallel import fused as kernels
from weft.parallel import mixture
from weft.parallel.recipe import StepPlan
from weft.parallel.sequence_parallel import SequenceParallel
from weft.parallel.sharding import fill
from weft.plan.memo import forget

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: E402
from transformers.models.mixtral import modeling_mixtral  # noqa: E402
from transformers.models.qwen2_moe import modeling_qwen2_moe  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402

MODES = ["reference", "sequence_parallel", "replicated"]
SIZES = {"hidden_size": 32, "num_experts_per_tok": 3}


def block(kind):
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=8)
        return modeling_mixtral.MixtralSparseMoeBlock(config)
    if kind.startswith("qwen2"):
        sizes = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 96, "num_experts": 8}
        config = transformers.Qwen2MoeConfig(**SIZES, **sizes, norm_topk_prob=kind == "qwen2 renormalized")
        return modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(config)
    renormalized = kind == "qwen3"
    config = transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8, norm_topk_prob=renormalized)
    return modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)


def whole(module, x):
    found = module(x[None])
    return (found[0] if isinstance(found, tuple) else found).view(x.shape)


def check(x, expected, make, world_size):
    """MoEs of all modes and recipes; ``make(team, mode)`` makes one."""

    def main(team):
        found = {}
        for mode in MODES:
            moe = make(team, mode)
            for fused in (False, True):
                plan = plan_layer(len(x), mode=mode, team=team, fused=fused)
                found[mode, fused] = moe(share(x, team, mode), plan)
        return found

    by_rank = weft.simulate(main, world_size, seed=world_size)
    for mode, fused in by_rank[0]:
        found = joined([of_rank[mode, fused] for of_rank in by_rank], mode, len(x))
        error = ((found - expected).square().mean() / expected.square().mean()).sqrt()
        assert error < 1e-6, (mode, fused)


SPLITS = [(1, "whole"), (2, "slices"), (4, "whole"), (8, "whole"), (3, "slices")]
GROUPS = [(4, (2, 2)), (8, (2, 4)), (8, (4, 2)), (2, (2, 1)), (2, (1, 2)), (3, (1, 3))]


# Kinds differ in how they are read and in the weights of choices, not in how ranks share the work.
@pytest.mark.parametrize(
    ("kind", "world_size", "layout"),
    sampled(
        ((kind, *split) for split in SPLITS for kind in ("qwen3", "qwen3 not renormalized", "mixtral")),
        lambda kind, world_size, layout: world_size == 2 or kind == "qwen3" and world_size < 5,
    ),
)
def test_a_mixture_over_ranks_is_the_whole_one(kind, world_size, layout):
    module, x = randomised(block(kind)), torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    check(x, whole(module, x), lambda team, mode: MoE.from_module(module, team, mode, layout), world_size)


@pytest.mark.parametrize(
    ("kind", "world_size", "layout"),
    [
        ("qwen2", 4, (2, 2)),
        *(pytest.param(kind, *group, marks=pytest.mark.sweep) for kind in ("qwen2", "mixtral") for group in GROUPS),
    ],
)
def test_groups_of_ranks_with_slices_of_their_experts_are_the_whole_mixture(kind, world_size, layout):
    module, x = randomised(block(kind)), torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    check(x, whole(module, x), lambda team, mode: MoE.from_module(module, team, mode, layout), world_size)


def test_a_rank_of_a_group_holds_its_slices_of_its_experts_and_nothing_else():
    def main(team):
        moe = MoE(
            **SIZES,
            intermediate_size=48,
            num_experts=8,
            layout=(2, 2),
            team=team,
            mode="replicated",
            dtype=torch.float32,
        )
        assert moe.gate_up.shape == (4, 2 * 24, 32) and moe.down.shape == (4, 32, 24)
        return {name: (shard.dim, shard.start, tuple(shard.target.shape)) for name, shard in moe.shards().items()}

    for rank, shards in enumerate(weft.simulate(main, 4)):
        assert shards.pop("gate.weight") == (0, 0, (8, 32))
        mine = range(rank // 2 * 4, rank // 2 * 4 + 4)
        assert {int(name.split(".")[1]) for name in shards} == set(mine) and len(shards) == 12
        for e in mine:
            assert shards[f"experts.{e}.up_proj.weight"] == (0, rank % 2 * 24, (24, 32))
            assert shards[f"experts.{e}.down_proj.weight"] == (1, rank % 2 * 24, (32, 24))


TRAINED = [("qwen2", "replicated", False, 2, "slices"), ("qwen2", "sequence_parallel", True, 2, "whole")]


@pytest.mark.parametrize(
    ("kind", "mode", "fused", "world_size", "layout"),
    [
        *TRAINED,
        *(
            pytest.param(kind, mode, fused, *split, marks=pytest.mark.sweep)
            for kind in ("qwen2", "qwen3")
            for mode in MODES[1:]
            for fused in (False, True)
            for split in ((1, "whole"), (2, "whole"), (2, "slices"), (3, "slices"), (4, (2, 2)))
        ),
    ],
)
def test_two_steps_of_sgd_are_those_of_the_whole_layer(kind, mode, fused, world_size, layout):
    module, generator = randomised(block(kind)), torch.Generator().manual_seed(0)
    x, grad = (torch.randn((8, 32), generator=generator) for _ in range(2))

    def steps(module, loss):
        optimizer = torch.optim.SGD(module.requires_grad_().parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    trained = copy.deepcopy(module)
    steps(trained, lambda: (whole(trained, x) * grad).sum() / 8)
    trained.requires_grad_(False)

    def main(team):
        moe, before, expected = (MoE.from_module(one, team, mode, layout) for one in (module, module, trained))
        plan = plan_layer(8, mode=mode, team=team, fused=fused)
        mine, of_mine = share(x, team, mode), share(grad, team, mode)
        summed = team.size if mode == "replicated" else 1
        steps(moe, lambda: (moe(mine, plan) * of_mine).sum() / 8 / summed)
        for (name, one), other, start in zip(
            moe.named_parameters(), expected.parameters(), before.parameters(), strict=True
        ):
            moved = (other - start).square().mean().sqrt()
            assert moved > 1e-4 and (one - other).square().mean().sqrt() < 1e-4 * moved, name
        return moe.router.detach().clone()

    routers = weft.simulate(main, world_size)
    assert all(torch.equal(router, routers[0]) for router in routers)


def test_training_by_torch_s_all_reduce_is_refused():
    def main(team):
        moe = MoE.from_module(randomised(block("qwen3")), team, "reference").requires_grad_()
        with pytest.raises(RuntimeError, match="mode='reference' has no gradients; use mode='replicated'"):
            moe(torch.zeros(2, 32))

    weft.simulate(main, 1)


SHARED_SPLITS = [("qwen2", *split) for split in SPLITS] + [("qwen2 renormalized", 2, "whole")]


@pytest.mark.parametrize(
    ("kind", "world_size", "layout"),
    sampled(SHARED_SPLITS, lambda kind, world_size, layout: world_size in (2, 3)),
)
def test_a_shared_expert_over_ranks_is_the_whole_one(kind, world_size, layout):
    module, x = randomised(block(kind)), torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    check(x, whole(module, x), lambda team, mode: MoE.from_module(module, team, mode, layout), world_size)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, "whole"), *(pytest.param(*one, marks=pytest.mark.sweep) for one in (*SPLITS, *GROUPS))],
)
def test_rows_travel_under_gemms_with_a_shared_expert_too(world_size, layout, monkeypatch):
    """No collective has a launch of its own, and rows are sent once each way."""
    module, x = randomised(block("qwen2")), torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    expected = whole(module, x)

    def refuse(*arguments):
        raise AssertionError

    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_gather_grouped_matmul_silu_mul"):
        monkeypatch.setattr(ops, name, refuse)

    def main(team):
        moe = MoE.from_module(module, team, "sequence_parallel", layout)
        plan = StepPlan(recipe=SequenceParallel(team=team, local=kernels))
        return moe(share(x, team, "sequence_parallel"), plan)

    found = joined(weft.simulate(main, world_size), "sequence_parallel", len(x))
    assert ((found - expected).square().mean() / expected.square().mean()).sqrt() < 1e-6


ROUTINGS = {
    "groups by their best": {"groups": 4, "group_limit": 2, "scale": 2.5},
    "DeepSeek-V3": {"scoring": "sigmoid", "groups": 4, "group_limit": 2, "scale": 2.5, "router_bias": True},
    "DeepSeek-V3 not renormalized": {"scoring": "sigmoid", "router_bias": True, "norm_topk_prob": False},
    "DeepSeek-V3 with a shared expert": {
        "scoring": "sigmoid", "router_bias": True, "groups": 2, "scale": 0.5, "shared_intermediate_size": 96,
    },
}  # fmt: skip


def by_loop(x, tensors, *, scoring="softmax", router_bias=False, groups=1, group_limit=1, scale=1.0, **others):
    """A mixture of 8 experts, token by token, from its whole weights; 3 experts a token."""

    def mlp(row, name):
        gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return down @ (F.silu(gate @ row) * (up @ row))

    y = torch.zeros_like(x)
    for row, out in zip(x, y, strict=True):
        logits = tensors["gate.weight"] @ row
        scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(0)
        choose_by = scores + tensors["gate.e_score_correction_bias"] if router_bias else scores
        of_groups = [group.sort(descending=True).values for group in choose_by.chunk(groups)]
        values = torch.stack([group[:2].sum() if router_bias else group[0] for group in of_groups])
        inside = values.topk(group_limit).indices.repeat_interleave(8 // groups) * (8 // groups)
        inside += torch.arange(8 // groups).repeat(group_limit)
        chosen = inside[choose_by[inside].topk(3).indices]
        total = scores[chosen].sum() if others.get("norm_topk_prob", True) else 1.0
        for e in chosen.tolist():
            out += scale * scores[e] / total * mlp(row, f"experts.{e}")
        if "shared_intermediate_size" in others:
            out += mlp(row, "shared_expert")
    return y


def drawn(options):
    """(x, whole weights by name) of a mixture with these options."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate.weight": (8, 32)}
    if options.get("router_bias"):
        shapes["gate.e_score_correction_bias"] = (8,)
    features = {f"experts.{e}": 48 for e in range(8)}
    if "shared_intermediate_size" in options:
        features["shared_expert"] = options["shared_intermediate_size"]
    for name, size in features.items():
        shapes |= {f"{name}.{part}_proj.weight": (size, 32) for part in ("gate", "up")}
        shapes[f"{name}.down_proj.weight"] = 32, size
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    return torch.randn(24, 32, generator=generator), tensors


def filled(tensors, options, team, mode, layout):
    sizes = {**SIZES, "intermediate_size": 48, "num_experts": 8}
    moe = MoE(**sizes, **options, layout=layout, team=team, mode=mode, dtype=torch.float32)
    fill(moe.shards(), {name: tensors[name] for name in moe.shards()}, "drawn")
    return moe


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, "whole"), *(pytest.param(*split, marks=pytest.mark.sweep) for split in SPLITS)]
)
def test_routing_like_deepseek_s_is_that_of_a_loop(name, world_size, layout):
    options = ROUTINGS[name]
    x, tensors = drawn(options)
    expected = by_loop(x, tensors, **options)
    check(x, expected, lambda team, mode: filled(tensors, options, team, mode, layout), world_size)


@pytest.mark.parametrize(
    "mistake",
    [{"scoring": "softmax"}, {"groups": 1, "group_limit": 1}, {"group_limit": 3}, {"scale": 1.0}, {"bias": None}],
)
def test_a_mistake_in_routing_is_seen(mistake):
    options = ROUTINGS["DeepSeek-V3"]
    x, tensors = drawn(options)
    expected = by_loop(x, tensors, **options)

    def main(team):
        moe = filled(tensors, options, team, "replicated", "whole")
        if "bias" in mistake:
            moe.router_bias = None
        else:
            moe.gating = moe.gating._replace(**mistake)
        return moe(x, plan_layer(len(x), mode="replicated", team=team, fused=True))

    found = weft.simulate(main, 1)[0]
    assert ((found - expected).square().mean() / expected.square().mean()).sqrt() > 0.05


MISTAKES = {
    "gate and up swapped": lambda moe: moe.gate_up.data.copy_(torch.cat(moe.gate_up.data.chunk(2, dim=1)[::-1], dim=1)),
    "the neighbour's weights": lambda moe: moe.down.data.copy_(moe.down.data.roll(1, 0)),
    "no renormalisation": lambda moe: setattr(moe, "gating", moe.gating._replace(renormalize=False)),
    "one expert less": lambda moe: setattr(moe, "gating", moe.gating._replace(k=2)),
    "the neighbour's experts": lambda moe: setattr(
        moe, "experts", type(moe.experts)(8, (moe.experts.first + 4) % 8, moe.experts.count)
    ),
}


class Ungated(MoE):
    """The sigmoid gate of the shared expert forgotten."""

    @property
    def weights(self):
        return super().weights._replace(router=self.router[: self.experts.total])


class Undivided(MoE):
    """A shared expert that each rank adds whole: as if its features were not split."""

    @property
    def weights(self):
        weights = super().weights
        return weights._replace(shared=weights.shared._replace(down=weights.shared.down * self.team.size))


MISTAKES |= {
    "the shared expert's gate forgotten": lambda moe: setattr(moe, "__class__", Ungated),
    "the shared expert not split": lambda moe: setattr(moe, "__class__", Undivided),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    module, x = randomised(block("qwen2" if "shared" in mistake else "qwen3")), torch.randn(24, 32)
    expected = whole(module, x)

    def main(team):
        moe = MoE.from_module(module, team, "replicated")
        MISTAKES[mistake](moe)
        return moe(x, plan_layer(len(x), mode="replicated", team=team, fused=True))

    found = weft.simulate(main, 2)[0]
    assert ((found - expected).square().mean() / expected.square().mean()).sqrt() > 0.05


def refused(message, **changes):
    def main(team):
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
        arguments = {**sizes, "team": team, "mode": "replicated", "dtype": torch.float32, **changes}
        with pytest.raises(ValueError, match=message):
            MoE(**arguments)

    weft.simulate(main, 3)


def test_sizes_that_cannot_be_split_are_refused():
    refused("total=8 experts cannot be shared by world_size=3")
    refused("intermediate_size=50 is not divisible by world_size=3", layout="slices", intermediate_size=50)
    refused("layout='rows' is not one of 'whole', 'slices' or a tuple", layout="rows")
    refused(r"layout=\(2, 2\) is for 4 ranks, not for world_size=3", layout=(2, 2))
    refused("total=8 experts cannot be shared by ep=3 groups", layout=(3, 1))
    refused(r"intermediate_size=50 is not divisible by tp=3 of layout=\(1, 3\)", layout=(1, 3), intermediate_size=50)
    refused(r"layout=\(3, 0\) is not \(ep, tp\)", layout=(3, 0))
    refused(r"layout=\(3,\) is not \(ep, tp\)", layout=(3,))
    refused(r"layout=\[1, 3\] is not one of", layout=[1, 3])
    refused("num_experts_per_tok=9 is not an integer in 1 .. 8", num_experts_per_tok=9)
    refused("num_experts_per_tok=17 is not an integer in 1 .. 16", num_experts=24, num_experts_per_tok=17)
    refused("shared_intermediate_size=50 is not divisible by world_size=3", num_experts=9, shared_intermediate_size=50)


def test_options_that_do_not_fit_are_refused():
    refused("num_experts=1026 is not an integer in 1 .. 1024", num_experts=1026)
    refused("scoring='relu' is not one of 'softmax', 'sigmoid'", scoring="relu")
    refused("MoE: groups=3 does not divide the 8 experts", groups=3)
    refused("MoE: k=2 is more than 16, or than the 1 experts to choose from", groups=8)
    refused("shared_intermediate_size=0 is not a positive integer", num_experts=9, shared_intermediate_size=0)
    refused("shared_gate=True without shared_intermediate_size", num_experts=9, shared_gate=True)
    refused("shared_gate=1 is not True or False", shared_gate=1, shared_intermediate_size=48)


class Doubled(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def test_modules_that_compute_something_else_are_refused():
    config = transformers.DeepseekV3Config(**SIZES, moe_intermediate_size=48, n_routed_experts=8)
    shared = modeling_deepseek_v3.DeepseekV3MoE(config)
    doubled = Doubled(transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8))

    def main(team):
        for module, message in (
            (shared, "module=DeepseekV3MoE has shared_experts beside its experts"),
            (doubled, "module=Doubled gives another result than softmax routing to 8 experts, 3 a token"),
            (nn.Linear(2, 2), "module=Linear has no gate, experts"),
        ):
            with pytest.raises(ValueError, match=message):
                MoE.from_module(randomised(module), team, "replicated")

    weft.simulate(main, 1)


def test_a_layer_s_schedules_share_an_arrival_counter(monkeypatch):
    """One that each call makes is a launch more."""
    module, x = randomised(block("qwen3")), torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    given, matmul_route_schedule = [], ops.matmul_route_schedule

    def scheduled(*arguments, tickets, **gating):
        given.append(tickets)
        return matmul_route_schedule(*arguments, tickets=tickets, **gating)

    monkeypatch.setattr(ops, "matmul_route_schedule", scheduled)

    def main(team):
        moe = MoE.from_module(module, team, "replicated")
        plan = plan_layer(len(x), mode="replicated", team=team, fused=True)
        assert torch.equal(moe(x, plan), moe(x, plan))
        assert given[0] is given[1] is moe.tickets and not moe.tickets.any()

    weft.simulate(main, 1)


def traced(function, *given, backend="eager"):
    """``function(*given)`` by torch.compile, before any call has made a plan."""
    forget()
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)(*given)


def test_torch_compile_traces_a_layer_and_its_function_before_any_call():
    """Of so many tokens that the router takes three launches, and of few whose rows are sent alone."""

    def main(team):
        layer = MoE(**SIZES, intermediate_size=48, num_experts=8, team=team, mode="replicated", dtype=torch.float32)
        weights = layer.router, layer.gate_up, layer.down
        for weight in weights:
            weight.data.normal_(0, 0.1)
        x = torch.randn(140, 32)
        torch.testing.assert_close(traced(layer, x), layer(x))
        apart = lambda x: mixture.moe(x, *weights, team, k=1, max_tokens=len(x))  # noqa: E731
        torch.testing.assert_close(traced(apart, x[:3]), apart(x[:3]))

    with torch.no_grad():
        weft.simulate(main, 1)
    torch._dynamo.reset()


def test_torch_compile_traces_the_summed_gradient_of_a_parameter():
    def main(team):
        weight = torch.full((3,), 2.0, requires_grad=True)
        traced(lambda w: SummedGradient.apply(w, team) * (team.rank + 1), weight, backend="aot_eager").sum().backward()
        return weight.grad.tolist()

    assert weft.simulate(main, 2) == [[3.0] * 3] * 2
    torch._dynamo.reset()
