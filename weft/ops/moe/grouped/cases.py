"""Cases of grouped GEMMs in fp8 and 4 bits: operands, references, scales as the last tensors."""

from __future__ import annotations

from typing import Any

import torch

from weft.kernels.four_bit import FourBit, in_words, small
from weft.kernels.fp8 import COLUMNS, Fp8, by_torch, quantized_weight, read_back
from weft.ops.case import Accuracy, Case, Inputs
from weft.ops.gemm.gemm_op import FOUR_BIT
from weft.ops.moe.routing import ClampedSwiGLU


def scheme_of(case: Case) -> str:
    """Scheme of the experts' scales in a case (``quantized_weight``); "": they are not in fp8."""
    return "block" if case.field("block_fp8") else "channel" if case.field("channel_fp8") else ""


def fp8_forms(case: Case) -> dict[str, bool]:
    """Fields of a plan's call for the case's form of fp8."""
    scheme = scheme_of(case)
    return {f"{scheme}_fp8": True} if scheme else {}


def quantized_experts(weight: torch.Tensor, scheme: str) -> Fp8:
    """``weight`` [experts, N, K] in e4m3, as ``quantized_weight`` of each."""
    data, scales, _ = zip(*(quantized_weight(one, scheme) for one in weight), strict=True)
    return Fp8(torch.stack(data), torch.stack(scales))


def four_bit_experts(weight: torch.Tensor, form: str | bool) -> FourBit:
    """``weight`` [experts, N, K] in 4 bits.

    One expert after the other, since all at once take 20 times its bytes.
    """
    made = [FOUR_BIT[form](one) for one in weight]
    mx = made[0].is_mxfp4
    of_each = ((one.data, one.scales.view(torch.uint8) if mx else one.scales, one.zeros) for one in made)
    data, scales, zeros = (None if parts[0] is None else torch.stack(parts) for parts in zip(*of_each, strict=True))
    if mx:
        scales = small(in_words(scales))
    return FourBit(data, scales, weight.shape[-1], zeros)


def with_scales(case: Case, tensors: Inputs, at: int) -> Inputs:
    """``tensors`` with the weight at ``at`` in the case's form; its scales and zeros come last."""
    if form := case.field("four_bit"):
        made = four_bit_experts(tensors[at], form)
    elif scheme := scheme_of(case):
        made = quantized_experts(tensors[at], scheme)
    else:
        return tensors
    data, *rest = (one for one in made if isinstance(one, torch.Tensor))
    return *tensors[:at], data, *tensors[at + 1 :], *rest


def with_matrix(case: Case, tensors: Inputs, at: int) -> tuple[Any, ...]:
    """``tensors`` of a case, the experts at ``at``, after x, as ``Fp8`` or ``FourBit`` if they are so."""
    if form := case.field("four_bit"):
        *most, scales, zeros = tensors if form == "int4" else (*tensors, None)
        most[at] = FourBit(most[at], scales, most[at - 1].shape[1], zeros)
    elif scheme_of(case):
        *most, scales = tensors
        most[at] = Fp8(most[at], scales)
    else:
        return tensors
    return tuple(most)


def quantized_rows_of(case: Case, x: torch.Tensor) -> Fp8:
    """``x`` as the experts' scales ask for it."""
    return Fp8(*by_torch(x, x.shape[1] if scheme_of(case) == "channel" else COLUMNS.value))


def exact_operands(
    case: Case, x: torch.Tensor, weight: torch.Tensor | Fp8 | FourBit, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, weight) in fp64 that the case's product is of. scales: of fp8 rows."""
    return exact_rows(case, x, weight, scales), exact_weight(weight, x.dtype)


def exact_rows(
    case: Case, x: torch.Tensor, weight: torch.Tensor | Fp8 | FourBit, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows in fp64 that the case's product is of, by ``weight``. scales: of fp8 rows."""
    if isinstance(weight, Fp8):
        return (quantized_rows_of(case, x) if scales is None else Fp8(x, scales)).dequantized(torch.float64)
    if isinstance(weight, FourBit) or scales is None:
        return x.double()
    return read_back(x, scales, weight.dtype).double()


def exact_weight(weight: torch.Tensor | Fp8 | FourBit, dtype: torch.dtype) -> torch.Tensor:
    """``weight`` in fp64. dtype: of the rows, to which 4 bits are rounded."""
    if isinstance(weight, Fp8):
        return weight.dequantized(torch.float64)
    return weight.dequantized(dtype).double() if isinstance(weight, FourBit) else weight.double()


def expert_of(weight: torch.Tensor | Fp8 | FourBit, number: int) -> torch.Tensor | Fp8 | FourBit:
    """Matrix [N, K] of one expert of ``weight``."""
    if isinstance(weight, torch.Tensor):
        return weight[number]
    return type(weight)(*(one[number] if isinstance(one, torch.Tensor) else one for one in weight))


# Of cases with the field "clamped": some gates and ups are clamped, most are not.
CLAMPED = ClampedSwiGLU(1.3, 1.0)


def swiglu_of(case: Case) -> ClampedSwiGLU | None:
    """Activation of a case; None: silu(gate) * up."""
    return CLAMPED if case.field("clamped") else None


def exact_activation(case: Case, gate_up: torch.Tensor) -> torch.Tensor:
    """Activation of a case, of rows in fp64."""
    gate, up = gate_up.chunk(2, dim=-1)
    if not case.field("clamped"):
        return torch.nn.functional.silu(gate) * up
    alpha, limit = CLAMPED
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def fp8_accuracy(case: Case, terms: int) -> Accuracy:
    """Accuracy of a grouped GEMM: tensor cores add fp8 terms in an accumulator of some 14 bits."""
    return Accuracy(terms=terms, partials=1, levels=1) if scheme_of(case) else Accuracy(terms=terms)
