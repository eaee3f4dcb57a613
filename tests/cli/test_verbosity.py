"""Records of weft's loggers: their ranks, who sees them without a command, and the flags of the commands that show them."""

import atexit
import logging
import os
import pickle
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import weft
from weft import ops
from weft.cli import app
from weft.console import logged, notices, progress
from weft.plan.memo import forget
from weft.runtime import launch, logs
from weft.runtime.early import Preparation

ROOT = Path(__file__).parent.parent.parent
logger = logs.logger_of("weft.tests")


@pytest.fixture
def run():
    def speak(traceback: bool = False) -> None:
        notices.info("100% of it")
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logger.log(level, "level %d", level)
        with progress(True) as say:
            say("shape 1 [of 2]")

    speaking = typer.Typer()
    speaking.command()(logged(speak))
    return lambda *flags: CliRunner().invoke(speaking, flags)


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (["-q"], ["weft: level 40"]),
        ([], ["100% of it", "weft: level 30", "weft: level 40", "shape 1 [of 2]"]),
        (["-v"], ["100% of it", "weft: level 20", "weft: level 30", "weft: level 40", "shape 1 [of 2]"]),
        (["-v", "--verbose"], ["100% of it", *(f"weft.tests: level {n}0" for n in (1, 2, 3, 4)), "shape 1 [of 2]"]),
    ],
    ids=["-q", "none", "-v", "-v -v"],
)
def test_a_command_shows_the_records_of_its_verbosity_on_stderr(run, flags, lines):
    result = run(*flags)
    assert (result.exit_code, result.stdout, result.stderr.splitlines()) == (0, "", lines)
    assert logs.verbosity() is None and not logger.isEnabledFor(logging.INFO), "undone at its end"


def test_more_and_less_at_once_are_refused(run):
    result = run("-vq")
    assert (result.exit_code, result.stderr) == (2, "weft: -v and -q are both given; leave one out\n")


def test_every_command_has_the_flags():
    def commands(group):
        for command in group.commands.values():
            yield from commands(command) if hasattr(command, "commands") else [command]

    found = {command.name: {flag for one in command.params for flag in one.opts} for command in commands(main())}
    assert len(found) >= 8
    assert [name for name, flags in found.items() if not {"-v", "--verbose", "-q", "--quiet"} <= flags] == []


def main():
    return typer.main.get_command(app)


def test_a_program_that_configures_nothing_sees_warnings_alone():
    code = "from weft.runtime.logs import logger_of; log = logger_of('weft.x'); log.warning('seen'); log.info('not')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert (done.stdout, done.stderr) == ("", "seen\n")


def test_records_carry_the_rank_and_a_plan_its_reason(caplog):
    caplog.set_level(logging.DEBUG, "weft")
    forget()

    def main(team):
        return ops.all_reduce(torch.full((3, 5), 1.0), team)

    weft.simulate(main, 2)
    carved = {record.rank for record in caplog.records if record.getMessage().startswith("heap: team.barriers takes ")}
    assert carved == {0, 1}
    assert [record.name for record in caplog.records if "plan of all_reduce" in record.getMessage()] == ["weft.ops.op"]
    logger.warning("outside")
    assert caplog.records[-1].rank is None


def test_with_v_rank_0_speaks_for_all_and_warnings_name_their_rank(capsys):
    def main(team):
        logger.info("ready")
        logger.warning("left")

    for verbosity, expected in ((1, 1), (2, 2)):
        logs.show(verbosity)
        try:
            weft.simulate(main, 2)
        finally:
            logs.hide()
        lines = capsys.readouterr().err.splitlines()
        name = "weft" if verbosity == 1 else "weft.tests"
        assert [f"{name}: rank {rank}: ready" in lines for rank in (0, 1)] == [True, expected == 2]
        assert {f"{name}: rank 0: left", f"{name}: rank 1: left"} <= set(lines)


def test_ranks_processes_get_the_verbosity_of_the_command(monkeypatch):
    jobs, ends = [], []
    monkeypatch.setattr(launch, "_run", lambda world_size, join, job, *rest: jobs.append(job))
    logs.show(1)
    try:
        launch._spawn(os.getcwd, 2, (), None, False, None)
    finally:
        logs.hide()
    launch._spawn(os.getcwd, 2, (), None, False, None)
    assert [job.verbosity for job in jobs] == [1, None]

    monkeypatch.setattr(launch, "_end", ends.append)
    threads = torch.get_num_threads()
    result, pipe = Pipe(duplex=False)
    try:
        launch._worker(Preparation(0.0), pipe, 0, _no_team, jobs[0], pickle.dumps((os.getcwd, ())))
        assert logs.verbosity() == 1 and ends == [1] and "no GPU" in str(pickle.loads(result.recv_bytes())[0])
    finally:
        logs.hide()
        torch.set_num_threads(threads)


def _no_team(job, rank):
    raise RuntimeError("no GPU")


def test_an_interrupt_while_a_command_exits_ends_it_without_a_traceback(monkeypatch):
    at_exit, before = [], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(atexit, "register", at_exit.append)
    assert CliRunner().invoke(app, ["--version"]).exit_code == 0
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        at_exit[-1]()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
