"""FlashInfer's all-reduce with residual and RMS norm, and its AG-GEMM in Triton, where flashinfer-python 0.7.2 is installed.

The all-reduce is TensorRT-LLM's, over pointers to the peers' memory; the one over NVLink multicast (mnnvl) is not run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.ops.buffers import group_of
from weft.bench.ops.normed import copy_into
from weft.bench.ops.problem import OpProblem
from weft.ops.case import Case

from .moe_packages import package

HOW = "`pip install flashinfer-python==0.7.2.post1`, or benchmarks/peers.sh with its archive"
# It takes the start of an allocation for the tensor's.
POOL = "torch's pool put symmetric tensors into one allocation; set TORCH_SYMMMEM_IMPLICIT_POOL=0, as benchmarks/peers.sh does"
TILE = 128
GROUP = 8  # rows of tiles that share columns in the cache


def all_reduce_norm(problem: OpProblem, one_shot: bool) -> Prepared:
    """Its kernel as vLLM calls it: sums in fp32, and launches that overlap with the kernel before (PDL)."""
    group, team, (x, *_) = group_of(problem), problem.team, problem.sets[0]
    if x.dtype == torch.float32:
        raise Unavailable("timed in bf16 and fp16 alone")
    if not one_shot and len(x) <= team.size:
        raise Unavailable(f"its two shots take more than {team.size} rows, not {len(x)}")
    module = package("flashinfer.comm.trtllm_ar", HOW)
    handles, workspace = module.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        team.rank, team.size, len(x), x.shape[1], group=group
    )
    tensors = [tensor for tensor, _ in module._symm_workspace_refs[id(handles)]]
    if [tensor.data_ptr() for tensor in tensors] != [pointers[team.rank] for pointers in handles]:
        raise Unavailable(POOL)
    tensors[1].zero_()  # flags
    torch.cuda.synchronize()
    team.barrier()
    normed, hidden = torch.empty_like(x), torch.empty_like(x)
    how = {
        "world_size": team.size, "world_rank": team.rank, "token_num": len(x), "hidden_dim": x.shape[1],
        "workspace_ptrs": workspace, "launch_with_pdl": True, "trigger_completion_at_end": True, "fp32_acc": True,
        "pattern_code": module.AllReduceFusionPattern.kARResidualRMSNorm, "use_oneshot": one_shot, "allreduce_out": None,
        "residual_out": hidden, "norm_out": normed, "quant_out": None, "scale_out": None, "rms_eps": Case.eps,
        "scale_factor": None, "layout_code": None,
    }  # fmt: skip

    def run(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        given, residual, weight = problem.sets[number]
        module.trtllm_allreduce_fusion(allreduce_in=given, residual_in=residual, rms_gamma=weight, **how)
        return normed, hidden

    return Prepared(run=run, close=partial(module.trtllm_destroy_ipc_workspace_for_all_reduce_fusion, handles, group))


def all_gather_gemm(problem: OpProblem) -> Prepared:
    """Its kernels in the order of its all_gather_matmul, on symmetric memory that is allocated once, not at each call.

    Copy engines push the rows to the peers, a flag behind each shard; weights lie as it wants them, [K, N].
    """
    import torch.distributed._symmetric_memory as symm_mem

    group, team, (a, b) = group_of(problem), problem.team, problem.sets[0]
    (M, K), N, W = a.shape, len(b), team.size
    if M % TILE or N % TILE or K % TILE:
        raise Unavailable(f"a shard of {M} x {K} and weights of {N} x {K} are not whole tiles of {TILE}")
    kernels = package("flashinfer.comm.all_gather_matmul.all_gather_matmul_triton", HOW)
    kernels.Configs.initialize()
    rows = symm_mem.empty(M, K, dtype=problem.dtype, device=team.device)
    gathered = symm_mem.empty(W, M, K, dtype=problem.dtype, device=team.device)
    of_rows, of_gathered = (symm_mem.rendezvous(x, group.group_name) for x in (rows, gathered))
    word = kernels.Configs.SIGNAL_DTYPE
    arrived = of_gathered.get_signal_pad(team.rank, (W, 1), word, 0)
    entered = tuple(of_rows.get_signal_pad(rank, (W,), word, 0) for rank in range(W))
    if arrived.data_ptr() == entered[team.rank].data_ptr():
        raise Unavailable(POOL)
    arrived.zero_()
    entered[team.rank].zero_()
    torch.cuda.synchronize()
    weights = [weight.t().contiguous() for _, weight in problem.sets]
    stream = torch.cuda.Stream(team.device)
    team.barrier()

    def run(number: int) -> torch.Tensor:
        current = torch.cuda.current_stream()
        kernels.barrier_triton(entered, team.rank)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            kernels.broadcast_input(rows, gathered, of_gathered, M)
        sizes: Any = TILE, TILE, TILE, M, GROUP, team.rank, W
        out = kernels.triton_wait_signal_matmul(rows, gathered.view(W * M, K), weights[number], arrived, *sizes)
        arrived.zero_()
        current.wait_stream(stream)
        return out

    prepare = partial(_written, problem, rows)
    prepare(0)
    return Prepared(run=run, prepare=prepare)


def _written(problem: OpProblem, rows: torch.Tensor, number: int) -> None:
    copy_into(rows, problem.sets[number][0])


PROVIDERS = (
    Provider(
        name="flashinfer.one_shot",
        ops=("all-reduce-rms-norm",),
        role="other",
        make=partial(all_reduce_norm, one_shot=True),
    ),
    Provider(
        name="flashinfer.two_shot",
        ops=("all-reduce-rms-norm",),
        role="other",
        make=partial(all_reduce_norm, one_shot=False),
    ),
    Provider(name="flashinfer.triton", ops=("ag-gemm",), role="other", make=all_gather_gemm),
)
