"""The baseline under torch.compile: with NCCL, with torch's symmetric memory, and micro-pipelined.

compiled   gpt-fast's recipe: NCCL all-reduces
symmetric  all-reduces in torch's symmetric memory, one-shot or two-shot by size, and max-autotune for few rows
pipelined  tokens split over the ranks, and torch's pass that overlaps each all-gather and reduce-scatter with its GEMM
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.models import generate
from weft.bench.models.baseline import Functions, attend, grouped
from weft.bench.models.problem import StepProblem
from weft.bench.models.sessions import TorchSession
from weft.parallel.reference import AllReduce, Reference
from weft.parallel.tensors import AttentionWeights, MLPWeights, MoEWeights

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Rows up to which GEMMs are bound by the weights, where Triton's may be faster than cuBLAS's. Autotuning takes minutes.
AUTOTUNED_ROWS = 128
# Sums up to which the one-shot all-reduce takes less time than the two-shot one with its copy, on two and four H200s; and sums
# from which NCCL takes the least.
ONE_SHOT_BYTES, MOST_BYTES = 512 << 10, 32 << 20
# Rows up to which torch's fused all-gather asks for multicast where the driver offers it.
MULTICAST_ROWS = 2048
# (problem, rows of a step) -> functions for such steps
Compile = Callable[[StepProblem, int], Functions]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded(Reference):
    """Reference whose x and residual are this rank's rows; its all_reduce is a reduce-scatter."""

    gather: Callable[[Tensor], Tensor]

    def attention(self, x: Tensor, w: AttentionWeights, step: Any, cache: Any) -> Tensor:
        return Reference.attention(self, self.gather(x), w, step, cache)

    def mlp(self, x: Tensor, w: MLPWeights) -> Tensor:
        return Reference.mlp(self, self.gather(x), w)

    def moe(self, x: Tensor, w: MoEWeights) -> Tensor:
        return Reference.moe(self, self.gather(x), w)


def compiled(team: Team, rows: int) -> Functions:
    """Layers and head for steps of ``rows`` tokens, with NCCL.

    Layers of one token take coordinate_descent_tuning, as in gpt-fast: GEMMs become kernels of torch's own, which may stream
    weights faster than cuBLAS. It takes a minute.
    """
    recipe = Reference(team=team, attend=attend, all_reduce=_nccl(team), experts=grouped)
    return _functions(recipe, {"coordinate_descent_tuning": rows == 1}, {})


def symmetric(team: Team, rows: int, nbytes: int) -> Functions:
    """``compiled`` with all-reduces of ``nbytes`` in symmetric memory, and GEMMs of few rows autotuned."""
    if team.size == 1:
        raise Unavailable("one rank: nothing to sum; torch.compile is the same")
    if nbytes > MOST_BYTES:
        raise Unavailable(f"sums of {nbytes >> 20} MiB: NCCL takes less time than symmetric memory; see torch.compile")
    few = rows <= AUTOTUNED_ROWS
    options = {"max_autotune": few, "coordinate_descent_tuning": few}
    recipe = Reference(team=team, attend=attend, all_reduce=_in_symmetric_memory(team, nbytes), experts=grouped)
    return _functions(recipe, options, options)


def pipelined(team: Team, rows: int) -> Functions:
    """Functions whose layers take and give each rank's rows, with GEMMs that overlap (_micro_pipeline_tp)."""
    if team.size == 1 or rows % team.size:
        raise Unavailable(f"{rows} tokens are not split evenly over {team.size} ranks")
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    if rows <= MULTICAST_ROWS and _SymmetricMemory.has_multicast_support(DeviceType.CUDA, team.device.index):
        raise Unavailable(f"{rows} tokens: torch would use NVLink multicast, which is never requested here")
    world, name, ops = team.size, team.group.group_name, torch.ops._c10d_functional
    enable_symm_mem_for_group(name)
    recipe = Sharded(
        team=team,
        attend=attend,
        experts=grouped,
        all_reduce=lambda x: ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", world, name)),
        gather=lambda x: ops.wait_tensor(ops.all_gather_into_tensor(x, world, name)),
    )
    return _functions(recipe, {"_micro_pipeline_tp": True}, {})


def _functions(recipe: Reference, options: dict[str, Any], of_head: dict[str, Any]) -> Functions:
    """``recipe`` compiled, once for all layers of one window, which differ in tensors alone."""

    def one(function: Callable, options: dict[str, Any]) -> Callable:
        return torch.compile(function, fullgraph=True, dynamic=False, options=options)

    kind = type(recipe)
    layer, attention, mlp = (
        one(function, options) for function in (kind.decoder_layer, kind.attention, kind.feed_forward)
    )
    gather = recipe.gather if isinstance(recipe, Sharded) else None
    head = one(kind.logits, of_head)
    return Functions(recipe=recipe, layer=layer, attention=attention, mlp=mlp, head=head, gather=gather)


def _nccl(team: Team) -> AllReduce:
    """NCCL's sum as an op that torch.compile can trace."""
    if team.size == 1:
        return lambda x: x
    name, ops = team.group.group_name, torch.ops._c10d_functional
    return lambda x: ops.wait_tensor(ops.all_reduce(x, "sum", name))


def _in_symmetric_memory(team: Team, nbytes: int) -> AllReduce:
    name, op = team.group.group_name, _symmetric_op()
    return lambda x: op(x, name, nbytes <= ONE_SHOT_BYTES)


@functools.cache
def _symmetric_op() -> Callable[[Tensor, str, bool], Tensor]:
    """Torch op that torch.compile calls: the sum over the ranks of a group, through symmetric memory."""
    import torch.distributed._symmetric_memory as symm_mem

    # Two buffers in turn: before one is written again, all ranks have passed the barriers of the other's sum.
    buffers: dict[Any, itertools.cycle] = {}

    def buffer_of(x: Tensor, group: str) -> Tensor:
        key = group, x.shape, x.dtype
        if key not in buffers:
            made = [symm_mem.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2)]
            for buffer in made:
                symm_mem.rendezvous(buffer, group)
            buffers[key] = itertools.cycle(made)
        return next(buffers[key])

    def symmetric_all_reduce(x: torch.Tensor, group: str, one_shot: bool) -> torch.Tensor:
        buffer = buffer_of(x, group)
        if one_shot:
            return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", group)
        return torch.ops.symm_mem.two_shot_all_reduce_out(buffer.copy_(x), "sum", group, torch.empty_like(x))

    op = torch.library.custom_op("weft_bench::symmetric_all_reduce", symmetric_all_reduce, mutates_args=())
    op.register_fake(lambda x, group, one_shot: torch.empty_like(x))
    return op


# --- providers ---------------------------------------------------------------------------------------------------------


def by_compile(problem: StepProblem, make: Compile) -> Prepared:
    check_compiles(problem.team)
    step = problem.step
    functions = make(problem, step.batch * step.new)
    return problem.prepared(TorchSession(problem.baseline, step.batch, step.length, functions))


def decoding_by_compile(problem: generate.AnswersProblem, make: Compile) -> Prepared:
    check_compiles(problem.team)
    return generate.decode_by(problem, make(problem.of_step, problem.batch))


def check_compiles(team: Team) -> None:
    if team.is_simulated:
        raise Unavailable("torch.compile does not run on simulated ranks: they are threads of one process")


def with_nccl(problem: StepProblem, rows: int) -> Functions:
    return compiled(problem.team, rows)


def with_symmetric_memory(problem: StepProblem, rows: int) -> Functions:
    return symmetric(problem.team, rows, rows * problem.config.hidden_size * problem.dtype.itemsize)


def with_pipelining(problem: StepProblem, rows: int) -> Functions:
    if problem.step.decodes:
        raise Unavailable("micro-pipelining is for prompts: the rows of a decode step are too few to split")
    return pipelined(problem.team, rows)


def _provider(name: str, ops: tuple[str, ...], make: Callable[..., Prepared], compile: Compile) -> Provider:
    return Provider(name=name, ops=ops, role="other", make=functools.partial(make, make=compile))


STEPS = ("mlp", "attn", "model")
PROVIDERS = (
    _provider("torch.compile", STEPS, by_compile, with_nccl),
    _provider("torch.compile+symm", STEPS, by_compile, with_symmetric_memory),
    _provider("torch.compile+async_tp", STEPS, by_compile, with_pipelining),
    # Decoding steps of generate are of one size; its prompts are read eagerly.
    _provider("torch.compile", ("generate",), decoding_by_compile, with_nccl),
    _provider("torch.compile+symm", ("generate",), decoding_by_compile, with_symmetric_memory),
)
