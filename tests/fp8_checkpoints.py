"""Checkpoints in fp8 as they are published, and plain-torch models of their formats.

A model's reference is transformers' with its linear layers replaced: bytes times scales in fp64, inputs rounded to e4m3 by the
format's scales, in fp32 and by a multiplication as the format says it. Where a rank has columns of a matrix, groups of inputs
end at its edge.
"""

import copy
import re

import torch
from torch import nn
from torch.nn import functional as F

from tests.quantized_checkpoints import save
from weft.models.checkpoint import Checkpoint

E4M3, LARGEST, BLOCK = torch.float8_e4m3fn, 448.0, 128

COMPRESSED_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "observer": "minmax"}
COMPRESSED_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "observer": None}


def compressed(weights, inputs, **changes):
    """quantization_config as llm-compressor writes it."""
    group = {
        "targets": ["Linear"],
        "weights": COMPRESSED_WEIGHTS | weights,
        "input_activations": COMPRESSED_INPUTS | inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    } | changes


CONFIGS = {
    "block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "gate"],
    },
    "compressed-block": compressed(
        {"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128, "dynamic": True}
    ),
    "channel": compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
    "compressed-static": compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
    "tensor": {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head", "gate"]},
    "static": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "gate"]},
    "mistral": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "dequantize": False,
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "lm_head", "gate"],
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "*mlp.gate"],
        "producer": {"name": "modelopt", "version": "0.37.0"},
    },
}
"""Name of a format -> its quantization_config."""
STATIC = ("compressed-static", "static", "mistral", "modelopt")
SCHEMES = {"compressed-block": "block", **dict.fromkeys(STATIC, "tensor")}
PROJECTION = re.compile(r".*\.(?:[qkvo]|gate|up|down)_proj\.weight|.*\.experts\.\d+\.w[123]\.weight")


def scheme_of(name):
    return SCHEMES.get(name, name)


def spread(scales, shape, block):
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def quantized(weight, scheme):
    """(bytes, scales) of a weight [N, K]."""
    N, K = weight.shape
    block = {"block": (BLOCK, BLOCK), "channel": (1, K), "tensor": (N, K)}[scheme]
    rows, columns = -(-N // block[0]), -(-K // block[1])
    scales = torch.stack([
        torch.stack([
            weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]].float().abs().max() / LARGEST
            for j in range(columns)
        ])
        for i in range(rows)
    ]).float()  # fmt: skip
    return (weight.float() * spread(1 / scales, weight.shape, block)).clamp(-LARGEST, LARGEST).to(E4M3), scales


def dequantized(data, scales, scheme, wide=torch.float64):
    block = {"block": (BLOCK, BLOCK), "channel": (1, data.shape[1]), "tensor": data.shape}[scheme]
    return data.to(wide) * spread(scales.to(wide), data.shape, block)


def rounded(x, group, static, wide=torch.float64):
    """Inputs [..., K] after e4m3 in ``wide``: by the static scale, or by a scale for each ``group`` columns."""
    if static is not None:
        scale = torch.tensor(static, dtype=torch.float32)
        return (x.float() * (1 / scale)).clamp(-LARGEST, LARGEST).to(E4M3).to(wide) * scale.to(wide)
    parts = []
    for part in x.float().split(group, -1):
        scale = part.abs().amax(-1, keepdim=True) / LARGEST
        scale = torch.where(scale > 0, scale, 1.0)
        parts.append((part * (1 / scale)).clamp(-LARGEST, LARGEST).to(E4M3).to(wide) * scale.to(wide))
    return torch.cat(parts, -1)


class Fp8Linear(nn.Module):
    """x @ w.T of fp8 operands; ``ranks`` have equal parts of the columns."""

    def __init__(self, weight, scheme, static=None, bias=None, ranks=1):
        super().__init__()
        self.weight, self.scheme, self.static, self.bias, self.ranks = weight, scheme, static, bias, ranks

    def forward(self, x):
        parts = []
        for part in x.chunk(self.ranks, -1):
            group = BLOCK if self.scheme == "block" else part.shape[-1]
            parts.append(rounded(part, group, self.static, self.weight.dtype))
        y = F.linear(torch.cat(parts, -1), self.weight).to(x.dtype)
        return y if self.bias is None else y + self.bias


class Fp8Experts(nn.Module):
    """A mixture whose experts are gated MLPs of Fp8Linear, computed one at a time."""

    def __init__(self, router, experts, shared, shared_gate, renormalize):
        super().__init__()
        self.router, self.experts, self.shared, self.shared_gate = router, experts, shared, shared_gate
        self.renormalize = renormalize

    def forward(self, x):
        rows = x.flatten(0, -2)
        weights, ids = F.linear(rows, self.router.weight).softmax(-1).topk(self.router.top_k, -1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(rows)
        for number, (gate, up, down) in enumerate(self.experts):
            weight = (weights * (ids == number)).sum(-1, keepdim=True)
            total += down(F.silu(gate(rows)) * up(rows)) * weight
        if self.shared is not None:
            total += self.shared(rows) * self.shared_gate(rows).sigmoid()
        return total.view(x.shape)


def names_of(name):
    """(tensor of the scales, of the inputs' scale or None) in this format, below a matrix's name."""
    if name == "mistral":
        return "weight_scale_inv", "activation_scale"
    return "weight_scale_inv" if name == "block" else "weight_scale", "input_scale" if name in STATIC else None


def write(directory, source, name, quantization=None, scale_dtype=torch.float32):
    """A checkpoint of the model in ``source`` in format ``name``; returns its tensors.

    Static input scales are such that some inputs saturate.
    """
    checkpoint, tensors = Checkpoint(source), {}
    scale, input_scale = names_of(name)
    for key in checkpoint._files():
        tensor = checkpoint.read(key)
        if PROJECTION.fullmatch(key) and "shared_expert_gate" not in key:
            prefix = key.removesuffix(".weight")
            data, scales = quantized(tensor, scheme_of(name))
            scales = scales.to(scale_dtype)
            if scheme_of(name) == "tensor":
                scales = scales.reshape(() if name in ("mistral", "modelopt") else (1,))
            tensors[key], tensors[f"{prefix}.{scale}"] = data.contiguous(), scales
            if input_scale is not None:
                tensors[f"{prefix}.{input_scale}"] = torch.tensor(0.002 + 0.004 * (len(prefix) % 3)).view(scales.shape)
        else:
            tensors[key] = tensor
    save(directory, source, tensors, quantization or CONFIGS[name])
    return tensors


def reference(model, tensors, name, ranks=1, expert_ranks=1, wide=torch.float64):
    """transformers' model computed as the format says, sums in ``wide``."""
    model, scheme = copy.deepcopy(model), scheme_of(name)
    scale, input_scale = names_of(name)

    def linear(prefix, bias=None, over=1, statics=()):
        data, scales = tensors[f"{prefix}.weight"], tensors[f"{prefix}.{scale}"].float()
        scales = scales.reshape(1, 1) if scheme == "tensor" else scales
        # One scale for the inputs of all matrices that they are inputs of: the largest.
        parts = statics or (prefix,)
        static = max(tensors[f"{part}.{input_scale}"].item() for part in parts) if input_scale else None
        return Fp8Linear(dequantized(data, scales, scheme, wide), scheme, static, bias, over)

    def merged(module, prefix, columns, rows, over):
        for part in columns:
            statics = [f"{prefix}.{one}" for one in columns]
            bias = getattr(module, part).bias
            setattr(module, part, linear(f"{prefix}.{part}", bias, statics=statics))
        setattr(module, rows, linear(f"{prefix}.{rows}", over=over))

    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}"
        merged(layer.self_attn, f"{prefix}.self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj", ranks)
        if hasattr(layer.mlp, "gate_proj"):
            merged(layer.mlp, f"{prefix}.mlp", ("gate_proj", "up_proj"), "down_proj", ranks)
            continue
        block, experts = layer.mlp, f"{prefix}.mlp.experts"
        numbers = range(len(block.gate.weight))
        first = [f"{experts}.{e}.{part}" for e in numbers for part in ("gate_proj", "up_proj")]
        second = [f"{experts}.{e}.down_proj" for e in numbers]
        of_experts = [
            (
                linear(f"{experts}.{e}.gate_proj", statics=first),
                linear(f"{experts}.{e}.up_proj", statics=first),
                linear(f"{experts}.{e}.down_proj", over=expert_ranks, statics=second),
            )
            for e in numbers
        ]
        shared = getattr(block, "shared_expert", None)
        if shared is not None:
            merged(shared, f"{prefix}.mlp.shared_expert", ("gate_proj", "up_proj"), "down_proj", ranks)
        renormalize = getattr(model.config, "norm_topk_prob", True)
        gate = getattr(block, "shared_expert_gate", None)
        layer.mlp = Fp8Experts(block.gate, of_experts, shared, gate, renormalize)
    return model
