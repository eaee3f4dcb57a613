"""Baselines of ``weft bench train``: the recipe's GEMMs over ranks by cuBLAS and NCCL, or by torch's fused ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.training.problem import TrainProblem
from weft.bench.training.recipe import ByFunctions
from weft.ops.gemm.cublas import matmul
from weft.parallel import plain

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# --- cuBLAS and NCCL ---------------------------------------------------------------------------------------------------


def cublas_and_nccl(problem: TrainProblem) -> Prepared:
    """NCCL as Megatron has it, and cuBLAS as weft runs it.

    In the forward it takes the algorithm that was searched for the shape. In the backward x is gathered beside one GEMM, and
    its gradient scattered beside the other. The backward's GEMMs read transposes, which no searched algorithm takes
    (weft.runtime.cublaslt): they run torch's choice, on weft's side too.
    """
    group = _group(problem.team)
    return problem.prepared(
        ByFunctions(
            team=problem.team,
            local=plain,
            column=lambda x, weight: _NcclColumn.apply(x, weight, group),
            row=lambda x, weight: _NcclRow.apply(x, weight, group),
        )
    )


def _group(team: Team) -> Any:
    if team.group is None:
        raise Unavailable("needs GPUs; these are simulated ranks")
    return team.group


def _gathered(x: Tensor, group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    whole = x.new_empty(x.shape[0] * group.size(), x.shape[1])
    return whole, dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=async_op)


def _scattered(x: Tensor, group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    mine = x.new_empty(x.shape[0] // group.size(), x.shape[1])
    return mine, dist.reduce_scatter_tensor(mine, x, group=group, async_op=async_op)


class _NcclColumn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return matmul(_gathered(x, group)[0], weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        whole, gathering = _gathered(x, ctx.group, async_op=True)
        summand = grad @ weight
        gathering.wait()
        of_x, scattering = _scattered(summand, ctx.group, async_op=True)
        of_weight = grad.T @ whole
        scattering.wait()
        return of_x, of_weight, None


class _NcclRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return _scattered(matmul(x, weight), group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        whole, _ = _gathered(grad, ctx.group)
        return whole @ weight, whole.T @ x, None


# --- torch's fused ops -------------------------------------------------------------------------------------------------


def torch_fused(problem: TrainProblem) -> Prepared:
    """torch.ops.symm_mem with the backward of torchtitan's linear layers.

    Of x a rank saves 1/W of the columns of all rows, which the gradient of the weight gathers.
    """
    import torch.distributed._symmetric_memory  # noqa: F401  defines the ops

    name, place = _group(problem.team).group_name, (problem.team.rank, problem.team.size)
    return problem.prepared(
        ByFunctions(
            team=problem.team,
            local=plain,
            column=lambda x, weight: _FusedColumn.apply(x, weight, name, place),
            row=lambda x, weight: _FusedRow.apply(x, weight, name),
        )
    )


class _FusedColumn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, place: tuple[int, int]) -> Tensor:
        rank, world_size = place
        whole, [y] = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.T], 0, name, return_A=True)
        ctx.save_for_backward(whole.chunk(world_size, dim=1)[rank].T.contiguous(), weight)
        ctx.name = name
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        columns, weight = ctx.saved_tensors
        of_x = torch.ops.symm_mem.fused_matmul_reduce_scatter(grad, weight, "sum", 0, ctx.name)
        _, [of_weight] = torch.ops.symm_mem.fused_all_gather_matmul(columns, [grad], 0, ctx.name, return_A=True)
        return of_x, of_weight.T, None, None


class _FusedRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name = name
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.T, "sum", 0, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        whole, [of_x] = torch.ops.symm_mem.fused_all_gather_matmul(
            grad.contiguous(), [weight], 0, ctx.name, return_A=True
        )
        return of_x, whole.T @ x, None


PROVIDERS = (
    Provider(name="cublas+nccl", ops=("train",), role="other", make=cublas_and_nccl),
    Provider(name="torch.fused", ops=("train",), role="other", make=torch_fused),
)
