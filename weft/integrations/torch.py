"""weft in PyTorch: torch's fused tensor-parallel ops, and styles for ``parallelize_module``.

    weft.integrations.torch.install(mesh["tp"])        # torchtitan's dist_gemm and async TP of torch.compile run on weft
    parallelize_module(model, mesh["tp"], {"up": WeftColwiseParallel(input_layouts=Shard(0)), …})

``install`` replaces the CUDA kernels of ``symm_mem::fused_all_gather_matmul`` and ``symm_mem::fused_matmul_reduce_scatter``, by
CPU kernels on virtual ranks. ``weft.integrations.fallback`` decides which calls run on weft.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symm_mem
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from weft import ops
from weft.integrations.fallback import Fallback, Kind, problem_of_operands
from weft.runtime.team.team import Team

# The kernels of symm_mem's ops, held while they are installed, and the groups that they serve.
_KERNELS: list[torch.library.Library] = []
_SERVED: dict[ProcessGroup, Fallback | None] = {}


def install(group: ProcessGroup | DeviceMesh | None = None, *, heap_bytes: int | None = None) -> bool:
    """Have torch's fused ops on ``group`` run on weft. Collective, before any capture.

    group       process group or one-dimensional DeviceMesh; None: all ranks
    heap_bytes  symmetric memory per rank of its team, as in ``weft.Team.of``

    False, with a line in the log, where weft cannot serve the group, which is then left to torch.
    """
    fallback = Fallback.of(group, heap_bytes)
    if fallback is None:
        return False
    _SERVED[group.get_group() if isinstance(group, DeviceMesh) else group or c10d.group.WORLD] = fallback
    if not _KERNELS:
        _register("CUDA" if fallback.team.device.type == "cuda" else "CPU")
    return True


def uninstall() -> None:
    """Give all groups' ops back to torch. Their teams stay."""
    _SERVED.clear()
    for library in _KERNELS:
        library._destroy()
    _KERNELS.clear()


def _register(key: str) -> None:
    """Put weft's kernels in front of torch's for a dispatch key."""
    library = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        library.impl("fused_all_gather_matmul", _fused_all_gather_matmul, key, allow_override=True)
        library.impl("fused_matmul_reduce_scatter", _fused_matmul_reduce_scatter, key, allow_override=True)
    _KERNELS.append(library)


# --- torch's ops -----------------------------------------------------------------------------------------------------


def _fused_all_gather_matmul(
    A: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """symm_mem::fused_all_gather_matmul. B: [K, N], either dimension contiguous."""

    def original() -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        torchs = symm_mem._fused_all_gather_matmul if A.is_cuda else symm_mem._fused_all_gather_matmul_fallback
        return torchs(A, Bs, gather_dim, group_name, return_A=return_A)

    def problem() -> str | None:
        if not 0 <= gather_dim < A.dim() - 1:
            return f"gather_dim={gather_dim} of {A.dim()} dimensions does not gather rows"
        return problem_of_operands(A, [B.t() for B in Bs], fallback.team.device)

    def on_weft() -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        gathered, outs = None, _all_gather_linear(A, [B.t() for B in Bs], gather_dim, fallback.team, return_A)
        if return_A:
            *outs, gathered = outs
        return gathered, outs

    fallback = _fallback_of(group_name)
    if fallback is None:
        return original()
    A, Bs = _without_gradient(A), list(map(_without_gradient, Bs))
    rows = A.shape[:-1].numel() * fallback.team.size
    kind = Kind("all_gather_matmul", (rows, sum(B.shape[-1] for B in Bs), A.shape[-1]), A.dtype, (gather_dim, return_A))
    return fallback.call(kind, on_weft, original, problem)


def _fused_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """symm_mem::fused_matmul_reduce_scatter. B: [K, N], either dimension contiguous."""

    def original() -> torch.Tensor:
        torchs = symm_mem._fused_matmul_reduce_scatter if A.is_cuda else symm_mem._fused_matmul_reduce_scatter_fallback
        return torchs(A, B, reduce_op, scatter_dim, group_name)

    def problem() -> str | None:
        if reduce_op not in ("sum", "avg"):
            return f"reduce_op={reduce_op!r} is neither sum nor avg"
        return _problem_of_scatter(A, B.t(), scatter_dim, fallback.team)

    def on_weft() -> torch.Tensor:
        out = _linear_reduce_scatter(A, B.t(), scatter_dim, fallback.team)
        return out.div_(fallback.team.size) if reduce_op == "avg" else out

    fallback = _fallback_of(group_name)
    if fallback is None:
        return original()
    A, B = _without_gradient(A), _without_gradient(B)
    sizes = A.shape[:-1].numel(), B.shape[-1], A.shape[-1]
    kind = Kind("matmul_reduce_scatter", sizes, A.dtype, (scatter_dim, reduce_op))
    return fallback.call(kind, on_weft, original, problem)


def _fallback_of(group_name: str) -> Fallback | None:
    group = c10d._resolve_process_group(group_name)
    fallback = _SERVED.get(group)
    if fallback is not None and fallback.team.is_closed:
        fallback = _SERVED[group] = Fallback.of(group)
    return fallback


def _without_gradient(x: torch.Tensor) -> torch.Tensor:
    """``x`` as torch's fused ops take it, which have no gradients: their callers' formulas call them."""
    return x.detach() if x.requires_grad else x


def _problem_of_scatter(x: torch.Tensor, weight: torch.Tensor, dim: int, team: Team) -> str | None:
    """Reason why weft cannot scatter x[…, K] @ weight[N, K].T along ``dim``; None if it can."""
    if not 0 <= dim < x.dim() - 1:
        return f"dimension {dim} of {x.dim()} does not scatter rows"
    if x.shape[dim] % team.size:
        return f"size {x.shape[dim]} of dimension {dim} is not divisible by {team.size} ranks"
    return problem_of_operands(x, [weight], team.device)


def _all_gather_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], dim: int, team: Team, return_gathered: bool = False
) -> list[torch.Tensor]:
    """Products of x[…, K], gathered along ``dim``, and each weight[N, K].T; then the gathered x."""
    # Each view takes the host a microsecond or two, and a matrix needs none.
    rows = flat = x
    if x.dim() > 2:
        rows = x.movedim(dim, 0)
        flat = rows.flatten(0, -2)
    if return_gathered:
        outs, gathered = ops.all_gather_matmul(flat, list(weights), team, return_gathered=True)
        outs = [*outs, gathered]
    elif len(weights) == 1:
        outs = [ops.all_gather_matmul(flat, weights[0], team)]
    else:
        outs = ops.all_gather_matmul(flat, list(weights), team)
    if x.dim() == 2:
        return outs
    shape = team.size * rows.shape[0], *rows.shape[1:-1], -1
    return [out.view(shape).movedim(0, dim) for out in outs]


def _linear_reduce_scatter(x: torch.Tensor, weight: torch.Tensor, dim: int, team: Team) -> torch.Tensor:
    """Sum of x[…, K] @ weight[N, K].T over the ranks, scattered along ``dim``."""
    if x.dim() == 2:
        return ops.matmul_reduce_scatter(x, weight, team)
    rows = x.movedim(dim, 0)
    out = ops.matmul_reduce_scatter(rows.flatten(0, -2), weight, team)
    return out.view(rows.shape[0] // team.size, *rows.shape[1:-1], -1).movedim(0, dim)


# --- styles ----------------------------------------------------------------------------------------------------------


class WeftColwiseParallel(ColwiseParallel):
    """torch's ColwiseParallel, with the gather of a sharded input under the GEMM, forward and backward.

    On weft: an ``nn.Linear`` with ``input_layouts=Shard(d)``, d a dimension of tokens, and output sharded by features. torch's
    own code computes the rest, and what weft cannot do.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (given,), (wanted,) = self.input_layouts, self.output_layouts
        if not (isinstance(module, nn.Linear) and isinstance(given, Shard) and _of_features(wanted)):
            return super()._apply(module, device_mesh)

        def compute(fallback: Fallback, x: torch.Tensor) -> tuple[Kind, Callable[[], torch.Tensor], Callable[[], Any]]:
            weight, dim, team = module.weight.to_local(), given.dim % x.dim(), fallback.team

            def on_weft() -> torch.Tensor:
                (out,) = _all_gather_linear(x, [weight], dim, team)
                return out if module.bias is None else out + module.bias.to_local()

            def problem() -> str | None:
                if dim == x.dim() - 1:
                    return "the input is sharded by features, not by tokens"
                return problem_of_operands(x, [weight], team.device)

            sizes = x.shape[:-1].numel() * team.size, weight.shape[0], x.shape[-1]
            return Kind("all_gather_matmul", sizes, x.dtype, (dim,)), on_weft, problem

        return _apply_style(self, module, device_mesh, compute)


class WeftRowwiseParallel(RowwiseParallel):
    """torch's RowwiseParallel, the sum over the ranks overlapped with the GEMM, forward and backward.

    On weft: an ``nn.Linear`` whose input is sharded by features, with ``output_layouts=Shard(d)``, d a dimension of tokens, or
    ``Replicate()``. torch's own code computes the rest, and what weft cannot do.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (given,), (wanted,) = self.input_layouts, self.output_layouts
        if not (isinstance(module, nn.Linear) and _of_features(given) and not wanted.is_partial()):
            return super()._apply(module, device_mesh)
        scatters = isinstance(wanted, Shard)

        def compute(fallback: Fallback, x: torch.Tensor) -> tuple[Kind, Callable[[], torch.Tensor], Callable[[], Any]]:
            weight, team = module.weight.to_local(), fallback.team
            dim = wanted.dim % x.dim() if scatters else 0

            def on_weft() -> torch.Tensor:
                if scatters:
                    out = _linear_reduce_scatter(x, weight, dim, team)
                else:
                    out = _MatmulAllReduce.apply(x.flatten(0, -2), weight, team).view(*x.shape[:-1], -1)
                if module.bias is None:
                    return out
                # Each rank adds it to its tokens: the gradient is the sum over the ranks.
                return out + module.bias.to_local(grad_placements=[Partial() if scatters else Replicate()])

            def problem() -> str | None:
                if x.dim() < 2:
                    return f"the input has {x.dim()} dimension"
                if scatters:
                    return _problem_of_scatter(x, weight, dim, team)
                return problem_of_operands(x, [weight], team.device)

            op = "matmul_reduce_scatter" if scatters else "matmul_all_reduce"
            sizes = x.shape[:-1].numel(), weight.shape[0], module.in_features
            return Kind(op, sizes, x.dtype, (dim,)), on_weft, problem

        return _apply_style(self, module, device_mesh, compute)


def _of_features(layout: Placement) -> bool:
    return isinstance(layout, Shard) and layout.dim == -1


def _apply_style(
    style: ColwiseParallel | RowwiseParallel, module: nn.Linear, mesh: DeviceMesh, compute: Callable[..., Any]
) -> nn.Module:
    """Shard ``module`` as torch's style does, and have its forward compute on weft or as torch's."""
    fallback = Fallback.of(mesh)
    if fallback is None:
        return type(style).__bases__[0]._apply(style, module, mesh)
    style.desired_input_layouts = (Replicate(),) if isinstance(style, ColwiseParallel) else (Shard(-1),)
    distribute_module(module, mesh, style._partition_linear_fn)

    def forward(x: torch.Tensor) -> torch.Tensor:
        def original() -> torch.Tensor:
            given = style._prepare_input_fn(style.input_layouts, style.desired_input_layouts, module, (x,), mesh)
            out = F.linear(given, module.weight, module.bias)
            return style._prepare_output_fn(style.output_layouts, style.use_local_output, module, out, mesh)

        def on_weft() -> torch.Tensor:
            out = local()
            return (
                out if style.use_local_output else DTensor.from_local(out, mesh, style.output_layouts, run_check=False)
            )

        if torch.is_autocast_enabled(x.device.type) or (isinstance(x, DTensor) and x.placements != style.input_layouts):
            return original()
        kind, local, problem = compute(fallback, x.to_local() if isinstance(x, DTensor) else x)
        return fallback.call(kind, on_weft, original, problem)

    module.forward = forward
    return module


class _MatmulAllReduce(torch.autograd.Function):
    """matmul_all_reduce of one result, as of a DTensor: every rank has its whole gradient.

    The gradient of ops.matmul_all_reduce is W times this one, the sum over ranks with one loss each.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, team: Team) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return ops.matmul_all_reduce(x, weight, team)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, None
