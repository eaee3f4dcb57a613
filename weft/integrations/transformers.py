"""weft in Hugging Face's transformers: row-parallel linear layers, and attention to prompts.

    weft.integrations.transformers.install()                        # before from_pretrained
    AutoModelForCausalLM.from_pretrained(NAME, distributed_config=DistributedConfig(tp_plan="auto"))

``install`` puts weft's style in the place of "rowwise", which every model's plan has, and registers the attention "weft".
``weft.integrations.fallback`` decides which calls run on weft.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.distributed import tensor_parallel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise ImportError(
        f"transformers {transformers.__version__} has another tensor parallelism ({error}); weft.integrations.transformers "
        f"needs 5.17 or newer"
    ) from error

try:
    from transformers.distributed import parallel_utils as registry
except ImportError:  # before 5.23
    registry = tensor_parallel

from weft import ops
from weft.integrations.fallback import Fallback, Kind, problem_of_operands
from weft.runtime.arithmetic import cdiv

STYLE, ATTENTION = "rowwise", "weft"
# Styles without communication in a forward pass; ``describe`` names the rest that weft does not replace.
_LOCAL_STYLES = ("colwise", "packed_colwise", "replicate", "replicated_with_grad_allreduce", "local_params")
_PAGE = 64


class WeftRowwiseParallel(tensor_parallel.RowwiseParallel):
    """The style "rowwise", by ``matmul_all_reduce`` in passes that record no gradients."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        super().install_forward(module, mesh)
        fallback = Fallback.of(mesh) if type(module) is nn.Linear else None
        module._weft = "matmul_all_reduce" if fallback else _left(f"{type(module).__name__} over {mesh}")
        if fallback is None:
            return module
        theirs = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled() or isinstance(x, DTensor) or torch.is_autocast_enabled(x.device.type):
                return theirs(x)
            weight, bias = _local(module.weight), _local(module.bias)

            def on_weft() -> torch.Tensor:
                out = ops.matmul_all_reduce(x.flatten(0, -2), weight, fallback.team).view(*x.shape[:-1], -1)
                return out if bias is None else out + bias

            def problem() -> str | None:
                if x.dim() < 2:
                    return f"the input has {x.dim()} dimension"
                return problem_of_operands(x, [weight], fallback.team.device)

            sizes = x.shape[:-1].numel(), weight.shape[0], module.in_features // fallback.team.size
            return fallback.call(Kind("matmul_all_reduce", sizes, x.dtype), on_weft, lambda: theirs(x), problem)

        module.forward = forward
        return module


def install() -> None:
    """Register weft's style "rowwise" and attention "weft" for models that are loaded from now on."""
    style = WeftRowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())
    registry.ALL_PARALLEL_STYLES.register(STYLE, style)
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def uninstall() -> None:
    """Give "rowwise" back to transformers, for models that are loaded from now on."""
    style = tensor_parallel.RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())
    registry.ALL_PARALLEL_STYLES.register(STYLE, style)


def describe(model: nn.Module) -> dict[str, str]:
    """Communicating modules of the tensor-parallel plan, each with weft's op or the reason for none."""
    styles = {}
    for name, module in model.named_modules():
        generic = registry.replace_layer_number_by_wildcard(name)
        style = (model.tp_plan or {}).get(generic)
        if style is not None and style not in _LOCAL_STYLES:
            styles[generic] = getattr(module, "_weft", _left(f"style {style!r}"))
    return styles


def _left(what: str) -> str:
    return f"{what}: left to transformers"


def _local(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# --- attention -------------------------------------------------------------------------------------------------------


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention "weft": ``paged_prefill_attention`` of prompts without padding, else SDPA.

    query [B, Hq, L, D], key and value [B, Hkv, L, D]; the result is [B, L, Hq, D].
    """
    if not _serves(module, query, key, value, attention_mask, dropout, kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    B, heads, L, D = query.shape
    ranges, pages = _places(B, L, heads // key.shape[1], query.dtype, query.device)
    q = query.transpose(1, 2).reshape(B * L, heads, D)
    out = ops.paged_prefill_attention(q, _paged(key), _paged(value), pages, ranges, scaling)
    return out.view(B, L, heads, D), None


def _serves(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> bool:
    """True if weft computes this call: causal attention of all tokens of prompts at once."""
    length, D = query.shape[2:]
    causal = options.get("is_causal")
    plain = mask is None and not dropout and not any(options.get(name) is not None for name in _EXTRAS)
    return (
        plain
        and length > 1
        and key.shape == value.shape == (*key.shape[:2], length, D)
        and D in (16, 32, 64, 128, 256)
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.dtype == key.dtype == value.dtype
        and (getattr(module, "is_causal", True) if causal is None else causal)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


# Options of an attention that weft's has not: their values change the result.
_EXTRAS = ("softcap", "position_bias", "cache", "s_aux")


@functools.lru_cache(maxsize=4)
def _places(B: int, L: int, group: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, torch.Tensor]:
    """Sequence ranges and pages of B prompts of L tokens, which all layers of a forward pass share."""
    ranges = ops.SequenceRanges.make([(0, L)] * B, group, dtype).to(device)
    count = cdiv(L, _PAGE)
    return ranges, torch.arange(B * count, dtype=torch.int32, device=device).view(B, count)


def _paged(x: torch.Tensor) -> torch.Tensor:
    """Pages [B * n, heads, page, D] of x[B, heads, L, D]."""
    B, heads, L, D = x.shape
    count = cdiv(L, _PAGE)
    whole = nn.functional.pad(x, (0, 0, 0, count * _PAGE - L))
    return whole.view(B, heads, count, _PAGE, D).transpose(1, 2).reshape(B * count, heads, _PAGE, D)
