"""Checks of the arguments of grouped GEMMs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.arguments import quoted
from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import E4M3, Fp8, RowFormat, scales_of
from weft.kernels.operands import ScaledMatrix
from weft.ops.gemm.four_bit_operands import check_four_bit
from weft.ops.gemm.fp8_operands import check_fp8
from weft.ops.local import check_like, check_row_format, check_shape
from weft.ops.moe.check import needs_gradients
from weft.ops.moe.grouped.gemms import GroupedArguments
from weft.ops.moe.grouped.rule import FEW_PAIRS
from weft.ops.moe.routing import ClampedSwiGLU, Experts, Schedule
from weft.ops.registration import FLOATS, HALVES, check_flag, check_is_tensor, check_tensor

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


NO_BACKWARD = "bias and swiglu have no backward; leave them out, or call it under torch.no_grad()"
NO_BACKWARD_OF_FP8 = "fp8 weights have no backward; take weights of 16 bits, or torch.no_grad()"


def check_grouped(op: str, given: GroupedArguments, gated: bool) -> GroupedArguments:
    """``given``. ValueError unless rows, weights, schedule and scales fit each other."""
    x, weight, schedule, gather = given[:4]
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{op}: schedule={quoted(schedule)} is not a Schedule; weft.ops.moe_schedule makes one")
    check_flag(op, "gather", gather)
    check_flag(op, "invariant", given.invariant)
    if isinstance(given.matrix, FourBit):
        _check_four_bit(op, given)
    elif given.weight_scales is None:
        _check_plain(op, given, gated)
    else:
        _check_fp8(op, given, gated)
    check_bias(op, given.bias, weight, given.dtype)
    if (given.bias is not None or given.limit) and needs_gradients(x, weight, given.bias):
        raise RuntimeError(f"{op}: {NO_BACKWARD}")
    check_like(op, "schedule.pairs", schedule.pairs, x.device, (torch.int32,))
    if 0 in weight.shape:
        raise ValueError(f"{op}: weight has shape {tuple(weight.shape)}; it must have at least one row and column")
    if gated and weight.shape[1] % 2:
        raise ValueError(f"{op}: weight has {weight.shape[1]} rows, an odd number; pass gate's N rows, then up's N")
    _check_rows(op, given)
    return given


def _check_rows(op: str, given: GroupedArguments) -> None:
    """``check_grouped`` of the shape of x. Tiles that read 4 bits take rows that begin anywhere."""
    x, _, schedule, gather = given[:4]
    any_place = isinstance(given.matrix, FourBit) and schedule.block <= FEW_PAIRS
    if x.shape[1] * x.element_size() % 16 and not any_place:
        raise ValueError(
            f"{op}: K={x.shape[1]} of {x.dtype} is {x.shape[1] * x.element_size()} bytes, no multiple of 16; pad x and weight"
        )
    tokens = schedule.pairs.shape[1]
    wanted = tokens if gather else tokens * schedule.choices
    if x.shape[0] != wanted:
        raise ValueError(
            f"{op}: x has {x.shape[0]} rows; with gather={gather} a schedule of {tokens} tokens with {schedule.choices} "
            f"choices each takes {wanted}"
        )


def check_bias(op: str, bias: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """ValueError unless ``bias`` is of the rows of experts' weights, or None. dtype: of the results."""
    if bias is None:
        return
    check_like(op, "bias", bias, weight.device, (dtype,), tuple(weight.shape[:2]))
    if bias.shape[1] > 1 and bias.stride(1) != 1:
        raise ValueError(f"{op}: bias has stride {bias.stride(1)} along its rows; pass bias.contiguous()")


def check_swiglu(op: str, swiglu: ClampedSwiGLU | None) -> None:
    """ValueError unless ``swiglu`` is one with positive finite numbers, or None."""
    if swiglu is None:
        return
    numbers = swiglu if isinstance(swiglu, tuple) and len(swiglu) == 2 else (None,)
    if not all(type(one) in (int, float) and 0 < one < float("inf") for one in numbers):
        raise ValueError(f"{op}: swiglu={quoted(swiglu)} is not ClampedSwiGLU(alpha, limit) of positive finite numbers")


def _check_plain(op: str, given: GroupedArguments, gated: bool) -> None:
    """``check_grouped`` of x, a weight of 16 or 32 bits, and the scales of fp8 rows."""
    x, weight, schedule, gather, scales = given[:5]
    if scales is not None:
        check_like(op, "scales", scales, None, (torch.float32,))
    check_like(op, "x", x, None, FLOATS if scales is None else (E4M3,))
    check_like(op, "weight", weight, x.device, (x.dtype,) if scales is None else FLOATS)
    check_shape(op, "x", x, ("T" if gather else "pairs", "K"))
    check_shape(op, "weight", weight, (schedule.counts.shape[0], "2 N" if gated else "N", x.shape[1]))
    if scales is not None:
        if not gather:
            raise ValueError(f"{op}: scales with gather=False; only rows of tokens are multiplied as they are loaded")
        check_like(op, "scales", scales, x.device, (torch.float32,), (x.shape[0], scales_of(x.shape[1])))


def _check_fp8(op: str, given: GroupedArguments, gated: bool) -> None:
    """``check_grouped`` of x and an fp8 weight, with their scales."""
    if needs_gradients(given.x):
        raise RuntimeError(f"{op}: {NO_BACKWARD_OF_FP8}")
    x, weight, (experts, *_), scales = given.x, given.matrix, given.schedule.counts.shape, given.scales
    check_like(op, "weight", weight.data, None, (E4M3,))
    check_like(op, "weight.scales", weight.scales, weight.device, (torch.float32,))
    check_shape(op, "weight", weight.data, (experts, "2 N" if gated else "N", "K"))
    check_shape(op, "weight.scales", weight.scales, (experts, "n", "k"))
    check_like(op, "x", x, weight.device, HALVES if scales is None else (E4M3,))
    if 0 not in x.shape:
        # All experts' matrices have one form.
        one = Fp8(weight.data[0], weight.scales[0], weight.input_scale)
        check_fp8(op, ScaledMatrix(x if scales is None else Fp8(x, scales)), one, gated)
    if weight.shape[2] % 16:
        raise ValueError(
            f"{op}: K={weight.shape[2]} of {E4M3} is no multiple of 16; pad x and weight, or dequantize it"
        )


def _check_four_bit(op: str, given: GroupedArguments) -> None:
    """``check_grouped`` of x and a weight in 4 bits, with its scales."""
    if given.scales is not None:
        raise ValueError(f"{op}: scales of fp8 rows beside a weight in 4 bits; pass rows of 16 bits, without scales")
    (data, scales, columns, zeros), experts = given.matrix, given.schedule.counts.shape[0]
    for name, one in (("weight.data", data), ("weight.scales", scales), ("weight.zeros", zeros)):
        if one is not None:
            check_is_tensor(op, name, one)
            check_shape(op, name, one, (experts, "N", "k"))
    if 0 not in given.x.shape:
        # The rows of all experts' matrices, as of one.
        flat = [None if one is None else one.flatten(0, 1) for one in (data, scales, zeros)]
        check_four_bit(op, given.x, FourBit(flat[0], flat[1], columns, flat[2]), False)


def check_written(op: str, x: torch.Tensor, weight: torch.Tensor | Fp8 | FourBit, fp8: RowFormat) -> None:
    """ValueError unless the results of rows x and ``weight`` can be written in fp8 of this form."""
    check_row_format(op, fp8, x.device)
    if not isinstance(weight, Fp8) or x.dtype not in (torch.bfloat16, E4M3):
        raise ValueError(f"{op}: fp8={quoted(fp8)} is for fp8 weights and rows of fp8 or bf16; leave it out")
    if fp8.kind == "token":
        raise ValueError(f"{op}: fp8.kind='token', but several programs compute a row; quantize the result")


def check_gate_up(op: str, gate_up: torch.Tensor | Fp8, x: torch.Tensor, experts: Experts, team: Team) -> None:
    """ValueError unless the weight is of these experts and takes rows of x."""
    data, dtypes = gate_up, (x.dtype,)
    if isinstance(gate_up, Fp8):
        data, dtypes = gate_up.data, (E4M3,)
        check_tensor(op, "x", x, team, HALVES, over_nodes=True)
        check_like(op, "gate_up.scales", gate_up.scales, x.device, (torch.float32,), (experts.count, "n", "k"))
    check_tensor(op, "gate_up", data, team, dtypes, over_nodes=True)
    check_shape(op, "gate_up", data, (experts.count, "2 N", x.shape[1]))
    if data.shape[1] % 2 or 0 in data.shape:
        raise ValueError(f"{op}: gate_up has shape {tuple(data.shape)}; pass gate's N rows, then up's N, at least one")
    if isinstance(gate_up, Fp8):
        one = Fp8(data[0], gate_up.scales[0], gate_up.input_scale)
        check_fp8(op, ScaledMatrix(x.new_empty((1, x.shape[1]))), one, gated=True)
