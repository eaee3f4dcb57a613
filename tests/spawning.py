"""Two real processes of ranks without GPUs, for tests of an engine's pipes."""

import os
import pickle
import time

from weft.runtime import launch
from weft.runtime.store import Given, private_folder


class Alone:
    """Stand-in for a team, of which `launch._worker` needs little, without a GPU."""

    def __init__(self, slot, rank):
        self.rank = rank

    def fail(self, message):
        pass

    def close(self):
        pass


def say_and_wait(team, seconds):
    """Main that writes to standard error, and then takes ``seconds``."""
    os.write(2, f"from rank {team.rank}\n".encode())
    time.sleep(seconds)
    return team.rank


def launch_two(main, pipes, started, failed, early, args, heap_bytes):
    """As `launch_on_pipes` of two ranks."""
    with private_folder() as folder:
        job = launch._Job(Given(folder, b""), 2, 0, heap_bytes, False)
        launch._run(2, Alone, job, pickle.dumps((main, args)), launch._Watched(pipes, started, failed, early))
