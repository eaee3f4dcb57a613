"""Processes of ranks that load modules before they have work: taken once, else ended, and replaced where one has died."""

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ahead import Ahead
from tests.limits import ANSWER, PROCESS
from tests.spawning import Alone
from weft import triton_api
from weft.cli import serve
from weft.errors import NotEnoughGPUs
from weft.runtime import early, launch
from weft.runtime.store import Given, private_folder


@pytest.fixture
def processes():
    made = early.EarlyProcesses(2, ("json",))
    yield made
    made.close()


def says(team, *given):
    [(pipe, other)] = given
    pipe.send_bytes(b"rank %d" % team.rank)
    return os.getpid(), other.recv_bytes()


def run(processes):
    """Results of `says` on two ranks, and what they have sent."""
    pipes = [[launch.multiprocessing.Pipe() for _ in range(2)] for _ in range(2)]
    for (_, _), (ours, _) in pipes:
        ours.send_bytes(b"hello")
    given = [tuple(theirs for _, theirs in pair) for pair in pipes]
    started = []
    with private_folder() as folder:
        job = launch._Job(Given(folder, b""), 2, 0, None, False)
        watched = launch._Watched(given, started, lambda error: None, processes)
        results = launch._run(2, Alone, job, pickle.dumps((says, ())), watched)
    assert [pair[0][0].recv_bytes() for pair in pipes] == [b"rank 0", b"rank 1"]
    assert [process.pid for process in started] == [pid for pid, _ in results]
    assert [text for _, text in results] == [b"hello"] * 2
    return [pid for pid, _ in results]


def test_ranks_run_in_processes_that_were_there_and_further_ones_in_new_ones(processes):
    waiting = [process.pid for process, _ in processes._waiting]
    assert run(processes) == waiting
    assert not {*run(processes)} & {*waiting}


def test_gpu_tests_take_the_ranks_that_were_started_while_the_last_one_ran(monkeypatch):
    def pids(made):
        return [process.pid for process, _ in made._waiting]

    ahead = Ahead(2, ("json",))
    ready = pids(ahead._ready)
    try:
        with ahead.processes(2, ("json",)) as processes:
            assert pids(processes) == ready != pids(ahead._ready)
            assert run(processes) == ready
        ready = pids(ahead._ready)
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "another test (call)")
        with ahead.processes(2, ("json",)) as processes:
            assert pids(processes) == ready
        ready = pids(ahead._ready)
        monkeypatch.setenv("WEFT_TEST_OF_AHEAD", "1")
        with ahead.processes(2, ("json",)) as processes:
            assert not {*pids(processes)} & {*ready}  # these would have the environment of before
        with ahead.processes(0, ()) as processes:
            assert processes is None
    finally:
        ahead.close()


def test_a_process_that_has_died_is_replaced(processes):
    dead, alive = (process for process, _ in processes._waiting)
    os.kill(dead.pid, signal.SIGKILL)
    dead.join(timeout=ANSWER)
    first, second = run(processes)
    assert first == alive.pid and second not in (dead.pid, alive.pid)


def test_processes_without_work_end():
    made = early.EarlyProcesses(1, ("json",))
    [(process, feed)] = made._waiting
    made.close()
    assert not process.is_alive() and feed.closed and not made._waiting


def test_an_interrupt_while_processes_start_ends_them(monkeypatch):
    started = []

    @contextmanager
    def interrupted():
        yield
        started.extend(multiprocessing.active_children())
        raise KeyboardInterrupt

    monkeypatch.setattr(early, "held_for_children", interrupted)
    with pytest.raises(KeyboardInterrupt):
        early.EarlyProcesses(2, ("json",))
    assert started and not any(process.is_alive() for process in started)


def test_a_process_that_cannot_start_ends_those_before_it(monkeypatch):
    started = []

    @contextmanager
    def refused():
        if started:
            raise OSError("no more processes")
        yield
        started.extend(multiprocessing.active_children())

    monkeypatch.setattr(early, "held_for_children", refused)
    with pytest.raises(OSError, match="no more processes"):
        early.EarlyProcesses(2, ("json",))
    assert started and not any(process.is_alive() for process in started)


def test_an_interrupt_while_a_process_takes_work_leaves_it_to_close(monkeypatch):
    def interrupted(feed, handle, pid):
        raise KeyboardInterrupt

    monkeypatch.setattr(early, "send_handle", interrupted)
    made, (ours, theirs) = early.EarlyProcesses(1, ("json",)), multiprocessing.Pipe()
    [(process, _)] = made._waiting
    with ours, theirs, pytest.raises(KeyboardInterrupt):
        made.take(says, (), [theirs])
    made.close()
    assert not process.is_alive() and not made._waiting


def did(preparation, pipe, place):
    """Work that tells whether garbage was collected when it began, and what was done by then."""
    began = gc.isenabled(), str(preparation)
    preparation.join()
    pipe.send((place, *began, str(preparation)))


def test_drivers_and_the_hash_of_triton_go_beside_the_imports_and_later_modules_beside_the_work(monkeypatch):
    started, loaded = threading.Barrier(4, timeout=ANSWER), threading.Event()

    def load(modules):
        if modules == ("first",):
            assert not gc.isenabled()
            started.wait()  # for both drivers and the hash
        else:
            loaded.wait(timeout=ANSWER)

    def broken(gpu):
        started.wait()
        raise OSError(f"GPU {gpu} is gone")

    def work(preparation, *given):
        loaded.set()
        return did(preparation, *given)

    monkeypatch.setattr(early, "_load", load)
    monkeypatch.setattr(early, "_init_nvml", started.wait)
    monkeypatch.setattr(early, "_make_context", broken)
    monkeypatch.setattr(triton_api, "hash_triton", started.wait)
    monkeypatch.setattr(early.pickle, "loads", lambda data: (work, ("here",), 1))
    (ours, theirs), (result, pipe) = multiprocessing.Pipe(), multiprocessing.Pipe()
    ours.send_bytes(b"work")
    send_handle(ours, pipe.fileno(), os.getpid())
    try:
        early._wait_for_work(theirs, early.Preparation(time.monotonic()), ("first",), ("second",), 1, False)
    finally:
        gc.unfreeze()
    place, collects, began, ended = result.recv()
    assert place == "here" and collects
    assert all(part in began for part in ("python", "NVML", "modules", "work")) and "later" not in began
    assert "hash of Triton" in ended and "later modules" in ended
    assert "context" not in ended, "its error is left to what needs it"


def test_the_parent_prepares_nvml_while_ranks_start(monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(early, "DRIVERS", ("/dev/null",))
    monkeypatch.setattr(early, "_init_nvml", done.set)
    with early.early_processes(1, ("json",)):
        assert done.wait(timeout=ANSWER)


def test_without_a_number_or_a_driver_none_is_started(monkeypatch):
    monkeypatch.setattr(early, "DRIVERS", ("/nonexistent",))
    for count in (0, 2):
        with early.early_processes(count, ("json",)) as processes:
            assert processes is None


def test_launch_starts_its_processes_before_it_loads_torch_to_count_gpus_and_ends_them(monkeypatch):
    waiting = []

    def count():
        waiting.extend(multiprocessing.active_children())
        return 0

    monkeypatch.setattr(early, "DRIVERS", ("/dev/null",))
    monkeypatch.setattr(launch, "RANKS_LOAD", ("json",))
    monkeypatch.setattr(launch, "_gpus", count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(NotEnoughGPUs):
        launch.launch(says, device="cuda")
    assert len(waiting) == 2 and not any(process.is_alive() for process in waiting)
    with pytest.raises(NotEnoughGPUs):
        launch.launch(says, 3, "cuda")
    assert len(waiting) == 2, "none for more ranks than GPUs"


@pytest.mark.parametrize(
    ("devices", "world_size", "device", "share_gpus", "count"),
    [
        ("0,1", None, "auto", False, 2),
        ("0,1", 2, "cuda", False, 2),
        ("0,1", 3, "auto", False, 0),  # virtual ranks
        ("0,1", 3, "cuda", True, 3),
        ("0,1", None, "sim", False, 0),
        ("GPU-8f6d,MIG-1c2b", None, "auto", False, 2),
        ("", None, "auto", False, 0),
        ("", 2, "cuda", True, 0),
        ("-1", 1, "auto", False, 0),
    ],
)
def test_a_process_starts_early_for_each_rank_that_has_a_gpu(
    monkeypatch, devices, world_size, device, share_gpus, count
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert launch.early_ranks(world_size, device, share_gpus) == count


def test_a_server_starts_none_for_more_ranks_than_gpus(monkeypatch):
    counts = []

    @contextmanager
    def counted(count, modules, **options):
        counts.append(count)
        yield None

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(serve, "early_processes", counted)
    monkeypatch.setattr(serve, "_serve", lambda flags, processes: None)
    monkeypatch.setattr("weft.serve.check_packages", lambda: None)
    for world_size in (None, 2, 1_000_000):
        serve.serve(serve.ServeFlags(world_size=world_size))
    serve.serve(serve.ServeFlags(early_ranks=False))
    assert counts == [2, 2, 0, 0]


@pytest.mark.parametrize(
    ("world_size", "device", "ranks"), [(None, "auto", 4), (2, "cuda", 2), (0, "cuda", 0), (5, "cuda", 0)]
)
def test_a_launch_takes_processes_that_its_caller_has_started(monkeypatch, world_size, device, ranks):
    made = object()
    monkeypatch.setattr(launch, "_gpus", lambda: 4)
    monkeypatch.setattr(launch, "_spawn", lambda main, size, *rest: (size, rest[-1].early))
    if ranks:
        assert launch.launch_early(says, world_size, device, made) == (ranks, made)
        return
    with pytest.raises((ValueError, NotEnoughGPUs), match=f"world_size={world_size}"):
        launch.launch_early(says, world_size, device, made)


def test_a_launch_of_virtual_ranks_ends_the_processes_first():
    closed = []
    waiting = SimpleNamespace(close=lambda: closed.append(True))
    assert launch.launch_early(rank_and_offset, 2, "sim", waiting, args=(10,)) == [10, 11]
    assert closed == [True]


def rank_and_offset(team, offset):
    return team.rank + offset


GENERATE = """
import sys
from weft.cli import generate

def started(count, modules):
    sys.exit(10 * count + ("torch" in sys.modules))

generate.early_processes = started
generate.generate(generate.GenerateFlags(world_size=2))
"""


def test_weft_generate_starts_its_ranks_before_it_loads_torch(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert subprocess.run([sys.executable, "-c", GENERATE], check=False, timeout=PROCESS).returncode == 20


def test_a_program_that_leaves_them_waiting_ends():
    code = "from weft.runtime.early import EarlyProcesses; kept = EarlyProcesses(1, ['time'])"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PROCESS).returncode == 0


FORKING = """
import os, sys
from weft.runtime.early import EarlyProcesses
if __name__ == "__main__":
    waiting = EarlyProcesses(1)
    if os.fork() == 0:  # it has what its parent has, and lives on
        sys.stdin.read()
        os._exit(0)
    print(waiting._waiting[0][0].pid, flush=True)
    os._exit(0)
"""


def test_a_process_ends_with_its_parent_though_a_fork_of_that_lives_on(tmp_path):
    (script := tmp_path / "forking.py").write_text(FORKING)
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, script], **pipes) as program:
        waiting = Path("/proc", program.stdout.readline().decode().strip())
        program.wait(timeout=PROCESS)
        deadline = time.monotonic() + PROCESS
        while waiting.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not waiting.exists()


def test_launch_needs_no_torch_to_begin():
    code = "import sys, weft; weft.launch; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
