"""Every family is what transformers computes: over 1 to 8 virtual ranks, in every recipe, by tests that can fail."""

import dataclasses

import pytest
import torch

import weft
from tests.against_transformers import (
    FAMILIES,
    TOLERANCE,
    greedy,
    prompt,
    reference_greedy,
    reference_logits,
    relative_rms,
)
from tests.sampled import sampled
from tests.teacher_forced import all_logits, in_three_ways
from weft.models import Decoder
from weft.parallel.rotary import rotary_angles

MODES = ("torch", "ag_rs", "gemm_ar")
LENGTH, CUTS = 9, (4, 6)  # chunks that begin and end within the windows of 4 and 5 tokens


def checkpoint_of(make_checkpoint, name, world_size=1, **changes):
    if world_size == 3:
        # Three ranks do not split the 8 heads of the others.
        changes |= {"num_attention_heads": 6, "num_key_value_heads": 6 if FAMILIES[name].get("kv_heads") == 8 else 3}
        # transformers derives the number of LongRoPE's factors from hidden_size, whatever head_dim says.
        changes |= {"hidden_size": 96} if name.startswith("phi3") else {}
        if "linear_num_key_heads" in FAMILIES[name]:
            changes |= {"linear_num_key_heads": 6, "linear_num_value_heads": 12}
        if name in ("olmoe", "flex-olmo", "helium"):
            changes["hidden_size"] = 96  # of all heads together, in transformers' norms or o_proj
        if name == "qwen3-next":
            changes["initializer_range"] = 0.08  # of 0.1 transformers' own logits are 1.2e-5 from those in fp64
    return make_checkpoint(**FAMILIES[name] | changes)


def answers(team, directory, mode, tokens, steps, fused=False, layout=None):
    model = Decoder.from_pretrained(directory, team, mode=mode, fused=fused, expert_layout=layout)
    return in_three_ways(model, tokens, CUTS), greedy(model, tokens.tolist(), steps)


def check(made, mode, world_size, batch=3, steps=64, fused=False, layout=None):
    """Logits at once, in chunks and by decoding, and greedy tokens."""
    directory, reference = made
    tokens = prompt(batch, LENGTH)
    expected, expected_tokens = reference_logits(reference, tokens), reference_greedy(reference, tokens, steps)
    assert len(expected_tokens.unique()) > steps // 4  # a model that repeats itself would agree too easily
    for logits, generated in weft.simulate(answers, world_size, args=(directory, mode, tokens, steps, fused, layout)):
        for way, found in zip(("at once", "in chunks", "by decoding"), logits, strict=True):
            assert relative_rms(found, expected) <= TOLERANCE, way
        assert torch.equal(generated.T, expected_tokens)


# A family, a number of ranks and a recipe at a time; the sweep has all of them.
SAMPLE = [
    ("llama-3", 2, "gemm_ar"), ("llama-3-tied", 4, "ag_rs"), ("llama-2", 3, "ag_rs"), ("qwen2.5", 4, "gemm_ar"),
    ("qwen2.5-window", 2, "ag_rs"), ("mistral", 4, "torch"), ("qwen3-yarn", 2, "torch"), ("qwen3-window", 3, "gemm_ar"),
    ("seed-oss", 4, "gemm_ar"), ("qwen3-moe", 4, "gemm_ar"), ("qwen3-moe-mixed", 2, "ag_rs"), ("mixtral", 3, "ag_rs"),
    ("qwen2-moe", 2, "ag_rs"), ("qwen2-moe-mixed", 4, "gemm_ar"), ("olmo2", 8, "ag_rs"), ("olmo2", 3, "gemm_ar"),
    ("olmo3", 4, "gemm_ar"), ("granite", 2, "ag_rs"), ("gemma2", 8, "gemm_ar"), ("gemma3", 3, "ag_rs"),
    ("smollm3", 2, "gemm_ar"), ("smollm3-window", 4, "ag_rs"), ("phi3", 3, "ag_rs"), ("phi3-long", 4, "gemm_ar"),
    ("glm4", 8, "ag_rs"), ("exaone4", 4, "gemm_ar"), ("exaone4-pattern", 3, "ag_rs"), ("exaone4-no-window", 2, "ag_rs"),
    ("ernie4.5", 2, "gemm_ar"), ("ernie4.5", 3, "ag_rs"),
    ("qwen3-next", 2, "gemm_ar"), ("qwen3-next", 8, "torch"), ("qwen3-next-mixed", 4, "ag_rs"),
    ("qwen3.5", 4, "gemm_ar"), ("qwen3.5-moe", 2, "ag_rs"),
    ("olmoe", 2, "ag_rs"), ("granitemoe", 4, "gemm_ar"), ("glm4-moe", 2, "gemm_ar"), ("glm4-moe-plain", 3, "ag_rs"),
    ("ernie4.5-moe", 2, "gemm_ar"), ("ernie4.5-moe", 3, "ag_rs"), ("ernie4.5-moe-mixed", 4, "ag_rs"),
    ("exaone-moe", 2, "gemm_ar"), ("exaone-moe", 3, "ag_rs"),
    ("dots1", 4, "gemm_ar"), ("dots1", 3, "ag_rs"), ("minimax-m2", 2, "ag_rs"), ("minimax-m2", 3, "gemm_ar"),
    ("gpt-oss", 4, "ag_rs"), ("gpt-oss", 3, "gemm_ar"),
    ("deepseek-v2-lite", 2, "ag_rs"), ("deepseek-v2", 4, "gemm_ar"), ("deepseek-v3", 3, "gemm_ar"),
    ("vaultgemma", 4, "gemm_ar"), ("vaultgemma", 3, "ag_rs"), ("youtu", 2, "gemm_ar"), ("youtu", 3, "ag_rs"),
    ("gemma", 2, "gemm_ar"), ("glm", 4, "ag_rs"), ("helium", 3, "gemm_ar"), ("cwm", 2, "ag_rs"), ("ministral", 4, "gemm_ar"),
    ("hyperclovax", 3, "ag_rs"), ("flex-olmo", 4, "gemm_ar"), ("solar-open", 2, "ag_rs"),
    ("arcee", 2, "gemm_ar"), ("arcee", 3, "ag_rs"), ("apertus", 4, "gemm_ar"), ("apertus", 3, "ag_rs"),
    ("hunyuan", 2, "gemm_ar"), ("hunyuan-plain", 4, "ag_rs"), ("hunyuan-moe", 3, "ag_rs"), ("hunyuan-moe", 4, "gemm_ar"),
    ("ministral3", 2, "gemm_ar"), ("ministral3", 3, "ag_rs"), ("glm4-moe-lite", 2, "ag_rs"), ("glm4-moe-lite", 3, "gemm_ar"),
]  # fmt: skip

# On one rank those that are not in the sample over ranks, and two that are.
ALONE = {*FAMILIES} - {name for name, *_ in SAMPLE} | {"llama-3", "qwen3-moe", "qwen3-next"}


@pytest.mark.parametrize("name", sampled(((name,) for name in FAMILIES), lambda name: name in ALONE))
def test_logits_and_64_greedy_tokens_are_those_of_transformers(make_checkpoint, name):
    check(checkpoint_of(make_checkpoint, name), "torch", 1)


@pytest.mark.parametrize(("name", "world_size", "mode"), SAMPLE)
def test_the_recipes_agree_with_transformers(make_checkpoint, plain_ops, name, world_size, mode):
    check(checkpoint_of(make_checkpoint, name, world_size), mode, world_size, steps=4)


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_recipe_agrees_with_transformers(make_checkpoint, plain_ops, name, mode, world_size):
    check(checkpoint_of(make_checkpoint, name, world_size), mode, world_size)


@pytest.mark.parametrize(
    ("name", "world_size", "mode", "layout"),
    [
        ("qwen2-moe", 4, "gemm_ar", (2, 2)),
        *(
            pytest.param(name, w, mode, layout, marks=pytest.mark.sweep)
            for name in ("qwen3-moe", "qwen2-moe-mixed", "mixtral")
            for mode in MODES
            for w, layout in ((2, "slices"), (4, (2, 2)), (8, (2, 4)), (8, (4, 2)))
        ),
    ],
)
def test_experts_in_groups_of_ranks_agree_with_transformers(make_checkpoint, plain_ops, name, world_size, mode, layout):
    check(checkpoint_of(make_checkpoint, name, world_size), mode, world_size, steps=8, layout=layout)


# One layer, which has the window where there is one.
ONE_LAYER = {
    "qwen2.5-window": {"num_hidden_layers": 1, "max_window_layers": 0},
    "smollm3": {"num_hidden_layers": 1, "no_rope_layers": [0]},
    "smollm3-window": {"num_hidden_layers": 1, "no_rope_layer_interval": 1},
    **{
        name: {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        for name in ("qwen3.5", "qwen3.5-moe")
    },
    **{
        name: {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_only_layers": [0, 1],
        }
        for name in ("qwen3-next", "qwen3-next-mixed")
    },
    **{
        name: {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
        for name in (
            "qwen3-window", "olmo3", "gemma2", "gemma3", "gpt-oss", "exaone4", "cwm", "ministral", "vaultgemma",
        )
    },
    **dict.fromkeys(("glm4-moe", "glm4-moe-plain"), {"num_hidden_layers": 1, "first_k_dense_replace": 0}),
    "ernie4.5-moe": {"num_hidden_layers": 1, "moe_layer_start_index": 0},
    "ernie4.5-moe-mixed": {"num_hidden_layers": 1, "moe_layer_interval": 1},
    "exaone-moe": {"num_hidden_layers": 1, "first_k_dense_replace": 0, "layer_types": ["sliding_attention"]},
    "dots1": {"num_hidden_layers": 1, "first_k_dense_replace": 0, "max_window_layers": 0},
    **{name: {"num_hidden_layers": 1, "first_k_dense_replace": 0} for name in FAMILIES if name.startswith("deepseek")},
    "exaone4-no-window": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "hunyuan-moe": {"num_hidden_layers": 1, "moe_topk": [3]},
    "glm4-moe-lite": {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
}  # fmt: skip
# A shared expert over kernels: tests/layers/test_moe.py.
KERNELS_SAMPLE = [
    ("qwen2.5", 2, "gemm_ar", True), ("qwen2.5-window", 2, "ag_rs", True), ("seed-oss", 2, "ag_rs", False),
    ("qwen3-moe", 2, "gemm_ar", True), ("mixtral", 2, "ag_rs", True), ("phi3-long", 2, "ag_rs", True),
    ("smollm3-window", 2, "gemm_ar", True), ("gpt-oss", 2, "ag_rs", True), ("glm4-moe", 2, "gemm_ar", True),
    ("minimax-m2", 2, "gemm_ar", True), ("ernie4.5-moe", 2, "ag_rs", True),
    ("granite", 2, "gemm_ar", True), ("exaone4", 2, "ag_rs", True), ("olmo3", 2, "gemm_ar", True), ("gemma3", 2, "ag_rs", True),
    ("qwen3-next", 2, "gemm_ar", True), ("qwen3-next-mixed", 2, "ag_rs", True),
    ("deepseek-v2-lite", 2, "ag_rs", True), ("deepseek-v3", 2, "gemm_ar", True),
    ("arcee", 2, "ag_rs", True), ("apertus", 2, "gemm_ar", True),
    ("hunyuan", 2, "ag_rs", True), ("hunyuan-plain", 2, "gemm_ar", True),
]  # fmt: skip
KERNELS = [
    (name, world_size, mode, fused)
    for name in FAMILIES for world_size in (1, 2, 3, 4, 8) for mode in MODES[1:] for fused in (False, True)
    if not (fused and name == "llama-2")  # llama-2's heads of 6 elements are no power of two
]  # fmt: skip


def check_kernels(make_checkpoint, name, world_size, mode, fused, layout=None):
    made = checkpoint_of(make_checkpoint, name, world_size, **ONE_LAYER.get(name, {"num_hidden_layers": 1}))
    check(made, mode, world_size, batch=1, steps=3, fused=fused, layout=layout)


@pytest.mark.parametrize(("name", "world_size", "mode", "fused"), KERNELS_SAMPLE)
def test_the_recipes_agree_over_simulated_kernels(make_checkpoint, name, world_size, mode, fused):
    check_kernels(make_checkpoint, name, world_size, mode, fused)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "world_size", "mode", "fused"), KERNELS)
def test_every_recipe_agrees_over_simulated_kernels(make_checkpoint, name, world_size, mode, fused):
    check_kernels(make_checkpoint, name, world_size, mode, fused)


@pytest.mark.sweep
@pytest.mark.parametrize(("world_size", "layout"), [(4, (2, 2)), (8, (4, 2)), (8, (2, 4))])
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", "mixtral"])
def test_experts_in_groups_agree_over_simulated_kernels(make_checkpoint, name, mode, world_size, layout):
    check_kernels(make_checkpoint, name, world_size, mode, True, layout)


def errors_in_16_bits(directory, mode, quantization):
    """Median errors of rows of logits in bf16, beside those in fp32 by torch: by torch, by weft's kernels."""

    def main(team, dtype, fused):
        options = {"mode": mode, "dtype": dtype, "fused": fused, "quantization": quantization}
        model = Decoder.from_pretrained(directory, team, **options)
        return torch.cat(in_three_ways(model, prompt(3, 5), (2, 3)), 1).flatten(0, 1)

    exact, *found = (
        weft.simulate(main, 2, args=given)[0]
        for given in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    )
    return [((rows - exact).norm(dim=1) / exact.norm(dim=1)).median() for rows in found]


@pytest.mark.sweep
@pytest.mark.parametrize(("mode", "quantization"), [("gemm_ar", None), ("gemm_ar", "fp8"), ("ag_rs", "fp8")])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama-2"])
def test_kernels_in_16_bits_are_as_near_to_fp32_as_torch(make_checkpoint, name, mode, quantization):
    """As GPUs run them: norms may be in fp32 beside rows of 16 bits, and rows in fp8 before a quantized matrix."""
    by_torch, by_kernels = errors_in_16_bits(checkpoint_of(make_checkpoint, name)[0], mode, quantization)
    assert by_kernels <= 2 * by_torch


def test_yarn_goes_beyond_the_positions_in_config(make_checkpoint):
    """Model cards leave max_position_embeddings as it was without YaRN; transformers does not hold to it."""
    directory, reference = make_checkpoint(**FAMILIES["qwen3-yarn"], max_position_embeddings=64)
    tokens = prompt(1, 60)
    expected = reference_greedy(reference, tokens, 60)
    [found] = weft.simulate(
        lambda team: greedy(Decoder.from_pretrained(directory, team, mode="torch"), tokens.tolist(), 60), 1
    )
    assert torch.equal(found.T, expected)


def wider_window(model):
    for layer in model.layers:
        if layer.self_attn.window is not None:
            layer.self_attn.window += 1


def windows_of_other_layers(model):
    windows = [layer.self_attn.window for layer in model.layers]
    for layer, window in zip(model.layers, windows[1:] + windows[:1], strict=True):
        layer.self_attn.window = window


def no_bias_of(part):
    def drop(model):
        for layer in model.layers:
            attention = layer.self_attn
            sizes = [n * attention.head_dim for n in (attention.num_heads, *[attention.num_kv_heads] * 2)]
            attention.qkv_proj.bias.data.split(sizes)["qkv".index(part)].zero_()

    drop.__name__ = f"no_bias_of_{part}"
    return drop


def with_rotary(name, **changes):
    """Angles of another scaling."""

    def change(model):
        rotary = model.config.rotary
        rotary = dataclasses.replace(rotary, scaling=dataclasses.replace(rotary.scaling, **changes))
        model.angles = rotary_angles(256, model.config.head_dim, rotary, model.team.device)

    change.__name__ = name
    return change


def no_scaling(model):
    model.angles = rotary_angles(256, model.config.head_dim, model.config.rotary.theta, model.team.device)


def gate_and_up_swapped(model):
    for layer in model.layers:
        layer.mlp.gate_up.data.copy_(torch.cat(layer.mlp.gate_up.data.chunk(2, dim=1)[::-1], dim=1))


def neighbours_weights(model):
    for layer in model.layers:
        layer.mlp.down.data.copy_(layer.mlp.down.data.roll(1, 0))


def not_renormalised(model):
    for layer in model.layers:
        layer.mlp.gating = layer.mlp.gating._replace(renormalize=False)


def other_owner(model):
    for layer in model.layers:
        experts = layer.mlp.experts
        layer.mlp.experts = type(experts)(experts.total + 1, experts.first + 1, experts.count)


def shared_gate_forgotten(model):
    for layer in model.layers:
        layer.mlp.router = torch.nn.Parameter(layer.mlp.router.data[:8], requires_grad=False)


def shared_expert_not_split(model):
    """Each rank adds the whole result."""
    for layer in model.layers:
        layer.mlp.shared_expert.down_proj.weight.data *= model.team.size


def norms_of_own_heads(model):
    """Each rank norms by its heads alone."""
    for layer in model.layers:
        layer.self_attn.norm_all_heads = False
        for name in ("q_norm", "k_norm"):
            norm = getattr(layer.self_attn, name)
            norm.weight = torch.nn.Parameter(norm.weight.data[: layer.self_attn.head_dim], requires_grad=False)


def norms_before_in_place_of_after(model):
    for layer in model.layers:
        layer.input_norm, layer.attention_out_norm = layer.attention_out_norm, None
        layer.post_norm, layer.mlp_out_norm = layer.mlp_out_norm, None


def without_one(model):
    """Norms by w in place of 1 + w."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data -= 1


def without_one_in_q_and_k(model):
    for layer in model.layers:
        layer.self_attn.q_norm.weight.data -= 1
        layer.self_attn.k_norm.weight.data -= 1


def silu_in_place_of_gelu(model):
    for layer in model.layers:
        layer.mlp.activation = "silu"


def without_norms_after(model):
    for layer in model.layers:
        layer.attention_out_norm = layer.mlp_out_norm = None


def without(part, name):
    """A factor or soft cap of the embedding, the head or the layers' block is forgotten."""

    def forget(model):
        if part == "block":
            for layer in model.layers:
                layer.block = dataclasses.replace(layer.block, **{name: None})
        elif part == "attention":
            for layer in model.layers:
                setattr(layer.self_attn, name, None)
        else:
            setattr(getattr(model, part), name, None)

    forget.__name__ = f"without_{name}_of_{part}"
    return forget


def one_rotary_embedding(model):
    for layer in model.layers:
        layer.self_attn.rotary = 0


GRANITE_MISTAKES = [
    ("block", "residual_scale"), ("embed_tokens", "scale"), ("lm_head", "divisor"), ("attention", "scale"),
]  # fmt: skip
GEMMA_MISTAKES = (
    without_one,
    silu_in_place_of_gelu,
    without_norms_after,
    windows_of_other_layers,
    without("embed_tokens", "scale"),
    without("attention", "scale"),
)


def rotated_everywhere(model):
    for layer in model.layers:
        layer.self_attn.rotary = 0


def no_bias_of_o(model):
    for layer in model.layers:
        layer.self_attn.o_proj.bias.data.zero_()


def whole_heads_rotated(model):
    model.angles = rotary_angles(256, model.config.head_dim, model.config.rotary.theta, model.team.device)


def pairs_of_the_checkpoint_kept(model):
    """Rows of q and k stay in the order in which neighbours are pairs."""
    for layer in model.layers:
        attention = layer.self_attn
        rows = attention.qkv_proj.weight.data[: (attention.num_heads + attention.num_kv_heads) * attention.head_dim]
        rows.copy_(rows.unflatten(0, (-1, attention.head_dim))[:, attention.order.argsort()].flatten(0, 1))


def delta_nets_of(model):
    return [layer.linear_attn for layer in model.layers if layer.linear_attn is not None]


def swapped(one, other):
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def queries_and_gates_swapped(model):
    for attention in model.attentions:
        swapped(*attention.qkv_proj.weight.data[: 2 * attention.num_heads * attention.head_dim].chunk(2))


def keys_of_other_heads(model):
    for net in delta_nets_of(model):
        count = net.sizes.key_heads * net.sizes.K
        net.in_proj.data[count : 2 * count] = net.in_proj.data[count : 2 * count].roll(net.sizes.K, 0)


def decays_of_other_heads(model):
    for net in delta_nets_of(model):
        net.A_log.data.copy_(net.A_log.data.roll(1))


def taps_reversed(model):
    for net in delta_nets_of(model):
        net.conv1d.data.copy_(net.conv1d.data.flip(1))


def rates_and_decays_swapped(model):
    for net in delta_nets_of(model):
        swapped(*net.in_proj.data[-2 * net.sizes.value_heads :].chunk(2))


DELTA_MISTAKES = (
    queries_and_gates_swapped, keys_of_other_heads, decays_of_other_heads, taps_reversed, rates_and_decays_swapped,
)  # fmt: skip


def shared_expert_forgotten(model):
    for layer in model.layers[1:]:
        layer.mlp.shared_expert = None


def with_gating(**changes):
    """Mixtures choose in another way."""

    def change(model):
        for layer in model.layers[-2:]:
            layer.mlp.gating = layer.mlp.gating._replace(**changes)

    change.__name__ = "with_" + "_".join(f"{name}_{value}" for name, value in changes.items())
    return change


def without_of_mixtures(name):
    def forget(model):
        for layer in model.layers[-2:]:
            setattr(layer.mlp, name, None)

    forget.__name__ = f"without_{name}_of_mixtures"
    return forget


def neighbours_biases(name):
    def roll(model):
        for layer in model.layers:
            biases = getattr(layer.mlp, name).data
            biases.copy_(biases.roll(1, 0))

    roll.__name__ = f"neighbours_{name}"
    return roll


def gate_and_up_in_order(model):
    """Rows that take turns in the checkpoint, read as if gate's came first."""
    for layer in model.layers:
        for parameter in (layer.mlp.gate_up, layer.mlp.gate_up_bias):
            gate, up = parameter.data.chunk(2, dim=1)
            parameter.data.copy_(torch.stack((gate, up), 2).flatten(1, 2))


def with_swiglu(**changes):
    def change(model):
        for layer in model.layers:
            layer.mlp.swiglu = layer.mlp.swiglu._replace(**changes)

    change.__name__ = "with_" + "_".join(changes)
    return change


def biases_of_every_slice(model):
    """Each rank of a group adds the bias of down."""
    for layer in model.layers:
        bias = layer.mlp.down_bias.data
        bias.copy_(sum(model.team.exchange(bias)))


def xielu_in_place_of_relu2(model):
    numbers = {"alpha_p": 0.5, "alpha_n": 0.5, "beta": 0.5, "eps": -1e-6}
    for layer in model.layers:
        layer.mlp.activation = "xielu"
        layer.mlp.act_fn.update({name: torch.tensor(number) for name, number in numbers.items()})


def alphas_swapped(model):
    for layer in model.layers:
        swapped(*(layer.mlp.act_fn[name].data for name in ("alpha_p", "alpha_n")))


def norms_before_rotary(model):
    for layer in model.layers:
        layer.self_attn.unrotated = None


ROUTED_MISTAKES = (
    shared_expert_forgotten, with_gating(scale=1.0), with_gating(groups=1, group_limit=1), with_gating(group_limit=1),
    with_gating(renormalize=False), with_gating(scoring="softmax"), without_of_mixtures("router_bias"),
)  # fmt: skip
ERNIE_MISTAKES = (
    shared_expert_forgotten, with_gating(scoring="sigmoid"), with_gating(renormalize=False), without_of_mixtures("router_bias"),
)  # fmt: skip
MINIMAX_MISTAKES = (
    norms_of_own_heads, whole_heads_rotated, with_gating(scoring="softmax"), with_gating(renormalize=False),
    without_of_mixtures("router_bias"),
)  # fmt: skip
CLAMPED_MISTAKES = (
    gate_and_up_swapped,
    gate_and_up_in_order,
    *(neighbours_biases(name) for name in ("gate_up_bias", "down_bias")),
    *(without_of_mixtures(name) for name in ("logit_bias", "gate_up_bias", "down_bias", "swiglu")),
    with_swiglu(limit=7.0),
    with_swiglu(alpha=8.0),
    biases_of_every_slice,
)


def with_latent(name, **changes):
    """Attention whose weights have other options."""

    def change(model):
        for layer in model.layers:
            for attribute, value in changes.items():
                setattr(layer.self_attn, attribute, value)

    change.__name__ = name
    return change


def keys_and_values_swapped(model):
    for layer in model.layers:
        weight = layer.self_attn.kv_b_proj.weight.data
        weight.copy_(weight.unflatten(0, (-1, 32)).flip(1).flatten(0, 1))


def no_norm_of_queries(model):
    for layer in model.layers:
        layer.self_attn.q_a_layernorm.weight.data.fill_(1.0)


LATENT_MISTAKES = (
    with_latent("no_mscale", scale=28**-0.5), with_latent("partners_halves_apart", interleaved=False),
    keys_and_values_swapped, shared_expert_forgotten,
)  # fmt: skip
EXPERTS_MISTAKES = (gate_and_up_swapped, neighbours_weights, not_renormalised, other_owner)
MUTANTS = [
    ("mistral", wider_window),
    ("qwen2.5-window", wider_window),
    ("qwen2.5-window", windows_of_other_layers),
    ("qwen3-window", windows_of_other_layers),
    *(("qwen2.5", no_bias_of(part)) for part in "qkv"),
    ("llama-3", with_rotary("other_wavelengths", original_max_position_embeddings=64)),
    ("llama-3", with_rotary("other_blend", high_freq_factor=8.0)),
    ("llama-3", no_scaling),
    ("llama-linear", no_scaling),
    ("qwen3-yarn", with_rotary("no_attention_factor", attention_factor=1.0)),
    ("qwen3-yarn", with_rotary("other_ramp", beta_slow=4.0)),
    *(("qwen3-moe", mistake) for mistake in EXPERTS_MISTAKES),
    *(("qwen3-next", mistake) for mistake in DELTA_MISTAKES),
    *(("qwen2-moe", mistake) for mistake in (shared_gate_forgotten, shared_expert_not_split)),
    *(("olmo2", mistake) for mistake in (norms_of_own_heads, norms_before_in_place_of_after)),
    *(("olmo3", mistake) for mistake in (windows_of_other_layers, one_rotary_embedding)),
    *(("granite", without(*mistake)) for mistake in GRANITE_MISTAKES),
    *(("gemma2", mistake) for mistake in GEMMA_MISTAKES),
    *(("gemma2", without(*mistake)) for mistake in (("lm_head", "softcap"), ("attention", "softcap"))),
    *(("deepseek-v2-lite", mistake) for mistake in LATENT_MISTAKES),
    *(("vaultgemma", mistake) for mistake in (without_one, windows_of_other_layers, without("lm_head", "softcap"))),
    *(("youtu", mistake) for mistake in (*LATENT_MISTAKES[1:3], no_norm_of_queries)),
    *(("deepseek-v2", mistake) for mistake in (no_norm_of_queries, with_gating(group_limit=4), with_gating(scale=1.0))),
    *(("deepseek-v3", mistake) for mistake in ROUTED_MISTAKES),
    *(("gemma3", mistake) for mistake in (without_one_in_q_and_k, one_rotary_embedding)),
    ("smollm3", rotated_everywhere),
    *(("smollm3-window", mistake) for mistake in (windows_of_other_layers, no_bias_of_o)),
    ("phi3", wider_window),
    ("phi3-short", whole_heads_rotated),
    ("phi3-long", with_rotary("short_factors", original_max_position_embeddings=256)),
    ("phi3-long", with_rotary("no_attention_factor", attention_factor=1.0)),
    *(("glm4", mistake) for mistake in (whole_heads_rotated, pairs_of_the_checkpoint_kept)),
    *(("exaone4", mistake) for mistake in (windows_of_other_layers, rotated_everywhere, norms_before_in_place_of_after)),
    ("ernie4.5", pairs_of_the_checkpoint_kept),
    *(("olmoe", mistake) for mistake in (norms_of_own_heads, with_gating(renormalize=True))),
    *(("granitemoe", mistake) for mistake in (gate_and_up_swapped, neighbours_weights, without("block", "residual_scale"))),
    *(("glm4-moe", mistake) for mistake in ROUTED_MISTAKES),
    *(("exaone-moe", mistake) for mistake in (*ROUTED_MISTAKES, rotated_everywhere)),
    *(("dots1", mistake) for mistake in (*ROUTED_MISTAKES, windows_of_other_layers, no_bias_of_o)),
    *(("ernie4.5-moe", mistake) for mistake in ERNIE_MISTAKES),
    *(("minimax-m2", mistake) for mistake in MINIMAX_MISTAKES),
    *(("gpt-oss", mistake) for mistake in CLAMPED_MISTAKES),
    *(("gemma", mistake) for mistake in (without_one, silu_in_place_of_gelu, without("embed_tokens", "scale"))),
    *(("glm", mistake) for mistake in (whole_heads_rotated, pairs_of_the_checkpoint_kept)),
    *(("helium", mistake) for mistake in (pairs_of_the_checkpoint_kept, no_bias_of("v"))),
    *(("cwm", mistake) for mistake in (windows_of_other_layers, no_scaling)),
    ("ministral", windows_of_other_layers),
    *(("hyperclovax", mistake) for mistake in (without_norms_after, *(without(*mistake) for mistake in GRANITE_MISTAKES[:3]))),
    *(("flex-olmo", mistake) for mistake in (norms_of_own_heads, without_norms_after, neighbours_weights)),
    *(("solar-open", mistake) for mistake in ROUTED_MISTAKES),
    ("arcee", xielu_in_place_of_relu2),
    ("apertus", alphas_swapped),
    *(("hunyuan", mistake) for mistake in (norms_before_rotary, no_scaling, no_bias_of_o)),
    *(("hunyuan-moe", mistake) for mistake in (norms_before_rotary, shared_expert_forgotten, neighbours_weights)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mutate"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_of_the_test_a_mutant_is_far_beyond_the_tolerance(make_checkpoint, name, mutate):
    slices = mutate is biases_of_every_slice
    world_size = 2 if slices or mutate is shared_expert_not_split else 1
    check_mutant(make_checkpoint, name, mutate, world_size, "slices" if slices else None)


@pytest.mark.sweep
@pytest.mark.parametrize(("world_size", "layout"), [(4, (2, 2)), (8, (4, 2)), (8, (2, 4))])
@pytest.mark.parametrize("mutate", EXPERTS_MISTAKES)
def test_a_mutant_with_experts_in_groups_is_far_beyond_it_too(make_checkpoint, mutate, world_size, layout):
    check_mutant(make_checkpoint, "qwen3-moe", mutate, world_size, layout)


def check_mutant(make_checkpoint, name, mutate, world_size, layout=None):
    # Beside large weights the biases of gpt-oss hardly count.
    changes = {"initializer_range": 0.1} if name == "gpt-oss" else {}
    directory, reference = make_checkpoint(**FAMILIES[name] | changes)
    tokens = prompt(3, 40)

    def main(team):
        model = Decoder.from_pretrained(directory, team, mode="torch", expert_layout=layout)
        mutate(model)
        return all_logits(model, tokens)

    logits, *_ = weft.simulate(main, world_size)
    assert relative_rms(logits, reference_logits(reference, tokens)) > 0.05  # bf16 noise is 0.03: seen on GPUs too
