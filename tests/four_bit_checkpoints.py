"""Checkpoints with weights in 4 bits as compressed-tensors writes them, and plain-torch models of their formats.

A model's reference is transformers' with each matrix replaced by its numbers times their scales: inputs are not rounded.
"""

import copy

import torch
from torch.nn import functional as F

from tests.fp8_checkpoints import PROJECTION
from tests.quantized_checkpoints import save
from weft.models.checkpoint import Checkpoint

WEIGHTS = {"num_bits": 4, "symmetric": True, "dynamic": False, "observer": "minmax", "actorder": None}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def compressed(packing, weights, **changes):
    """quantization_config as llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group | {"format": packing}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    } | changes


MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
GROUP = {"type": "int", "strategy": "group", "group_size": 128}
CHANNEL = {"type": "int", "strategy": "channel", "group_size": None}
CONFIGS = {
    "mxfp4": compressed("mxfp4-pack-quantized", MX),
    "int4": compressed("pack-quantized", GROUP),
    "int4-zeros": compressed("pack-quantized", GROUP | {"symmetric": False, "zp_dtype": "torch.int8"}),
    "int4-32": compressed("pack-quantized", GROUP | {"group_size": 32, "actorder": "static"}),
    "int4-channel": compressed("pack-quantized", CHANNEL),
    "int4-channel-zeros": compressed("pack-quantized", CHANNEL | {"symmetric": False}),
}
"""Name of a format -> its quantization_config."""


def in_mxfp4(weight):
    """(numbers of 4 bits, bytes of scales, the matrix that they are) of a weight [N, K]."""
    K = weight.shape[1]
    groups = F.pad(weight.double(), (0, -K % 32)).unflatten(1, (-1, 32))
    exponent = (torch.floor(torch.log2(groups.abs().amax(2, keepdim=True))) - 2).clamp(-127, 127)
    sizes, best = groups.abs() / 2.0**exponent, torch.zeros(groups.shape, dtype=torch.uint8)
    for number in range(7):
        middle = (E2M1[number] + E2M1[number + 1]) / 2
        # The even one of two that are as near.
        best += sizes >= middle if number % 2 else sizes > middle
    sign = groups.signbit()
    read = torch.where(sign, -1.0, 1.0) * E2M1.double()[best.int()] * 2.0**exponent
    numbers = best + 8 * sign
    return numbers.flatten(1)[:, :K], (exponent + 127).to(torch.uint8).flatten(1), read.flatten(1)[:, :K]


def in_int4(weight, group, symmetric):
    """(numbers 0 .. 15, scales in bf16, zero points, the matrix that they are) of a weight [N, K]."""
    numbers, scales, zeros, read = [], [], [], []
    for part in weight.float().split(group, 1):
        low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
        scale = torch.maximum(high, -low) / 7.5 if symmetric else (high - low) / 15
        scale = scale.bfloat16()
        zero = torch.full_like(low, 8) if symmetric else (-low / scale.float()).round().clamp(0, 15)
        number = ((part / scale.float()).round() + zero).clamp(0, 15)
        numbers.append(number.int())
        scales.append(scale)
        zeros.append(zero.int())
        read.append((number.double() - zero.double()) * scale.double())
    return torch.cat(numbers, 1), torch.cat(scales, 1), torch.cat(zeros, 1), torch.cat(read, 1)


def words(numbers, dim):
    """int32 with eight of the numbers along ``dim``, the first in the lowest bits."""
    numbers = numbers.long().movedim(dim, -1)
    eights = F.pad(numbers, (0, -numbers.shape[-1] % 8)).unflatten(-1, (-1, 8))
    packed = (eights << 4 * torch.arange(8)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).movedim(-1, dim).contiguous()


def quantized(weight, name):
    """(tensors below a matrix's name, the matrix that they are in fp64) of a weight [N, K]."""
    if name == "mxfp4":
        numbers, scales, read = in_mxfp4(weight)
        low, high = numbers[:, ::2], numbers[:, 1::2]
        return {"weight_packed": (low + 16 * high).to(torch.uint8), "weight_scale": scales}, read
    options = CONFIGS[name]["config_groups"]["group_0"]["weights"]
    group = options["group_size"] or weight.shape[1]
    numbers, scales, zeros, read = in_int4(weight, group, options["symmetric"])
    tensors = {"weight_packed": words(numbers, 1), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not options["symmetric"]:
        tensors["weight_zero_point"] = words(zeros, 0)
    return tensors, read


def write(directory, source, name, quantization=None):
    """A checkpoint of the model in ``source`` in format ``name``; returns the matrices that it holds by name."""
    checkpoint, tensors, matrices = Checkpoint(source), {}, {}
    for key in checkpoint._files():
        tensor = checkpoint.read(key)
        if PROJECTION.fullmatch(key) and "shared_expert_gate" not in key:
            prefix = key.removesuffix(".weight")
            parts, matrices[key] = quantized(tensor, name)
            tensors |= {f"{prefix}.{part}": value for part, value in parts.items()}
        else:
            tensors[key] = tensor
    save(directory, source, tensors, quantization or CONFIGS[name])
    return matrices


def reference(model, matrices):
    """transformers' model with these matrices."""
    model = copy.deepcopy(model)
    state = model.state_dict()
    for name, matrix in matrices.items():
        if name in state:
            state[name].copy_(matrix)
            continue
        # transformers keeps experts together.
        prefix, _, rest = name.partition(".experts.")
        expert, part, _ = rest.split(".")
        prefix = prefix.replace(".block_sparse_moe", ".mlp")
        down = f"{prefix}.experts.down_proj"
        if part in ("down_proj", "w2"):
            state[down][int(expert)].copy_(matrix)
        else:
            half = 1 if part in ("up_proj", "w3") else 0
            state[f"{prefix}.experts.gate_up_proj"][int(expert)].chunk(2)[half].copy_(matrix)
    return model
