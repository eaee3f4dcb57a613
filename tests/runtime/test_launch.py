"""launch chooses between GPUs and virtual ranks, and refuses what cannot run."""

import multiprocessing
import os
import signal
import struct
import subprocess
import sys

import pytest
import torch

import weft
from tests.limits import PROCESS
from weft.errors import NoTeam, NotEnoughGPUs, WeftError
from weft.runtime import launch

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def rank_of(team, offset=0):
    return team.rank + offset


def test_virtual_ranks_return_their_results_in_order():
    assert weft.launch(rank_of, 3, "sim", args=(10,)) == [10, 11, 12]


@NO_GPU
def test_auto_takes_virtual_ranks_where_there_are_too_few_gpus():
    assert weft.launch(rank_of, 2) == [0, 1]
    assert weft.launch(rank_of) == [0, 1, 2, 3]


@NO_GPU
def test_more_ranks_than_gpus_is_an_error_with_the_way_out():
    with pytest.raises(NotEnoughGPUs, match="world_size=2 needs 2 GPUs and this machine has 0; use device sim"):
        weft.launch(rank_of, 2, "cuda")


@NO_GPU
def test_ranks_cannot_share_gpus_that_are_not_there():
    with pytest.raises(NotEnoughGPUs, match="world_size=2 needs 2 GPUs and this machine has 0"):
        weft.launch(rank_of, 2, "cuda", share_gpus=True)
    assert weft.launch(rank_of, 2, share_gpus=True) == weft.launch(rank_of, 2, "sim", share_gpus=True) == [0, 1]


def test_under_torchrun_gpus_are_not_shared(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun has given each its GPU; leave it out"):
        weft.launch(rank_of, 2, share_gpus=True)


@pytest.mark.parametrize(("world_size", "device", "said"), [(2, "tpu", "device='tpu'"), (0, "sim", "world_size=0")])
def test_bad_arguments_are_named(world_size, device, said):
    with pytest.raises(ValueError, match=said):
        weft.launch(rank_of, world_size, device)


@NO_GPU
def test_init_without_ranks_says_what_to_do():
    with pytest.raises(NoTeam, match="weft.simulate"):
        weft.init()


@pytest.mark.parametrize(
    ("error", "said"), [(KeyboardInterrupt(), "KeyboardInterrupt"), (SystemExit(3), "SystemExit: 3")]
)
def test_a_rank_that_is_interrupted_does_not_interrupt_the_parent(error, said):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.send_bytes(launch._packed(0, error, None))
    with pytest.raises(WeftError) as caught:
        launch._collect([ours])
    assert str(caught.value) == f"rank 0: {said}"


def test_the_error_of_a_rank_is_raised_in_the_parent_as_it_is():
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.send_bytes(launch._packed(0, KeyError("tripped"), None))
    with pytest.raises(KeyError, match="tripped"):
        launch._collect([ours])


@pytest.mark.parametrize("begun", [b"", struct.pack("!i", 100) + b"half a result"], ids=["before", "within"])
def test_a_rank_that_dies_before_its_result_is_whole_is_named(begun):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    os.write(theirs.fileno(), begun)
    theirs.close()
    with pytest.raises(launch._Died, match="rank 0: its process died without a message"):
        launch._collect([ours])


def end_by(number):
    """Of a process: 0 .. 9 an exit code, above a signal that it sends itself."""
    if number < 10:
        os._exit(number)
    os.kill(os.getpid(), number)


CRASH = "killed by SIGSEGV; what it ran is on its standard error"


@pytest.mark.parametrize(
    ("number", "said"), [(3, "exit code 3"), (signal.SIGTERM, "killed by SIGTERM"), (signal.SIGSEGV, CRASH)]
)
def test_how_a_rank_died_is_told(number, said):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=end_by, args=(number,))
    process.start()
    process.join()
    theirs.close()
    with pytest.raises(launch._Died, match=f"rank 0: its process died without a message \\({said}\\)$"):
        launch._collect([ours], [process])


LEAVING = """
import multiprocessing

from weft.runtime import launch


def work():
    lock = multiprocessing.Lock()
    launch._end(0)


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_a_rank_that_ends_leaves_no_semaphore_behind(tmp_path):
    """torch.compile makes one in each rank, of which Python's resource tracker would warn."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PROCESS, check=True)
    assert (ended.stdout, ended.stderr) == ("0\n", "")
