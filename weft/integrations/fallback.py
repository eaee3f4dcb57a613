"""Choice for each call of an integration: weft, or the code that weft replaces.

captured  weft, if an eager call of the same shape ran before: that one makes the workspaces
eager     weft, if it is the first call of its shape or pays (``EAGER_FROM``)
refused   the original, with one line in the log: what weft cannot do, and what finds no room in the heap
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from weft.errors import HeapExhausted, WeftError
from weft.runtime.logs import logger_of
from weft.runtime.team.team import Team

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DeviceMesh

T = TypeVar("T")
logger = logger_of(__name__)

# FLOP of a rank's GEMM, and bytes of an all-reduce, from which on every measured call is at least as fast as the alternatives:
# two H200s, benchmarks/results/h200-x2-eager. The smallest GEMMs there are the limits; calls at new addresses are not replayed.
EAGER_FROM = {
    "all_gather_matmul": 2 * 512 * 2048 * 4096,
    "matmul_reduce_scatter": 2 * 512 * 4096 * 2048,
    "matmul_all_reduce": 2 * 512 * 4096 * 2048,
    "all_reduce": 32 << 20,
}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Kind(NamedTuple):
    """Calls that are decided alike.

    op      name in weft.ops
    sizes   (M, N, K) of a rank's GEMM with all rows, or (bytes,)
    fields  what else decides if weft can do it
    """

    op: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    fields: tuple[Any, ...] = ()

    @property
    def pays(self) -> bool:
        """True if an eager call on weft is at least as fast as the measured alternatives."""
        work = 1 if len(self.sizes) == 1 else 2
        for size in self.sizes:
            work *= size
        return work >= EAGER_FROM[self.op]


class Fallback:
    """The team of one process group, and what is known about its calls. All ranks decide alike."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._pays: dict[Kind, bool | None] = {}  # None: left to the original

    @staticmethod
    def of(group: ProcessGroup | DeviceMesh | None, heap_bytes: int | None = None) -> Fallback | None:
        """The one of ``group``'s shared team; None, with a line in the log, where weft cannot serve the group.

        Collective in the call that makes the team, and never under graph capture.
        """
        try:
            team = Team.of(group, heap_bytes=heap_bytes)
        except WeftError as error:
            logger.warning("a process group is left to the original code: %s", error)
            return None
        return team.workspace("integrations", lambda: Fallback._of(team))

    @staticmethod
    def _of(team: Team) -> Fallback | None:
        if team.rail is None:
            return Fallback(team)
        logger.warning(
            "a process group is left to the original code: weft replaces it within one node, not %s", team.shape
        )
        return None

    def call(
        self,
        kind: Kind,
        on_weft: Callable[[], T],
        original: Callable[[], T],
        problem: Callable[[], str | None],
        prepare: bool = True,
    ) -> T:
        """The result of ``on_weft()`` or ``original()``.

        problem  the reason why weft cannot do it, None if it can; asked at the first call of a kind
        prepare  a call of this kind may be captured later
        """
        if torch.compiler.is_compiling():
            return original() if problem() else on_weft()
        if self._pays.get(kind):
            return on_weft()
        capturing = self.team.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if kind not in self._pays:
            if capturing or not (prepare or kind.pays):
                return original()
            return self._first(kind, on_weft, original, problem())
        return on_weft() if capturing and self._pays[kind] is not None else original()

    def _first(self, kind: Kind, on_weft: Callable[[], T], original: Callable[[], T], problem: str | None) -> T:
        # Ranks may hold different shares of K, and must still go the same way.
        by_rank = self.team.exchange((kind.pays, problem))
        problem = next((reason for _, reason in by_rank if reason), None)
        if problem is None:
            try:
                result = on_weft()
            except HeapExhausted as error:
                problem = str(error)
            else:
                self._pays[kind] = self.team.is_simulated or all(pays for pays, _ in by_rank)
                return result
        self._pays[kind] = None
        logger.warning("%s of %s is left to the original code: %s", kind.op, kind.sizes, problem)
        return original()


def problem_of_operands(a: torch.Tensor, bs: Sequence[torch.Tensor], device: torch.device) -> str | None:
    """Reason why a[…, K] times each b[N, K].T is no GEMM of weft's; None if it is one."""
    for b in bs:
        if b.dim() != 2 or b.shape[1] != a.shape[-1]:
            return f"weights of shape {tuple(b.t().shape)} do not fit K={a.shape[-1]}"
        if b.dtype != a.dtype or a.dtype not in _DTYPES:
            return f"dtypes {a.dtype} and {b.dtype} are not one of fp16, bf16, fp32"
        if b.device != device or a.device != device:
            return f"operands on {a.device} and {b.device}, the team on {device}"
        if 0 in (*a.shape, *b.shape):
            return f"shapes {tuple(a.shape)} and {tuple(b.t().shape)} have a size of 0"
    return None if bs else "there are no weights"


def problem_of_sum(x: torch.Tensor, device: torch.device) -> str | None:
    """Reason why weft does not sum ``x`` over the ranks; None if it does."""
    if x.dtype not in _DTYPES:
        return f"dtype {x.dtype} is not one of fp16, bf16, fp32"
    if x.device != device:
        return f"a tensor on {x.device}, the team on {device}"
    return None if x.numel() else f"shape {tuple(x.shape)} has a size of 0"
