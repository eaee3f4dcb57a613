"""Capabilities and checks for ops of one rank, which have no team: by the tensors' device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from weft.arguments import quoted
from weft.kernels.fp8 import RowFormat
from weft.ops.registration import HALVES, check_is_tensor
from weft.plan.planned import Machine, machine
from weft.runtime import capabilities, virtual_rank


def capabilities_of(device: torch.device) -> capabilities.Capabilities:
    """Capabilities of the device of a call's tensors. ValueError for the CPU outside a simulation."""
    if device.type != "cpu":
        return _probe(device)
    if not virtual_rank.is_running():
        raise ValueError(
            "tensors are on cpu: kernels run on GPUs, and inside weft.simulate; move them with .to('cuda')"
        )
    return capabilities.simulated(1, like=virtual_rank.gpu_of_this_thread() or capabilities.DEFAULT_GPU)


def machine_on(device: torch.device) -> Machine:
    """Machine of ops on one rank: the capabilities of ``device`` and a world size of 1."""
    return machine(capabilities_of(device), 1)


class Compiled(Protocol):
    """A design that names compiler options."""

    num_warps: int
    num_stages: int


def compiler_options(design: Compiled, caps: capabilities.Capabilities) -> dict[str, Any]:
    """Options of a launch by ``design``."""
    return {"num_warps": design.num_warps, "num_stages": design.num_stages, **capabilities.launch_options(caps)}


@functools.lru_cache
def _probe(device: torch.device) -> capabilities.Capabilities:
    return capabilities.probe(device, [])


def check_like(
    op: str,
    name: str,
    x: torch.Tensor,
    device: torch.device | None,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str] | None = None,
) -> None:
    """ValueError unless ``x`` lies on ``device`` (None: any), and has one of ``dtypes`` and a ``shape``.

    shape  as of ``check_shape``; None: any
    """
    try:
        fits = x.dtype in dtypes and (device is None or x.device == device) and x.layout is torch.strided
    except AttributeError:
        fits = False
    if fits:
        if shape is not None:
            check_shape(op, name, x, shape)
        return
    check_is_tensor(op, name, x)
    if device is not None and x.device != device:
        raise ValueError(f"{op}: {name} is on {x.device}, not on {device}; move it with {name}.to('{device}')")
    allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(f"{op}: {name}.dtype={x.dtype} is not one of {allowed}; convert it with {name}.to(...)")


def norm_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Dtypes that the weight of a norm of rows in ``dtype`` may have."""
    return (dtype,) if dtype == torch.float32 else (dtype, torch.float32)


def check_row_format(op: str, format: RowFormat | None, device: torch.device, beside: bool = False) -> None:
    """ValueError unless ``format`` is None, or one of fp8 rows on ``device``.

    beside  the op can write rows of 16 bits too
    """
    if format is None:
        return
    if not isinstance(format, RowFormat) or format.kind not in ("group", "token", "static"):
        raise ValueError(f"{op}: fp8={quoted(format)} is no RowFormat; pass the row_format of the weight that follows")
    if format.beside and not beside:
        raise ValueError(f"{op}: fp8 has beside=True, which add_rms_norm and all_reduce_rms_norm take; leave it out")
    scale = format.static_scale
    if (format.kind == "static") != (scale is not None):
        raise ValueError(f"{op}: fp8 has kind={format.kind!r} and static_scale={quoted(scale)}; a static one is given")
    if scale is not None:
        check_like(op, "fp8.static_scale", scale, device, (torch.float32,), (1, 1))


def check_rounds(op: str, format: RowFormat | None, name: str, x: torch.Tensor, beside: bool = False) -> None:
    """``check_row_format``, and ValueError with a format unless ``x`` is a matrix of 16 bits."""
    check_row_format(op, format, x.device, beside)
    if format is None:
        return
    check_dtype(op, x.dtype)
    if x.dim() != 2:
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)} with fp8; pass rows, [tokens, columns]")


def check_dtype(op: str, dtype: torch.dtype) -> None:
    """ValueError unless results of ``dtype`` can be put in fp8."""
    if dtype not in HALVES:
        raise ValueError(f"{op}: a result of {dtype} with fp8; rows in fp8 are made of float16 or bfloat16")


def check_shape(op: str, name: str, x: torch.Tensor, shape: Sequence[int | str]) -> None:
    """ValueError unless ``x`` has ``shape``, in which a string stands for any size."""
    fits = x.dim() == len(shape) and all(
        isinstance(want, str) or size == want for size, want in zip(x.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; it must be ({wanted})")


def check_contiguous(op: str, name: str, x: torch.Tensor) -> None:
    """ValueError unless ``x``, which a kernel writes or reads where it lies, is contiguous."""
    if not x.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {x.stride()}; it is used in place, so it must be contiguous")
