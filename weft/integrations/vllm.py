"""weft in vLLM: the tensor-parallel all-reduce and row-parallel linear layers, by a general plugin.

    WEFT_VLLM=1 vllm serve NAME --tensor-parallel-size 2

vLLM finds ``register`` by the entry point ``vllm.general_plugins`` in all its processes. ``weft.integrations.fallback`` decides
which calls run on weft: in CUDA graphs, and long eager ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.runtime.environment import vllm_is_asked_for
from weft.runtime.logs import logger_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.model_executor.layers.linear import RowParallelLinear

    from weft.integrations.fallback import Fallback

__all__ = ["register"]
logger = logger_of(__name__)
# vLLM's own limit of captured batches, where its config says none.
_CAPTURED_ROWS = 512
# The library of the op that torch.compile sees, once ``replace`` has run.
_OPS: list[torch.library.Library] = []


class Group(NamedTuple):
    """One tensor-parallel group of vLLM.

    captured_rows  most tokens of a step that vLLM captures
    fuses          vLLM's compiler fuses all-reduces with the norms that follow, by FlashInfer
    """

    fallback: Fallback
    captured_rows: int
    fuses: bool

    def all_reduce(self, x: torch.Tensor, theirs: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Sum of ``x`` over the ranks. theirs: vLLM's."""
        from weft import ops
        from weft.integrations.fallback import Kind, problem_of_sum

        return self.fallback.call(
            Kind("all_reduce", (x.numel() * x.element_size(),), x.dtype, tuple(x.shape)),
            lambda: ops.all_reduce(x, self.fallback.team),
            theirs,
            lambda: problem_of_sum(x, self.fallback.team.device),
            prepare=x.shape[:-1].numel() <= self.captured_rows,
        )

    def row_parallel_linear(
        self, x: torch.Tensor, weight: torch.Tensor, theirs: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Sum of x[…, K] @ weight[N, K].T over the ranks. theirs: vLLM's."""
        from weft import ops
        from weft.integrations.fallback import Kind, problem_of_operands

        team, rows = self.fallback.team, x.shape[:-1].numel()
        return self.fallback.call(
            Kind("matmul_all_reduce", (rows, *weight.shape), x.dtype),
            lambda: ops.matmul_all_reduce(x.flatten(0, -2), weight, team).view(*x.shape[:-1], -1),
            theirs,
            lambda: problem_of_operands(x, [weight], team.device),
            prepare=rows <= self.captured_rows,
        )


def register() -> None:
    """Replace vLLM's all-reduce and RowParallelLinear if WEFT_VLLM=1. Later calls of a process do nothing."""
    if not vllm_is_asked_for():
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        logger.warning("WEFT_VLLM=1: vLLM runs on %s, not on CUDA; nothing is replaced", current_platform.device_name)
        return
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    replace(CudaCommunicator)


def replace(communicator: type) -> None:
    """Replace the all-reduce of a class of device communicators, and RowParallelLinear."""
    if hasattr(communicator, "weft"):
        return
    init, theirs = communicator.__init__, communicator.all_reduce

    def __init__(self: CudaCommunicator, *args: object, **options: object) -> None:
        init(self, *args, **options)
        self.weft = group_of(self)

    def all_reduce(self: CudaCommunicator, input_: torch.Tensor) -> torch.Tensor:
        return theirs(self, input_) if self.weft is None else self.weft.all_reduce(input_, lambda: theirs(self, input_))

    communicator.weft = None
    communicator.__init__, communicator.all_reduce = __init__, all_reduce
    _define_op()
    _replace_layer()
    import vllm.envs

    import weft

    # A part of the keys of compiled graphs, which differ with the op.
    vllm.envs.environment_variables["WEFT_VLLM"] = lambda: weft.__version__


def group_of(communicator: CudaCommunicator) -> Group | None:
    """The group of a communicator; None, with a line in the log, where it is left to vLLM. Collective."""
    if communicator.unique_name.partition(":")[0] != "tp" or communicator.world_size == 1:
        return None
    import vllm.envs
    from vllm.config import get_current_vllm_config_or_none

    from weft.integrations.fallback import Fallback

    config = get_current_vllm_config_or_none()
    if reason := reason_against(config, vllm.envs.VLLM_BATCH_INVARIANT):
        logger.warning("WEFT_VLLM=1: left to vLLM: %s", reason)
        return None
    fallback = Fallback.of(communicator.device_group)
    if fallback is None:
        return None
    logger.info("WEFT_VLLM=1: all-reduces and row-parallel layers of %s run on weft", communicator.unique_name)
    return Group(fallback, *settings_of(config))


def reason_against(config: VllmConfig | None, batch_invariant: bool) -> str | None:
    """Reason to leave everything to vLLM; None: there is none."""
    if batch_invariant:
        return "VLLM_BATCH_INVARIANT=1, and weft's sums depend on the number of tokens"
    if config is not None and config.parallel_config.use_ubatching:
        return "two microbatches run on two streams, and a team's calls need one"
    return None


def settings_of(config: VllmConfig | None) -> tuple[int, bool]:
    """``captured_rows`` and ``fuses`` of vLLM's config."""
    if config is None:
        return _CAPTURED_ROWS, False
    compilation = config.compilation_config
    return compilation.max_cudagraph_capture_size or 0, bool(compilation.pass_config.fuse_allreduce_rms)


# --- row-parallel layers ---------------------------------------------------------------------------------------------


def _define_op() -> None:
    """Define ``torch.ops.weft.vllm_row_parallel_linear``, which decides at each run and is not traced."""
    library = torch.library.Library("weft", "FRAGMENT")
    library.define("vllm_row_parallel_linear(Tensor x, Tensor weight) -> Tensor")
    library.impl("vllm_row_parallel_linear", _row_parallel_linear, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "weft::vllm_row_parallel_linear", lambda x, weight: x.new_empty((*x.shape[:-1], len(weight))), lib=library
    )
    _OPS.append(library)


def _row_parallel_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x[…, K] @ weight[N, K].T, summed over vLLM's tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    communicator = get_tp_group().device_communicator
    return communicator.weft.row_parallel_linear(
        x, weight, lambda: communicator.all_reduce(torch.nn.functional.linear(x, weight))
    )


def _replace_layer() -> None:
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.layers.linear import RowParallelLinear

    class WeftRowParallelLinear(RowParallelLinear):
        """RowParallelLinear whose GEMM and all-reduce are one op, where weft has it."""

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            communicator = get_tp_group().device_communicator
            group = getattr(communicator, "weft", None)
            self.on_weft = group is not None and is_plain(self) and not displaces_fusion(group)

        def forward(self, input_: torch.Tensor) -> Any:
            if not self.on_weft:
                return super().forward(input_)
            out = torch.ops.weft.vllm_row_parallel_linear(input_, self.weight)
            return (out, None) if self.return_bias else out

    RowParallelLinear.register_oot(WeftRowParallelLinear, name="RowParallelLinear")


def is_plain(layer: RowParallelLinear) -> bool:
    """True if a RowParallelLinear is one GEMM of unquantized weights and one all-reduce."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    method = layer.quant_method
    return (
        type(method) is UnquantizedLinearMethod
        and getattr(method, "_gemm_impl", default_unquantized_gemm) is default_unquantized_gemm
        and layer.tp_size > 1
        and layer.input_is_parallel
        and layer.reduce_results
        and layer.bias is None
    )


def displaces_fusion(group: Group) -> bool:
    """True if vLLM fuses all-reduces with norms by NVLink multicast, with which weft was not compared."""
    return group.fuses and group.fallback.team.caps.multicast
