"""Mixtures with the options of further families are what transformers' modules compute, in all layouts and modes."""

from types import SimpleNamespace

import pytest
import torch

import weft
from tests.layers.test_layers import joined, randomised, share
from tests.sampled import sampled
from weft.layers import MoE, plan_layer
from weft.models.decoder import _feed_forward
from weft.models.family import WeightNames
from weft.models.glm4_moe import GLM4_MOE
from weft.models.gpt_oss import GPT_OSS
from weft.models.granitemoe import GRANITEMOE
from weft.models.olmoe import OLMOE
from weft.models.routed_experts import sigmoid_experts, softmax_experts
from weft.models.stacked_experts import as_stored
from weft.parallel.sharding import fill, under

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe  # noqa: E402
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE  # noqa: E402
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP  # noqa: E402
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeMoE  # noqa: E402
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock  # noqa: E402

MODES = ["reference", "sequence_parallel", "replicated"]
# A name in transformers' modules where its checkpoints have another one.
ROUTED = {
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}  # fmt: skip
SHARED = WeightNames(shared_expert="shared_experts")
V2 = ROUTED | {"norm_topk_prob": False, "topk_method": "group_limited_greedy"}
SOME = {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3}
CLAMPED = SOME | {"swiglu_alpha": 1.3, "swiglu_limit": 0.4}
KINDS = {
    "olmoe": ("Olmoe", OlmoeSparseMoeBlock, {**SOME, "num_experts": 8}, OLMOE.experts, OLMOE.weights),
    "granitemoe": ("GraniteMoe", GraniteMoeMoE, SOME, GRANITEMOE.experts, WeightNames(router="router")),
    "glm4_moe": ("Glm4Moe", Glm4MoeMoE, ROUTED, GLM4_MOE.experts, GLM4_MOE.weights),
    "glm4_moe raw": ("Glm4Moe", Glm4MoeMoE, ROUTED | {"norm_topk_prob": False}, GLM4_MOE.experts, GLM4_MOE.weights),
    "deepseek_v3": ("DeepseekV3", DeepseekV3MoE, ROUTED, sigmoid_experts, SHARED),
    "deepseek_v2": ("DeepseekV2", DeepseekV2Moe, V2, softmax_experts, SHARED),
    "deepseek_v2 greedy": ("DeepseekV2", DeepseekV2Moe, V2 | {"topk_method": "greedy"}, softmax_experts, SHARED),
    "gpt_oss": ("GptOss", GptOssMLP, CLAMPED, GPT_OSS.experts, GPT_OSS.weights),
}


def make(kind):
    """(transformers' module, options and names of weft's)"""
    name, module, content, experts, names = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(hidden_size=32, **content)
    block = randomised(module(config))
    for buffer in block.buffers():
        torch.nn.init.normal_(buffer, std=0.3)
    content = {"norm_topk_prob": False} | content
    return block, SimpleNamespace(
        hidden_size=32, intermediate_size=48, experts=experts(content), family=SimpleNamespace(weights=names),
        has_experts=lambda layer: True,
    )  # fmt: skip


def whole(module, x):
    result = module(x[None])
    return (result[0] if isinstance(result, tuple) else result).view(x.shape)


def filled(block, config, team, mode, layout):
    moe = _feed_forward(config, 1, layout, team=team, mode=mode, dtype=torch.float32, formats=None)
    assert isinstance(moe, MoE)
    tensors = {f"mlp.{name}": tensor for name, tensor in block.state_dict().items()}
    shards = as_stored(under("mlp", moe.shards()), SimpleNamespace(has=tensors.__contains__), config.family.weights, 8)
    fill(shards, {name: tensors[name] for name in shards}, "the block")  # one rank of a group has a bias of down
    return moe


LAYOUTS = [
    (1, "whole"), (2, "whole"), (2, "slices"), (3, "slices"), (4, (2, 2)), (8, "whole"), (8, (2, 4)), (8, (4, 2)),
]  # fmt: skip
IN_SAMPLE = [
    ("olmoe", 2, "whole"), ("granitemoe", 3, "slices"), ("glm4_moe", 4, (2, 2)), ("glm4_moe raw", 2, "whole"),
    ("deepseek_v3", 2, "slices"), ("deepseek_v2", 2, "whole"), ("deepseek_v2 greedy", 2, "slices"),
    ("gpt_oss", 1, "whole"), ("gpt_oss", 2, "slices"), ("gpt_oss", 4, (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "world_size", "layout"),
    sampled([(kind, *layout) for kind in KINDS for layout in LAYOUTS], lambda *one: one in IN_SAMPLE),
)
def test_a_mixture_over_ranks_is_that_of_transformers(kind, world_size, layout):
    block, config = make(kind)
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    expected = whole(block, x)

    def main(team):
        results = {}
        for mode in MODES:
            moe = filled(block, config, team, mode, layout)
            for fused in (False, True):
                plan = plan_layer(len(x), mode=mode, team=team, fused=fused)
                results[mode, fused] = moe(share(x, team, mode), plan)
        return results

    by_rank = weft.simulate(main, world_size, seed=world_size)
    for mode, fused in by_rank[0]:
        result = joined([of_rank[mode, fused] for of_rank in by_rank], mode, len(x))
        assert ((result - expected).square().mean() / expected.square().mean()).sqrt() < 1e-6, (mode, fused)
