"""``weft.launch``: one process per GPU, or virtual ranks, or in place under ``torchrun``."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.util
import os
import pickle
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from weft.arguments import (
    DEVICES,
    MOST_RANKS_PER_GPU,
    check_args,
    check_bool,
    check_callable,
    check_choice,
    check_debug,
    check_heap_bytes,
    check_seed,
    positive,
)
from weft.errors import NoEnd, NotEnoughGPUs, NotExchangeable, PeerFailed, WeftError
from weft.runtime import logs
from weft.runtime.early import EarlyProcesses, Preparation, early_processes
from weft.runtime.environment import (
    allow_shared_gpus,
    coordinates,
    keep_sockets_local,
    stand_for_machine,
    visible_gpus,
)
from weft.runtime.mains import check_main, check_takes, checked_result
from weft.runtime.signals import leave_end_to_parent
from weft.runtime.store import Given, give, kept, private_folder, remove
from weft.runtime.team.shape import check_node_size

# torch and what needs it are imported where they are used: processes of ranks start before, and import them meanwhile.
logger = logs.logger_of(__name__)
DEFAULT_VIRTUAL_RANKS = 4
# Seconds that ranks have to end by themselves once their results are here or their parent was interrupted.
END_SECONDS = 5.0
# Seconds in which a further rank may tell the cause of an error. A process that died is a cause.
CAUSE_SECONDS, DEATH_SECONDS = 3.0, 0.2
# Seconds to wait for the end of a process that has closed its pipe, since the end tells its signal.
ENDING_SECONDS = 1.0
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)  # of which faulthandler tells
# Modules that processes of ranks load before they have work, and beside the making of their team.
RANKS_LOAD = (
    "weft.runtime.launch", "weft.runtime.team.team", "torch.distributed._symmetric_memory", "weft.runtime.platforms.cuda"
)  # fmt: skip
RANKS_LOAD_LATER = ("weft.ops",)


def launch(
    main: Callable[..., Any],
    world_size: int | None = None,
    device: str = "auto",
    *,
    args: Sequence[Any] = (),
    seed: int = 0,
    heap_bytes: int | None = None,
    debug: bool | float = False,
    share_gpus: bool = False,
    node_size: int | None = None,
) -> list[Any]:
    """Run ``main(team, *args)`` on every rank; the results in rank order.

    world_size  None: torchrun's, else the number of GPUs, else 4 virtual ranks
    device      "cuda": one process per GPU (``main`` must be importable: defined at the top of a module); "sim": virtual ranks
                in this process; "auto": GPUs if there are enough, else "sim". Under torchrun ``main`` runs in place
    args        further arguments of ``main``
    seed        of the simulator's scheduler
    heap_bytes  as in ``weft.init``
    debug       as in ``weft.init``, on GPUs. Virtual ranks ignore it: the simulator raises Deadlock at once
    share_gpus  allow more ranks than GPUs: rank r gets GPU r modulo their number. The ranks of a GPU take turns by time slices,
                so that an exchange takes milliseconds: results are right, times mean nothing. NCCL uses sockets between them.
                Not under torchrun
    node_size   as in ``weft.init``: logical nodes of this machine, between which NCCL uses sockets

    The first error of a rank is raised here, and the other ranks are ended. Where ranks have processes of their own, a rank's
    KeyboardInterrupt or SystemExit becomes a WeftError, and each computes on the CPU in one thread, as under torchrun.
    They start before torch is loaded here: all load it at once if the program's modules leave it to ``main``.
    NotEnoughGPUs if there are too few for "cuda".
    """
    check_callable("main", main, "main(team, *args)")
    check_main(main)
    check_choice("device", device, DEVICES)
    if world_size is not None:
        world_size = positive("world_size", world_size)
    args, heap_bytes = check_args(args), check_heap_bytes(heap_bytes)
    check_takes(main, args)
    check_seed(seed)
    check_debug(debug)
    check_bool("share_gpus", share_gpus)
    where = coordinates()
    if where is not None and device != "sim":
        _check_under_torchrun(world_size, where.world_size, share_gpus)
        return _in_place(main, args, heap_bytes, debug, check_node_size(node_size, where.world_size))
    with early_processes(early_ranks(world_size, device, share_gpus), RANKS_LOAD, later=RANKS_LOAD_LATER) as early:
        from weft.runtime.triton_interpret import refuse_triton_interpret

        refuse_triton_interpret()
        gpus = 0 if device == "sim" else _gpus()
        if not is_simulated(world_size, device) or (share_gpus and gpus):
            world_size = world_size or gpus
            _check_gpus(world_size, gpus, share_gpus)
            options = heap_bytes, debug, check_node_size(node_size, world_size)
            return _spawn(main, world_size, args, *options, _Watched(early=early))
    from weft.runtime.simulate import simulate

    ranks = world_size or DEFAULT_VIRTUAL_RANKS
    return simulate(main, ranks, seed=seed, heap_bytes=heap_bytes, node_size=node_size, args=args)


def launch_early(
    main: Callable[..., Any],
    world_size: int | None,
    device: str,
    early: EarlyProcesses | None,
    *,
    args: Sequence[Any] = (),
    heap_bytes: int | None = None,
) -> list[Any]:
    """Run ``main(team, *args)`` as ``launch`` does; ranks on GPUs take the processes of ``early``, if any."""
    from weft.runtime.triton_interpret import refuse_triton_interpret

    refuse_triton_interpret()
    if early is None or is_simulated(world_size, device):
        if early is not None:
            early.close()
        return launch(main, world_size, device, args=args, heap_bytes=heap_bytes)
    gpus, heap_bytes = _gpus(), check_heap_bytes(heap_bytes)
    world_size = gpus if world_size is None else positive("world_size", world_size)
    _check_gpus(world_size, gpus, False)
    return _spawn(main, world_size, args, heap_bytes, False, None, _Watched(early=early))


def early_ranks(world_size: int | None, device: str, share_gpus: bool = False) -> int:
    """Number of ranks that will have processes, counted without torch; 0 if there may be none."""
    gpus = 0 if device == "sim" else visible_gpus()
    ranks = world_size or gpus
    return ranks if ranks <= (MOST_RANKS_PER_GPU * gpus if share_gpus else gpus) else 0


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check_under_torchrun(world_size: int | None, started: int, share_gpus: bool) -> None:
    if share_gpus:
        raise ValueError(
            "share_gpus=True is for ranks that launch starts, and torchrun has given each its GPU; leave it out"
        )
    if world_size not in (None, started):
        raise ValueError(
            f"world_size={world_size}, but torchrun started {started} ranks; start it with "
            f"--nproc-per-node {world_size} or leave world_size out"
        )


def _check_gpus(world_size: int, gpus: int, share_gpus: bool) -> None:
    if gpus == 0 or (world_size > gpus and not share_gpus):
        raise NotEnoughGPUs(world_size or 1, gpus)
    if world_size > (most := MOST_RANKS_PER_GPU * gpus):
        raise ValueError(
            f"world_size={world_size}: at most {MOST_RANKS_PER_GPU} ranks share a GPU, since each takes about 0.5 GB of its "
            f"memory; take up to {most}"
        )


def launch_on_pipes(
    main: Callable[..., Any],
    pipes: Sequence[tuple[Connection, ...]],
    started: list[BaseProcess],
    *,
    failed: Callable[[BaseException], None],
    early: EarlyProcesses | None = None,
    args: Sequence[Any] = (),
    heap_bytes: int | None = None,
) -> list[Any]:
    """Run ``main(team, pipe, *args)`` as ``launch`` does, on GPUs; rank r gets the tuple ``pipes[r]``.

    Only the caller and its ranks hold these pipes. The caller closes its copies of ``pipes`` when this returns.

    started  gets the process of each rank, in order, which the caller may kill
    early    processes that have been started, for the ranks
    failed   called with the error of a rank before the other ranks are ended, which may take seconds
    """
    return _spawn(main, len(pipes), args, heap_bytes, False, None, _Watched(pipes, started, failed, early))


def launch_watched(
    main: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    heap_bytes: int | None = None,
    sanitized: bool = False,
    errors: str,
    seconds: float,
) -> list[Any]:
    """Run ``main(team, *args)`` as ``launch`` does on GPUs, for ``seconds`` at most.

    Ranks share GPUs where there are too few.

    sanitized  under GSan (`weft.runtime.platforms.sanitized`)
    errors     folder that gets each rank's standard error, as ``rank0`` and so on

    NoEnd, and the ranks are killed, if they run longer.
    """
    gpus = _gpus()
    _check_gpus(world_size, gpus, True)
    started: list[BaseProcess] = []
    expired = threading.Event()

    def kill() -> None:
        expired.set()
        for process in started:
            process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    with private_folder() as folder:
        run = Given(folder, secrets.token_bytes(32), sanitized)
        job = _Job(run, world_size, gpus, heap_bytes, False, verbosity=logs.verbosity(), errors=errors)
        timer.start()
        try:
            return _run(world_size, _on_gpu, job, _pickled(main, args), _Watched(started=started))
        except WeftError as error:
            if expired.is_set():
                raise NoEnd(world_size, seconds) from error
            raise
        finally:
            timer.cancel()


def is_simulated(world_size: int | None, device: str) -> bool:
    """True if `launch` makes virtual ranks for these arguments."""
    if device != "auto" or coordinates() is not None:
        return device == "sim"
    return _gpus() < (world_size or 1)


def _in_place(
    main: Callable[..., Any], args: Sequence[Any], heap_bytes: int | None, debug: bool | float, node_size: int | None
) -> list[Any]:
    from weft.runtime.team.team import init_main
    from weft.runtime.triton_interpret import refuse_triton_interpret

    refuse_triton_interpret()
    team = init_main(heap_bytes=heap_bytes, debug=debug, node_size=node_size)
    try:
        result = checked_result(main, main(team, *args))
        try:
            results = team.exchange(result)
        except NotExchangeable as error:
            path = error.path.replace("item", "what main returned", 1)
            raise NotExchangeable(path, error.problem, error.remedy) from None
        team.close()
    except BaseException as error:
        team.fail(_one_line(error))
        raise
    from torch.distributed import destroy_process_group

    destroy_process_group()
    return results


def _spawn(
    main: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    heap_bytes: int | None,
    debug: bool | float,
    node_size: int | None,
    watched: _Watched | None = None,
) -> list[Any]:
    work = _pickled(main, args)
    with private_folder() as folder:
        run = Given(folder, secrets.token_bytes(32))
        job = _Job(run, world_size, _gpus(), heap_bytes, debug, node_size, logs.verbosity())
        return _run(world_size, _on_gpu, job, work, watched)


def _pickled(main: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps((main, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(
            f"launch(device='cuda') starts processes, so main and its args must be picklable ({error}); define main at the top "
            f"level of a module, or use torchrun"
        ) from error


@dataclass(frozen=True, slots=True)
class _Watched:
    """Pipes, processes and error of ranks, for a caller that talks to them, as of launch_on_pipes."""

    pipes: Sequence[tuple[Connection, ...]] = ()
    started: list[BaseProcess] = field(default_factory=list)
    failed: Callable[[BaseException], None] = lambda error: None
    early: EarlyProcesses | None = None


def _run(
    world_size: int, join: Callable[[_Job, int], Any], job: _Job, work: bytes, watched: _Watched | None = None
) -> list[Any]:
    """Results of `_worker` in processes of their own, which end with this call, and with this process.

    Private data reach them by a pipe that no other process can read, not by command line or environment.
    """
    watched = watched or _Watched()
    processes, seconds = watched.started, END_SECONDS
    logger.debug("start: the parent knows the GPUs, and starts %d ranks", world_size)
    pipes = []
    # Otherwise Python would end them by SIGTERM, and wait.
    at_exit = multiprocessing.util.Finalize(None, _end_all, (processes, 0.0), exitpriority=0)
    try:
        # Contexts made beside imports are untried under GSan, and so are kernels that are loaded before it.
        gpus = 0 if job.given.sanitized else job.gpus
        later = RANKS_LOAD_LATER if gpus else ()
        with closing(watched.early or EarlyProcesses(world_size, RANKS_LOAD, later=later, gpus=gpus)) as waiting:
            for rank in range(world_size):
                ours, theirs = multiprocessing.Pipe(duplex=False)
                given = watched.pipes[rank] if watched.pipes else ()
                processes.append(waiting.take(_worker, (rank, join, job, work), [theirs, *given]))
                theirs.close()
                pipes.append(ours)
        results = _collect(pipes, processes)
        logger.debug("end: the parent has all results")
        return results
    except BaseException as error:
        watched.failed(error)
        if isinstance(error, _Died):
            seconds = 0.0
        raise
    finally:
        _end_all(processes, seconds)
        logger.debug("end: the processes of all ranks have ended")
        at_exit.cancel()


def _end_all(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Wait for processes to end, and kill what runs longer."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


class _Died(WeftError):
    """The process of a rank has ended without a message. Ranks that wait for it do not end by themselves."""


def _ending(process: BaseProcess | None) -> str:
    """How the process of a rank has ended that closed its pipe without a message."""
    code = None
    if process is not None:
        process.join(timeout=ENDING_SECONDS)
        code = process.exitcode
    if code is None:  # the driver still frees what it had
        return "killed, or a crash in the driver"
    if code >= 0:
        return f"exit code {code}"
    name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
    return f"killed by {name}" + "; what it ran is on its standard error" * (-code in CRASHES)


def _collect(pipes: list[Connection], processes: Sequence[BaseProcess] = ()) -> list[Any]:
    """Results of all ranks; raises the first error, but a cause rather than a PeerFailed that it led to."""
    results: dict[int, Any] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    first: Exception | None = None
    patience: float | None = None
    while open_pipes:
        ready = wait(list(open_pipes), timeout=patience)
        if not ready:
            break
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                error, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):  # before its message, or in the middle of it
                how = _ending(processes[rank] if processes else None)
                error = _Died(f"rank {rank}: its process died without a message ({how})")
                value = None
            results[rank] = value
            if error is not None and (
                first is None or (isinstance(first, PeerFailed) and not isinstance(error, PeerFailed))
            ):
                first, patience = error, DEATH_SECONDS if isinstance(error, _Died) else CAUSE_SECONDS
    if first is not None:
        raise first
    return [results[rank] for rank in range(len(pipes))]


@dataclass(frozen=True, slots=True)
class _Job:
    """Description of a run for the processes of its ranks.

    verbosity  of the command that runs; None: the program configures logging, in each process
    errors     folder that gets each rank's standard error; None: it stays where it is
    """

    given: Given
    world_size: int
    gpus: int
    heap_bytes: int | None
    debug: bool | float
    node_size: int | None = None
    verbosity: int | None = None
    errors: str | None = None


def _worker(
    preparation: Preparation,
    pipe: Connection,
    rank: int,
    join: Callable[[_Job, int], Any],
    job: _Job,
    work: bytes,
    *given: Connection,
) -> None:
    """Work of a rank's process. ``join`` makes its team; ``main`` gets ``given``, if any, after it."""
    import torch

    error: BaseException | None = None
    value = team = None
    if job.errors is not None:
        # The driver writes a kernel's assertions to the descriptor.
        with open(os.path.join(job.errors, f"rank{rank}"), "wb") as file:
            os.dup2(file.fileno(), 2)
    faulthandler.enable(2)  # a crash in the driver names the Python code that called it
    threading.Thread(target=_end_with_parent, args=(job.given.folder,), name="weft parent watch", daemon=True).start()
    if job.verbosity is not None:
        logs.show(job.verbosity)
    try:
        leave_end_to_parent()
        # As under torchrun: one thread for each CPU in every rank would oversubscribe the CPUs.
        torch.set_num_threads(1)
        # Seconds after the start of its process.
        logger.debug("start: rank %d has its work: %s", rank, preparation)
        team = join(job, rank)
        logger.debug("start: rank %d has its team", rank)
        main, args = pickle.loads(work)
        preparation.join()  # main may fork this process, or profile it
        logger.debug("start: rank %d begins main: %s", rank, preparation)
        value = checked_result(main, main(team, *((given,) if given else ()), *args))
        logger.debug("end: rank %d has done main", rank)
        team.close()
        logger.debug("end: rank %d has closed its team", rank)
    except BaseException as caught:
        error = caught
        if team is not None:
            team.fail(_one_line(caught))
    pipe.send_bytes(_packed(rank, error, value))
    pipe.close()
    _end(0 if error is None else 1)


def _end_with_parent(folder: str) -> None:
    """End this rank once its parent has ended or was killed; otherwise a kernel might wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A fork of the parent holds the sentinel's other end too, and may live on.
        while os.getppid() == parent.pid and not wait([parent.sentinel], timeout=1.0):
            pass
        remove(folder)
        os._exit(1)


def _on_gpu(job: _Job, rank: int) -> Any:
    """Team of a rank with one GPU, which other ranks may share."""
    import torch

    from weft.runtime.team.team import init_main

    torch.cuda.set_device(rank % job.gpus)
    torch.cuda.synchronize()  # makes the context
    logger.debug("start: rank %d has its GPU", rank)
    if job.world_size > job.gpus:
        allow_shared_gpus()
        stand_for_machine(rank)  # NCCL refuses two ranks on one GPU of one machine
    elif job.node_size is not None:
        stand_for_machine(rank // job.node_size)
    if job.given.sanitized:
        from weft.runtime.platforms import sanitized  # needs a GPU build of torch

        sanitized.instrument(job.given.folder)
        connect(sanitized.BACKEND, job.given, rank, job.world_size)
        sanitized.number_ranks()
    else:
        connect("nccl", job.given, rank, job.world_size)
    return init_main(heap_bytes=job.heap_bytes, debug=job.debug, node_size=job.node_size)


def connect(backend: str, run: Given, rank: int, world_size: int) -> None:
    """Make this process a rank of torch.distributed, by private files and loopback sockets only."""
    import torch

    keep_sockets_local()
    give(run)
    with kept(run.folder):  # without it torch tries for minutes, and holds the lock that the parent watch needs
        store = torch.distributed.FileStore(os.path.join(run.folder, "torch"))
    store.set_timeout(timedelta(seconds=60))
    # No device_id: with it NCCL connects at once, and all ranks must take part in making a group of some ranks.
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    logger.debug("start: rank %d has joined torch.distributed", rank)


def _end(status: int) -> None:
    """End this process at once: a spinning kernel or a poisoned context would hang an orderly exit."""
    # Named semaphores outlive their process, and Python warns of that. torch.compile makes one (tqdm's lock).
    multiprocessing.util._run_finalizers(0)
    os._exit(status)


def _packed(rank: int, error: BaseException | None, value: object) -> bytes:
    if error is not None:
        trace = "".join(traceback.format_exception(error))
        if not isinstance(error, Exception):
            # Raised in the parent, it would interrupt or end the parent.
            error = WeftError(f"rank {rank}: {_one_line(error)}")
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"in rank {rank}:\n{trace}")
    try:
        packed = pickle.dumps((error, value))
        pickle.loads(packed)
        return packed
    except Exception as problem:
        cause = _one_line(error) if error is not None else f"its result cannot be pickled: {problem}"
        return pickle.dumps((WeftError(f"rank {rank}: {cause}"), None))


def _one_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
