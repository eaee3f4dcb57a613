"""Ctrl-C in a simulation, at any moment: Triton is left unpatched and the next run is correct."""

import signal
import sys
import threading
import time

import pytest
import torch
import triton
import triton.language as tl

import weft
from tests.limits import ANSWER
from weft.simulator.interpreter.patching import is_active
from weft.simulator.machine.tasks import ThreadTask


def main(team):
    x = team.zeros((8,), torch.int32)
    team.copy_engine.put(x, torch.full((8,), 7, dtype=torch.int32), (team.rank + 1) % team.size)
    team.copy_engine.join()
    team.barrier()
    return x.sum().item()


class InterruptAt:
    """Tracer that sends SIGINT before the given lines of the simulator, counted over a run."""

    def __init__(self, *numbers):
        self.numbers, self.count, self.sent = set(numbers), 0, 0

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.endswith(("machine.py", "scheduler.py", "interpreter.py", "patching.py")):
            return None
        if event == "line":
            self.count += 1
            if self.count in self.numbers:
                self.sent += 1
                signal.raise_signal(signal.SIGINT)
        return self

    def run(self):
        sys.settrace(self)
        try:
            return weft.simulate(main, 2)
        finally:
            sys.settrace(None)


def test_two_interrupts_at_any_line_leave_nothing_patched():
    assert weft.simulate(main, 2) == [56, 56]  # the first in a process runs modules too
    whole = InterruptAt()
    whole.run()
    interrupted = 0
    for at in [*range(1, whole.count, whole.count // 40), *range(whole.count - 12, whole.count + 1)]:
        tracer = InterruptAt(at, at + 1, at + 7)
        try:
            tracer.run()
        except KeyboardInterrupt:
            interrupted += 1
        assert not is_active(), f"line {at} of {whole.count}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupted >= 30
    assert weft.simulate(main, 2) == [56, 56]


@pytest.mark.parametrize("reads", [False, True])
def test_one_interrupt_ends_a_loop_of_host_code(reads):
    begun, ended, presses = threading.Event(), threading.Event(), []

    def loops(team):
        x = team.zeros((1,), torch.int32)
        begun.set()
        try:
            while not reads or x.item() == 0:
                time.sleep(1e-4)
        finally:
            ended.set()

    def press():
        begun.wait()
        time.sleep(0.05)
        while not presses or len(presses) < 2 and not ended.wait(ANSWER):
            presses.append(signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        weft.simulate(loops, 2)
    assert ended.is_set() and len(presses) == 1 and not is_active()


def test_host_code_cleans_up_after_an_interrupt():
    begun, cleaned = threading.Event(), []

    def cleans_up(team):
        begun.set()
        try:
            while True:
                time.sleep(1e-4)
        finally:
            for _ in range(25):
                time.sleep(0.01)
            cleaned.append(True)

    def press():
        begun.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        weft.simulate(cleans_up, 1)
    assert cleaned and not is_active()


@triton.jit
def counts(x):
    for _ in range(100):
        tl.atomic_add(x + tl.arange(0, 16), 1)


def test_host_code_cannot_catch_an_interrupt_of_a_kernel():
    begun, caught = threading.Event(), []

    def launches(team):
        x = team.zeros((16,), torch.int32)
        begun.set()
        for _ in range(3):
            try:
                counts[(100,)](x)
            except KeyboardInterrupt:
                caught.append(True)

    def press():
        begun.wait()
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        weft.simulate(launches, 1)
    assert not caught and not is_active()


def test_host_code_that_does_not_come_back_is_left_at_the_second_interrupt(monkeypatch):
    begun, go_on, leaving, abandon = threading.Event(), threading.Event(), threading.Event(), ThreadTask.abandon

    def noted(*arguments):
        leaving.set()
        abandon(*arguments)

    def stuck(team):
        begun.set()
        go_on.wait()
        team.barrier()

    def press_twice():
        for seen in (begun, leaving):  # two that are pending at once would be one
            seen.wait()
            time.sleep(0.1)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(ThreadTask, "abandon", noted)
    threading.Thread(target=press_twice).start()
    with pytest.raises(KeyboardInterrupt):
        weft.simulate(stuck, 2)
    assert not is_active() and weft.simulate(main, 2) == [56, 56]
    go_on.set()


def test_a_kernel_launched_by_a_thread_whose_turn_it_is_not_is_refused(monkeypatch):
    def launching(team):
        errors = []

        def launch():
            try:
                weft.ops.silu_mul(torch.zeros(2, 16))
            except weft.errors.WeftError as error:
                errors.append(str(error))

        thread = threading.Thread(target=launch, name="mine")
        thread.start()
        thread.join()
        return errors

    [[error]] = weft.simulate(launching, 1)
    assert error.startswith("thread 'mine' launched a kernel while rank 0 host code is running; ")
