"""Checks that a module of another library computes what TPAttention computes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from weft.arguments import is_integer
from weft.parallel.plain import norm_of_heads
from weft.parallel.rotary import Rotary, apply_rotary

SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")
# Attributes of modules and configurations, and the values under which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "is_causal": (True, None),
}
COMPUTES = (
    "TPAttention computes causal attention, in a window or not, with rotary embedding of whole heads, with or without a q_norm "
    "and a k_norm of each head, and with or without biases of q_proj, k_proj and v_proj"
)


def check_module(module: nn.Module, config: Any) -> dict[str, Any]:
    """Sizes and options for TPAttention.

    ValueError with all differences where `module` computes something else.
    """
    if differences := list(_differences(module, config)):
        raise ValueError(f"module={type(module).__name__} has {'; '.join(differences)}; {COMPUTES}")
    sizes = {name: getattr(config, name) for name in SIZES}
    sizes |= {"head_dim": _head_dim(module, config), "rms_norm_eps": getattr(config, "rms_norm_eps", 0.0)}
    options = {
        "qk_norm": getattr(module, "q_norm", None) is not None,
        "bias": {f"{name}.bias" for name in PROJECTIONS[:3]} <= module.state_dict().keys(),
        "window": _window(module, config),
    }
    if difference := _other_result(module, sizes, options):
        raise ValueError(f"module={type(module).__name__} {difference}; {COMPUTES}")
    return sizes | options


def _head_dim(module: nn.Module, config: Any) -> int | None:
    head_dim = getattr(config, "head_dim", None) or getattr(module, "head_dim", None)
    return head_dim if isinstance(head_dim, int) else None


def _window(module: nn.Module, config: Any) -> Any:
    """The module's sliding_window, or the config's if the module's code reads that, as Mistral's does."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    read = code is not None and "sliding_window" in repr((code.co_names, code.co_consts))
    return getattr(module, "sliding_window", getattr(config, "sliding_window", None) if read else None)


def _differences(module: nn.Module, config: Any) -> Iterator[str]:
    children = dict(module.named_children())
    norms = [name for name in NORMS if name in children]
    yield from _differences_of_children(children, norms)
    required = (*SIZES, "rms_norm_eps") if norms else SIZES
    if absent := [name for name in required if getattr(config, name, None) is None]:
        yield f"a config without {', '.join(absent)}"
    # The config speaks where the module is silent.
    values = {name: getattr(module, name, getattr(config, name, None)) for name in NEUTRAL}
    yield from (f"{name}={value!r}" for name, value in values.items() if value not in NEUTRAL[name])
    yield from _differences_of_positions(module, config)
    if (head_dim := _head_dim(module, config)) is None:
        yield "no head_dim"
        return
    scaling = getattr(module, "scaling", None)
    if scaling is not None and abs(scaling * head_dim**0.5 - 1) > 1e-6:
        yield f"scaling={scaling!r} instead of head_dim**-0.5={head_dim**-0.5:.6g}"
    for name in norms:
        if difference := _norm_difference(children[name], head_dim, getattr(config, "rms_norm_eps", 0.0)):
            yield f"{name}={type(children[name]).__name__} {difference}"
    if not _rotates_halves(module, head_dim):
        yield "a rotary embedding that does not pair element i of a head with element i + head_dim / 2"


def _differences_of_children(children: dict[str, nn.Module], norms: list[str]) -> Iterator[str]:
    if "qkv_proj" in children:
        yield "a fused qkv_proj (split it into q_proj, k_proj and v_proj)"
    elif missing := [name for name in PROJECTIONS if name not in children]:
        yield f"no {', '.join(missing)}"
    elif not all(_is_float(getattr(children[name], "weight", None)) for name in PROJECTIONS):
        yield "projections without weights of floating point"
    if len(norms) == 1:
        yield f"{norms[0]} without the other norm"
    known, harmless = (*PROJECTIONS, *NORMS, "qkv_proj", "rotary_emb"), (nn.Dropout, nn.Identity)
    if unknown := [name for name in children if name not in known and type(children[name]) not in harmless]:
        yield f"{', '.join(unknown)} beside these"


def _differences_of_positions(module: nn.Module, config: Any) -> Iterator[str]:
    if (window := _window(module, config)) is not None and not (is_integer(window) and window > 0):
        yield f"sliding_window={window!r}"
    if (rope := getattr(config, "rope_parameters", None)) is not None:
        try:
            Rotary.of(rope)
        except ValueError as error:
            yield str(error)
    if (partial := getattr(config, "partial_rotary_factor", None)) not in (1.0, None):
        yield f"partial_rotary_factor={partial!r}"


def _is_float(weight: object) -> bool:
    return isinstance(weight, torch.Tensor) and weight.is_floating_point()


def _norm_difference(norm: nn.Module, head_dim: int, eps: float) -> str | None:
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != (head_dim,):
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else "none"
        return f"with a weight of shape {shape} instead of {(head_dim,)}"
    # Rows whose mean is not zero; the second is small enough for eps to count.
    rows = 0.5 + torch.randn(2, head_dim, generator=torch.Generator().manual_seed(0))
    rows = (rows * torch.tensor([[1.0], [max(eps, 0.0) ** 0.5]])).to(weight)
    with torch.no_grad():
        normed, expected = norm(rows), F.rms_norm(rows.float(), (head_dim,), weight.float(), eps)
    return None if _close(normed, expected, weight.dtype) else f"that is not x / sqrt(mean(x^2) + {eps:g}) * weight"


def _rotates_halves(module: nn.Module, head_dim: int) -> bool:
    """False if the rotary function in the module's file differs from weft's. True without one."""
    rotate = getattr(inspect.unwrap(type(module).forward), "__globals__", {}).get("apply_rotary_pos_emb")
    if rotate is None or head_dim % 2:
        return head_dim % 2 == 0
    generator = torch.Generator().manual_seed(0)
    x, half = torch.randn(3, 1, head_dim, generator=generator), torch.rand(3, head_dim // 2, generator=generator)
    cos, sin = (torch.cat((part, part), dim=-1)[None] for part in (half.cos(), half.sin()))
    q = x.transpose(0, 1)[None]  # [batch, heads, tokens, head_dim]
    try:
        rotated = rotate(q, q, cos, sin)[0]
    except Exception:  # another signature
        return False
    expected = apply_rotary(x, torch.cat((half.cos(), half.sin()), dim=-1)).transpose(0, 1)[None]
    return _close(rotated, expected, torch.float32)


def _other_result(module: nn.Module, sizes: dict[str, Any], options: dict[str, Any]) -> str | None:
    """Difference between the module's result for three tokens and TPAttention's.

    None without one, and where the module is not called as transformers calls it.
    """
    parameters = inspect.signature(type(module).forward).parameters
    how = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if not {"position_embeddings", "attention_mask"} <= parameters.keys() or how not in (None, "eager", "sdpa"):
        return None
    weights, head_dim = module.state_dict(), sizes["head_dim"]
    rows = {name: head_dim * sizes["num_key_value_heads"] for name in ("k_proj", "v_proj")}
    rows |= {"q_proj": head_dim * sizes["num_attention_heads"], "o_proj": sizes["hidden_size"]}
    if any(weights[f"{name}.weight"].shape[0] != size for name, size in rows.items()) or "o_proj.bias" in weights:
        return None  # fill_from_module names it
    tokens, window, like = 3, options["window"] or 3, weights["q_proj.weight"]
    generator = torch.Generator().manual_seed(0)
    x, half = (
        torch.randn(tokens, like.shape[1], generator=generator),
        torch.rand(tokens, head_dim // 2, generator=generator),
    )
    x, half = x.to(like), half.to(like.device)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    mask = torch.zeros(tokens, tokens).masked_fill((distance < 0) | (distance >= window), float("-inf")).to(like)
    whole = torch.cat((half, half), dim=-1)[None].to(like.dtype)
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            given = {"position_embeddings": (whole.cos(), whole.sin()), "attention_mask": mask[None, None]}
            result = module(x[None], **given)[0][0]
    except Exception as error:
        return f"cannot be called with position_embeddings and attention_mask ({error})"
    finally:
        module.train(training)

    def heads_of(name: str, norm: str) -> torch.Tensor:
        projected = F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")).view(tokens, -1, head_dim)
        return norm_of_heads(projected, weights.get(f"{norm}.weight"), sizes["rms_norm_eps"])

    angles = torch.cat((half.cos(), half.sin()), dim=-1)
    q, k = (apply_rotary(heads_of(f"{name}_proj", f"{name}_norm"), angles) for name in "qk")
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, heads_of("v_proj", "no norm")))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    expected = F.linear(attended.reshape(tokens, -1), weights["o_proj.weight"])
    tolerance = 1e-3 if like.dtype in (torch.float32, torch.float64) else 5e-2
    if result.shape == expected.shape and (result - expected).abs().max() <= tolerance * expected.abs().max():
        return None
    return "gives another result for the same weights"


def _close(x: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    return x.shape == expected.shape and torch.allclose(x.float(), expected.float(), rtol=tolerance, atol=tolerance)
