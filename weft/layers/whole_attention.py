"""Checks that a module of another library computes what TPAttention computes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from weft.parallel.rotary import apply_rotary, plain_theta

SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
CHILDREN = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
# Attributes of modules and configurations, and the values under which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "is_causal": (True, None),
    "sliding_window": (None,),
}


def check_module(module: nn.Module, config: Any) -> dict[str, Any]:
    """Sizes for TPAttention. ValueError with all differences where `module` computes something else."""
    if found := list(_differences(module, config)):
        raise ValueError(
            f"module={type(module).__name__} has {'; '.join(found)}; TPAttention computes causal attention over all tokens "
            f"with a q_norm and a k_norm of each head and plain rotary embedding, as Qwen3Attention does"
        )
    return {name: getattr(config, name) for name in SIZES}


def _differences(module: nn.Module, config: Any) -> Iterator[str]:
    children = dict(module.named_children())
    if "qkv_proj" in children:
        yield "a fused qkv_proj (split it into q_proj, k_proj and v_proj)"
    elif missing := [name for name in CHILDREN if name not in children]:
        yield f"no {', '.join(missing)}"
    harmless = (nn.Dropout, nn.Identity)
    if others := [
        n for n in children if n not in (*CHILDREN, "qkv_proj", "rotary_emb") and type(children[n]) not in harmless
    ]:
        yield f"{', '.join(others)} beside these"
    if absent := [name for name in SIZES if getattr(config, name, None) is None]:
        yield f"a config without {', '.join(absent)}"
    for name, neutral in NEUTRAL.items():
        # The config speaks where the module is silent. A window in a config is for some layers only.
        default = None if name == "sliding_window" else getattr(config, name, None)
        if (value := getattr(module, name, default)) not in neutral:
            yield f"{name}={value!r}"
    try:
        rope = getattr(config, "rope_parameters", None)
        plain_theta(1.0 if rope is None else rope)
    except ValueError as error:
        yield str(error)
    if (partial := getattr(config, "partial_rotary_factor", None)) not in (1.0, None):
        yield f"partial_rotary_factor={partial!r}"
    head_dim = getattr(config, "head_dim", None) or getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        return
    scaling = getattr(module, "scaling", None)
    if scaling is not None and abs(scaling * head_dim**0.5 - 1) > 1e-6:
        yield f"scaling={scaling!r} instead of head_dim**-0.5={head_dim**-0.5:.6g}"
    for name in ("q_norm", "k_norm"):
        if name in children and (
            found := _norm_difference(children[name], head_dim, getattr(config, "rms_norm_eps", 0.0))
        ):
            yield f"{name}={type(children[name]).__name__} {found}"
    if not _rotates_halves(module, head_dim):
        yield "a rotary embedding that does not pair element i of a head with element i + head_dim / 2"


def _norm_difference(norm: nn.Module, head_dim: int, eps: float) -> str | None:
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != (head_dim,):
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else "none"
        return f"with a weight of shape {shape} instead of {(head_dim,)}"
    # Rows whose mean is not zero; the second is small enough for eps to count.
    rows = 0.5 + torch.randn(2, head_dim, generator=torch.Generator().manual_seed(0))
    rows = (rows * torch.tensor([[1.0], [max(eps, 0.0) ** 0.5]])).to(weight)
    with torch.no_grad():
        found, expected = norm(rows), F.rms_norm(rows.float(), (head_dim,), weight.float(), eps)
    return None if _close(found, expected, weight.dtype) else f"that is not x / sqrt(mean(x^2) + {eps:g}) * weight"


def _rotates_halves(module: nn.Module, head_dim: int) -> bool:
    """False if the rotary function in the module's own file differs from weft's. True without one."""
    rotate = getattr(inspect.unwrap(type(module).forward), "__globals__", {}).get("apply_rotary_pos_emb")
    if rotate is None or head_dim % 2:
        return head_dim % 2 == 0
    generator = torch.Generator().manual_seed(0)
    x, half = torch.randn(3, 1, head_dim, generator=generator), torch.rand(3, head_dim // 2, generator=generator)
    cos, sin = (torch.cat((part, part), dim=-1)[None] for part in (half.cos(), half.sin()))
    q = x.transpose(0, 1)[None]  # [batch, heads, tokens, head_dim]
    try:
        found = rotate(q, q, cos, sin)[0]
    except Exception:  # another signature
        return False
    expected = apply_rotary(x, torch.cat((half.cos(), half.sin()), dim=-1)).transpose(0, 1)[None]
    return _close(found, expected, torch.float32)


def _close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    return found.shape == expected.shape and torch.allclose(
        found.float(), expected.float(), rtol=tolerance, atol=tolerance
    )
