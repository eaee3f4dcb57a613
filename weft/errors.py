"""Errors that users of weft can meet. Each has fields, from which its message is built.

Errors about wrong arguments are also ``ValueError``, so that callers can catch them without knowing weft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class WeftError(Exception):
    """Base of all errors that weft raises on purpose; its message is one that a user can act on."""

    def __reduce__(self) -> tuple:
        # Errors are sent between rank processes. Constructors take fields, not messages, so pickle must not call them.
        return _rebuild, (type(self), self.args, self.__dict__)


# --- teams and the symmetric heap ------------------------------------------------------------------------------------


class NoTeam(WeftError):
    """``weft.init()`` without GPUs or ranks to build a team from."""


class TeamClosed(WeftError):
    """A use of a team after its ``close()``."""

    def __init__(self, team: str, rank: int, what: str) -> None:
        super().__init__(f"rank {rank}: {what} on team '{team}' after close(); make a new team with weft.init()")
        self.team, self.rank, self.what = team, rank, what


class SeveralNodes(WeftError, ValueError):
    """A use of a team of several nodes that only the ranks of one node have. ``what``: the use."""

    def __init__(self, rank: int, what: str, shape: str) -> None:
        super().__init__(
            f"rank {rank}: {what} of a team of {shape}: memory, kernels and copy engines reach the ranks of one node; use "
            f"team.node, and team.rail between nodes"
        )
        self.rank, self.what, self.shape = rank, what, shape


class HeapExhausted(WeftError):
    """No room in the symmetric heap.

    free   bytes left in all; ``piece``: in the largest free block
    tail   free bytes at the heap's end, where a larger heap has more
    """

    def __init__(
        self, rank: int, wanted: int, free: int, piece: int, tail: int, total: int, largest: Sequence[str] = ()
    ) -> None:
        left = f"{free:,} left" + (f", the largest piece {piece:,}" if piece < free else "")
        held = f"; the largest tensors in it: {', '.join(largest)}" if largest else ""
        super().__init__(
            f"rank {rank}: {wanted:,} bytes wanted of a symmetric heap of {total:,} bytes that has {left}{held}. "
            f"Make it larger: heap_bytes={_round_up(total - tail + wanted):_}"
        )
        self.rank, self.wanted, self.free, self.piece, self.total = rank, wanted, free, piece, total


class NotSymmetric(WeftError, ValueError):
    """A tensor outside the symmetric heap where a symmetric one is needed.

    argument  its name; without a ``shape`` also the place in a kernel where it is used
    """

    def __init__(self, rank: int, argument: str, shape: Sequence[int] | None = None) -> None:
        named = argument if shape is None else f"rank {rank}: {argument} of shape {tuple(shape)}"
        super().__init__(
            f"{named} does not lie in the team's symmetric heap, so no peer can reach it; make it with team.empty(), "
            f"team.zeros() or team.signals()"
        )
        self.rank, self.argument = rank, argument


class AllocationMismatch(WeftError):
    """Ranks that allocate or free different tensors; no rank has done so. ``what``: the call."""

    def __init__(self, rank: int, what: str, by_rank: Sequence[str]) -> None:
        listed = "; ".join(f"rank {r}: {request}" for r, request in enumerate(by_rank))
        super().__init__(
            f"rank {rank}: {what} differs between ranks ({listed}). All ranks must allocate and free the same tensors in the "
            f"same order, in heaps of the same size"
        )
        self.rank, self.what, self.by_rank = rank, what, tuple(by_rank)


class CallMismatch(WeftError):
    """Ranks in different collective calls; raised on all ranks, in the simulator on the later one.

    of  kind of the calls that ``number`` counts
    """

    def __init__(self, rank: int, number: int, by_rank: Mapping[int, str], of: str = "host call") -> None:
        listed = ", ".join(f"rank {r} is in {call}" for r, call in sorted(by_rank.items()))
        super().__init__(f"rank {rank}: {of} #{number}: {listed}; all ranks must make the same calls in the same order")
        self.rank, self.number, self.by_rank = rank, number, dict(by_rank)


class ArgumentMismatch(WeftError, ValueError):
    """A collective call to which ranks pass different arguments, before it has done anything.

    different  what each rank passed, by the argument's name
    """

    def __init__(self, rank: int, call: str, different: Mapping[str, Mapping[int, str]]) -> None:
        listed = "; ".join(
            f"{name} is {', '.join(f'{value} on rank {r}' for r, value in sorted(by_rank.items()))}"
            for name, by_rank in different.items()
        )
        super().__init__(f"rank {rank}: {call}: {listed}; pass the same on all ranks")
        self.rank, self.call = rank, call
        self.different = {name: dict(by_rank) for name, by_rank in different.items()}


class PeerSilent(WeftError):
    """A peer did not take part in a collective host call in time."""

    def __init__(self, rank: int, peers: Sequence[int], what: str, seconds: float) -> None:
        names = ", ".join(map(str, peers))
        super().__init__(
            f"rank {rank}: rank {names} did not reach {what} within {seconds:g} s. All ranks must make the same calls in the "
            f"same order; look at what rank {names} is doing"
        )
        self.rank, self.peers, self.what, self.seconds = rank, tuple(peers), what, seconds


class NotExchangeable(WeftError, TypeError):
    """A value that ``team.exchange`` does not carry. ``path``: its place in the item."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(f"{path} {problem}, and ranks exchange data only; {remedy}")
        self.path, self.problem, self.remedy = path, problem, remedy


class ForeignMessage(WeftError):
    """A message in the store that no rank of this run has written; none of it was used."""

    def __init__(self, rank: int, peer: int, what: str, reason: str) -> None:
        super().__init__(
            f"rank {rank}: {what}: the message under rank {peer}'s key is refused: {reason}. Another program writes to this "
            f"store, or the ranks run different versions of weft; none of it was used"
        )
        self.rank, self.peer, self.what, self.reason = rank, peer, what, reason


class PeerFailed(WeftError):
    """Another rank raised; this rank stops instead of waiting for it."""

    def __init__(self, rank: int, peer: int, message: str) -> None:
        super().__init__(f"rank {rank}: rank {peer} failed: {message}")
        self.rank, self.peer, self.message = rank, peer, message


class NoPeerAccess(WeftError):
    """A GPU that cannot read and write the memory of another rank's GPU."""

    def __init__(self, rank: int, one: int, device: str, other: int, other_device: str) -> None:
        super().__init__(
            f"rank {rank}: rank {one} on {device} cannot reach rank {other} on {other_device}: no peer-to-peer access between "
            f"these GPUs. Choose GPUs that are linked (weft doctor prints the matrix), for example by CUDA_VISIBLE_DEVICES"
        )
        self.rank, self.one, self.other = rank, one, other


class MixedGPUs(WeftError):
    """Ranks on GPUs of several kinds, for which they would plan differently. ``by_rank``: kind of each."""

    def __init__(self, rank: int, by_rank: Sequence[str]) -> None:
        listed = ", ".join(f"rank {r} has {kind}" for r, kind in enumerate(by_rank))
        super().__init__(
            f"rank {rank}: a team needs GPUs of one kind, and {listed}; choose GPUs alike (weft doctor lists them), for "
            f"example by CUDA_VISIBLE_DEVICES"
        )
        self.rank, self.by_rank = rank, tuple(by_rank)


class NotEnoughGPUs(WeftError):
    """More ranks asked for than this machine has GPUs."""

    def __init__(self, world_size: int, available: int) -> None:
        super().__init__(
            f"world_size={world_size} needs {world_size} GPU{'s' if world_size > 1 else ''} and this machine has "
            + f"{available}; use "
            + (f"a world size of {available} or " if available else "")
            + "device sim (virtual ranks)"
        )
        self.world_size, self.available = world_size, available


class NoEnd(WeftError):
    """Ranks that were killed because they ran longer than they may: a deadlock, or too few seconds."""

    def __init__(self, world_size: int, seconds: float) -> None:
        super().__init__(
            f"{world_size} ranks did not end within {seconds:g} s and were killed: a deadlock, or work that takes longer; "
            f"--gpu-seconds gives them more time"
        )
        self.world_size, self.seconds = world_size, seconds


# --- waiting ---------------------------------------------------------------------------------------------------------


class WaitTimeout(WeftError):
    """A debug-mode wait gave up: the signal never reached the wanted value."""

    def __init__(
        self,
        rank: int,
        kernel: str,
        program: int,
        line: int,
        signal: str,
        wanted: int,
        seen: int,
        seconds: float,
        comparison: str = ">=",
    ) -> None:
        super().__init__(
            f"rank {rank}: kernel {kernel}, program {program}, line {line} waited {seconds:g} s for {signal} {comparison} "
            f"{wanted} and last saw {seen}. The matching notify never came: look at the rank that should send it"
        )
        self.rank, self.kernel, self.program, self.line = rank, kernel, program, line
        self.signal, self.wanted, self.seen, self.seconds = signal, wanted, seen, seconds


class NotAPeer(WeftError, ValueError):
    """A kernel reaches for a rank outside of its team, such as one of another node.

    where  the place in the kernel; ``size``: of the team
    """

    def __init__(self, where: str, peer: int, size: int) -> None:
        super().__init__(
            f"{where}: peer={peer} is no rank of this team of {size}; pass one in 0 .. {size - 1}. Of several nodes, a kernel "
            f"reaches the ranks of its own: count within team.node"
        )
        self.where, self.peer, self.size = where, peer, size


class WrongMain(WeftError, TypeError):
    """A ``main`` whose body would never run. ``what``: its kind, or the kind of its result."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"main={name[:80]} {what}, so its body would never run; pass a plain function main(team, ...) that does the work "
            f"and returns its result"
        )
        self.name, self.what = name, what


class Deadlock(WeftError):
    """No task of a simulation can go on. ``waiting``: one line for each task."""

    def __init__(self, waiting: Sequence[str], replay: str) -> None:
        listed = "\n".join(f"  {line}" for line in waiting)
        super().__init__(f"deadlock: no task can go on\n{listed}\n  replay: {replay}")
        self.waiting, self.replay = tuple(waiting), replay


class InvalidAccess(WeftError):
    """An access of a simulated kernel outside its tensors. ``nearest``: the nearest tensor."""

    def __init__(self, who: str, verb: str, address: int, size: int, nearest: str) -> None:
        super().__init__(f"{who}: {verb} of {size} bytes at {address:#x}: {nearest}")
        self.who, self.verb, self.address, self.size, self.nearest = who, verb, address, size, nearest


class Misaligned(WeftError, ValueError):
    """An address, offset or hint of a simulated kernel that is misaligned for a GPU's wide accesses."""


# --- kernels and languages -------------------------------------------------------------------------------------------


class SimulatorMissing(WeftError):
    """A package that the simulator needs is not installed. ``module``: its name."""

    def __init__(self, module: str) -> None:
        super().__init__(f"the simulator needs {module}, which is not installed: pip install greenlet ml_dtypes")
        self.module = module


class NotInterpretable(WeftError):
    """Kernel code that the simulator cannot run: PTX or an external function that it does not know."""


class KernelRefused(WeftError):
    """Kernels that ran in the simulator and that stock Triton does not compile.

    refused  (kernel, Triton's message, file, line) of each
    """

    def __init__(self, refused: Sequence[tuple[str, str, str, int]]) -> None:
        kernel, message, file, line = refused[0]
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        super().__init__(f"{file}:{line}: Triton does not compile kernel {kernel}: {message}{more}; change that line")
        self.refused = tuple(refused)


class Unsupported(WeftError):
    """A primitive or operation that this machine, this build or this state does not support."""


class CublasError(WeftError):
    """A failed call of cuBLASLt, with arguments that it had accepted before."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(
            f"cublasLt{call} failed with status {status} (cublasStatus_t of cublas_api.h); where another error came before "
            f"it on this GPU, that one is the cause"
        )
        self.call, self.status = call, status


class ModelTooLarge(WeftError):
    """A model whose weights do not fit into memory.

    needed   bytes of weights of a rank; ``memory``: bytes that there are for them
    virtual  all virtual ranks share this memory
    """

    def __init__(
        self, rank: int, needed: int, memory: int, where: str, world_size: int, dtype: str, virtual: bool
    ) -> None:
        remedy = "run it on GPUs, or take" if virtual else "take more GPUs (--world-size), a smaller dtype or"
        super().__init__(
            f"rank {rank}: {needed / 1e9:.3g} GB of weights in {dtype} on each of {world_size} ranks do not fit into the "
            f"{memory / 1e9:.3g} GB of {where}; {remedy} a smaller model"
        )
        self.rank, self.needed, self.memory, self.where = rank, needed, memory, where


class RequestCancelled(WeftError):
    """A request that was cancelled while its answer was drawn."""

    def __init__(self, request: str) -> None:
        super().__init__(f"{request} was cancelled")
        self.request = request


class CannotWrite(WeftError):
    """A file that the user named cannot be written."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: no file can be written there ({reason}); name another")
        self.path, self.reason = path, reason


class CheckpointError(WeftError, ValueError):
    """A checkpoint directory that cannot be loaded, with the reason in one line."""


def _rebuild(kind: type[WeftError], args: tuple, fields: dict) -> WeftError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


def _round_up(size: int) -> int:
    """The next power of two, at least 1 MiB: a round heap size."""
    return max(1 << 20, 1 << (size - 1).bit_length())
