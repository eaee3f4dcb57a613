"""Experts as DeepSeek and GLM name them in config.json, beside shared ones and after dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models.family import Content, ExpertOptions, count_of, experts_of, flag, number_of

READS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
)
# Defaults of GLM-4.5; most families have a few other values.
DEFAULTS: Content = {
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
# Keys of the code that came with a checkpoint: transformers has what these values say.
SIGMOID_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
    "ep_size": (1, None),
}
SOFTMAX_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("softmax", None),
    "norm_topk_prob": (False, None),  # transformers does not read it
    "moe_layer_freq": (1, None),
    "ep_size": (1, None),
}


def sigmoid_experts(
    content: Content, total: str = "n_routed_experts", shared: str = "n_shared_experts"
) -> ExpertOptions:
    """Experts of DeepSeek-V3 and GLM-4.5: sigmoid scores, with a bias for the choice alone.

    total, shared  keys of the numbers of routed and of shared experts
    """
    return _experts(
        content,
        names=(total, shared),
        groups=(count_of(content, "n_group"), count_of(content, "topk_group")),
        scoring="sigmoid",
        router_bias=True,
        norm_topk_prob=flag(content, "norm_topk_prob"),
    )


def softmax_experts(content: Content) -> ExpertOptions:
    """Experts of DeepSeek-V2: softmax scores as they are, chosen in all groups or in the best ones."""
    method = content.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"config.json: topk_method={quoted(method)} is not supported; weft runs 'greedy' and 'group_limited_greedy'"
        )
    limited = method == "group_limited_greedy"
    groups = (count_of(content, "n_group"), count_of(content, "topk_group")) if limited else (1, 1)
    return _experts(content, groups=groups, norm_topk_prob=False)


def by_layer_types(options: ExpertOptions, content: Content) -> ExpertOptions:
    """The same experts in the layers that mlp_layer_types calls sparse; without it in the same layers."""
    if (types := content.get("mlp_layer_types")) is None:
        return options
    layers = content["num_hidden_layers"]
    if not isinstance(types, list) or len(types) != layers or any(kind not in ("dense", "sparse") for kind in types):
        raise CheckpointError(
            f"config.json: mlp_layer_types={quoted(types)} is not a list of 'dense' and 'sparse' for "
            f"num_hidden_layers={layers}"
        )
    return replace(options, layers=tuple(kind == "sparse" for kind in types))


def _experts(
    content: Content,
    *,
    groups: tuple[int, int],
    names: tuple[str, str] = ("n_routed_experts", "n_shared_experts"),
    **scoring: Any,
) -> ExpertOptions:
    total, chosen = experts_of(content, names[0])
    (count, limit), intermediate_size = groups, count_of(content, "moe_intermediate_size")
    if total % count or limit > count or chosen > total // count * limit:
        raise CheckpointError(
            f"config.json: n_group={count}, topk_group={limit}: num_experts_per_tok={chosen} of {total} experts do not lie "
            f"in topk_group of n_group equal groups"
        )
    shared, dense = content.get(names[1]), content["first_k_dense_replace"]
    if type(dense) is not int or dense < 0:
        raise CheckpointError(f"config.json: first_k_dense_replace={quoted(dense)} is not an integer of at least 0")
    return ExpertOptions(
        num_experts=total,
        num_experts_per_tok=chosen,
        intermediate_size=intermediate_size,
        groups=count,
        group_limit=limit,
        scale=number_of(content, "routed_scaling_factor"),
        shared_intermediate_size=None if shared is None else intermediate_size * count_of(content, names[1]),
        layers=tuple(layer >= dense for layer in range(content["num_hidden_layers"])),
        **scoring,
    )
