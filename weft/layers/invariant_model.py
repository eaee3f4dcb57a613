"""Parts of a model of Transformers in mode "invariant", with the forward bits of weft's engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from weft.layers.norm import RMSNorm
from weft.layers.same_bits import RecomputedBackward
from weft.ops.elementwise.add_rms_norm import add_rms_norm
from weft.ops.gemm.matmul import matmul
from weft.ops.vocab.log_sums import SLICES, join_log_sums, log_sums


class Norm(nn.Module):
    """RMSNorm of rows by weft's kernel, with the gradients of torch's operations."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = module.weight, module.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def kernel(x: torch.Tensor) -> torch.Tensor:
            return add_rms_norm(x, None, self.weight, self.eps, invariant=True)[0]

        def by_torch(x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            return self.weight * normed.to(x.dtype)

        return RecomputedBackward.apply(kernel, by_torch, x, self.weight)


class Head(nn.Module):
    """Logits of the whole vocabulary on every rank, by the GEMM of the mode."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.weight = module.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def kernel(x: torch.Tensor) -> torch.Tensor:
            return matmul(x.flatten(0, -2), self.weight, invariant=True).unflatten(0, x.shape[:-1])

        return RecomputedBackward.apply(kernel, lambda x: F.linear(x, self.weight), x, self.weight)


def replace_rest(model: nn.Module) -> dict[str, str]:
    """Put Norm and Head into a model whose attentions and MLPs are weft's; their names and kinds.

    ValueError for a norm or a head of another kind.
    """
    made: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm") and not isinstance(module, RMSNorm):
            if not hasattr(module, "variance_epsilon"):
                raise ValueError(
                    f"mode='invariant': {path} is a {type(module).__name__}, whose sums are torch's; choose another mode"
                )
            made[path] = Norm(module)
    head = getattr(model, "lm_head", None)
    if isinstance(head, nn.Linear) and head.bias is None:
        made["lm_head"] = Head(head)
    for path, module in made.items():
        model.set_submodule(path, module)
    return {path: type(module).__name__ for path, module in made.items()}


def check_call(options: Mapping[str, Any]) -> None:
    """ValueError for a call of a decoder whose rows are not whole sequences from their first token on."""
    mask, positions = options.get("attention_mask"), options.get("position_ids")
    if mask is not None and (mask.dim() != 2 or (mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(
            "mode='invariant': attention_mask hides tokens before visible ones; pad on the right, or pass none"
        )
    if positions is not None and (positions != torch.arange(positions.shape[-1], device=positions.device)).any():
        raise ValueError("mode='invariant': position_ids do not count from 0; leave them out")
    if options.get("use_cache") or options.get("past_key_values") is not None:
        raise ValueError(
            "mode='invariant' has no cache of Transformers; pass use_cache=False, and generate with weft.LLM"
        )


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [...] fp32 of tokens [...] under logits [..., V], in mode "invariant".

    They have the bits of weft's engine. Differentiable, with the gradients of log_softmax. ValueError for shapes or dtypes that
    do not fit.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"token_logprobs: logits has shape {tuple(logits.shape)} and tokens {tuple(tokens.shape)}; they differ in V alone"
        )
    index = tokens.flatten()[:, None]

    def kernel(logits: torch.Tensor) -> torch.Tensor:
        rows = logits.flatten(0, -2)
        value = rows.gather(1, index)[:, 0].float()
        rows = F.pad(rows, (0, -rows.shape[1] % SLICES), value=-torch.inf)
        return (value - join_log_sums(log_sums(rows, SLICES))).view(tokens.shape)

    def by_torch(logits: torch.Tensor) -> torch.Tensor:
        return logits.flatten(0, -2).float().log_softmax(-1).gather(1, index)[:, 0].view(tokens.shape)

    return RecomputedBackward.apply(kernel, by_torch, logits)
