"""Processes of ranks that load modules before they have work: taken once, else ended, and replaced where one has died."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys

import pytest

from tests.limits import ANSWER, PROCESS
from tests.spawning import Alone
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


def test_a_program_that_leaves_them_waiting_ends():
    code = "from weft.runtime.early import EarlyProcesses; kept = EarlyProcesses(1, ['time'])"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PROCESS).returncode == 0


def test_launch_needs_no_torch_to_begin():
    code = "import sys, weft; weft.launch; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
