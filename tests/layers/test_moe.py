"""MoE against the whole modules of transformers, in both layouts, and modules that it refuses."""

import pytest
import torch
from torch import nn

import weft
from tests.layers.test_layers import joined, randomised, share
from weft.layers import MoE, plan_layer

transformers = pytest.importorskip("transformers")
from transformers.models.mixtral import modeling_mixtral  # noqa: E402
from transformers.models.qwen2_moe import modeling_qwen2_moe  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402

MODES = ["reference", "sequence_parallel", "replicated"]
SIZES = {"hidden_size": 32, "num_experts_per_tok": 3}


def block(kind):
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=8)
        return modeling_mixtral.MixtralSparseMoeBlock(config)
    renormalized = kind == "qwen3"
    config = transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8, norm_topk_prob=renormalized)
    return modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)


def whole(module, x):
    found = module(x[None])
    return (found[0] if isinstance(found, tuple) else found).view(x.shape)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 not renormalized", "mixtral"])
@pytest.mark.parametrize(
    ("world_size", "layout"), [(1, "whole"), (2, "slices"), (4, "whole"), (8, "whole"), (3, "slices")]
)
def test_a_mixture_over_ranks_is_the_whole_one(kind, world_size, layout):
    module, x = randomised(block(kind)), torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    expected = whole(module, x)

    def main(team):
        found = {}
        for mode in MODES:
            moe = MoE.from_module(module, team, mode, layout)
            for fused in (False, True):
                plan = plan_layer(len(x), mode=mode, team=team, fused=fused)
                found[mode, fused] = moe(share(x, team, mode), plan)
        return found

    by_rank = weft.simulate(main, world_size, seed=world_size)
    for mode, fused in by_rank[0]:
        found = joined([of_rank[mode, fused] for of_rank in by_rank], mode, len(x))
        error = ((found - expected).square().mean() / expected.square().mean()).sqrt()
        assert error < 1e-6, (mode, fused)


MISTAKES = {
    "gate and up swapped": lambda moe: moe.gate_up.data.copy_(torch.cat(moe.gate_up.data.chunk(2, dim=1)[::-1], dim=1)),
    "the neighbour's weights": lambda moe: moe.down.data.copy_(moe.down.data.roll(1, 0)),
    "no renormalisation": lambda moe: setattr(moe, "gating", moe.gating._replace(renormalize=False)),
    "one expert less": lambda moe: setattr(moe, "gating", moe.gating._replace(k=2)),
    "the neighbour's experts": lambda moe: setattr(
        moe, "experts", type(moe.experts)(8, (moe.experts.first + 4) % 8, moe.experts.count)
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    module, x = randomised(block("qwen3")), torch.randn(24, 32)
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
    refused("layout='rows' is not one of 'whole', 'slices'", layout="rows")
    refused("num_experts_per_tok=9 is not an integer in 1 .. 8", num_experts_per_tok=9)


class Doubled(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def test_modules_that_compute_something_else_are_refused():
    config = transformers.Qwen2MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8)
    shared = modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(config)
    doubled = Doubled(transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8))

    def main(team):
        for module, message in (
            (shared, "module=Qwen2MoeSparseMoeBlock has shared_expert, shared_expert_gate beside its experts"),
            (doubled, "module=Doubled gives another result than softmax routing to 8 experts, 3 a token"),
            (nn.Linear(2, 2), "module=Linear has no gate, experts"),
        ):
            with pytest.raises(ValueError, match=message):
                MoE.from_module(randomised(module), team, "replicated")

    weft.simulate(main, 1)
