"""The command line where the machine or its user is unkind: full disks, closed pipes, Ctrl-C, ASCII, long and nested input."""

import errno
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import weft
from tests.limits import PROCESS
from weft import console
from weft.bench import command as bench_command
from weft.bench import workloads
from weft.bench.ops import shapes
from weft.bench.serving.points import asks_of
from weft.check import command as check_command
from weft.cli import app
from weft.models.builtin import PATH as BUILTIN
from weft.plan import table as tuned
from weft.runtime import doctor, launch

LONG = "a" * 5000
NESTED = "[" * 100_000


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def refused(result, *says):
    assert result.exit_code == 2, result.output
    line = result.output.strip().splitlines()[-1]
    assert all(word in line for word in says), line
    # The names of all ops are 1,200 characters; a name of LONG is 5,000.
    assert "Traceback" not in result.output and len(line) < 1500
    assert result.output.startswith("Usage: ") or result.output.count("\n") == 1


def test_the_version():
    assert run("--version").stdout == f"weft {weft.__version__}\n"


COMMANDS = [
    (["doctor"], doctor, "examine"),
    (["generate", "--world-size", "1"], launch, "launch"),
    (["bench", "all-reduce", "--shapes", "1KiB"], launch, "launch"),
    (["tune", "all-reduce", "--shapes", "1KiB"], launch, "launch"),
    (["check", __file__], check_command, "load"),
]


@pytest.mark.parametrize(("arguments", "module", "function"), COMMANDS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (KeyboardInterrupt(), 130, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "weft: standard output: No space left on device"),
        (OSError(errno.EACCES, "Permission denied", "x.json"), 2, "weft: x.json: Permission denied"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
    ],
    ids=["interrupt", "full", "file", "closed"],
)
def test_commands_end_without_a_traceback(monkeypatch, arguments, module, function, error, status, says):
    def fails(*given, **named):
        raise error

    monkeypatch.setattr(module, function, fails)
    result = run(*arguments)
    if arguments[0] == "tune" and status == 2:
        status = 1  # its search ended early
    assert isinstance(result.exception, SystemExit) and result.exit_code == status
    assert says in result.output and "Traceback" not in result.output
    if status != 130:
        assert result.stdout == ""


def test_an_interrupt_while_modules_load_is_neither_lost_nor_shown(monkeypatch, tmp_path):
    """Loaders swallow it, as torch's of NumPy."""
    (tmp_path / "swallowing.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with console._ended_while_loading():
        importlib.import_module("swallowing")
        assert ended and {*ended} == {130}
        ended.clear()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert not ended and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def in_a_process(*arguments, stdout, **environment):
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=PROCESS,
        env={**os.environ, **environment}, check=False,
    )  # fmt: skip


def test_a_full_device_as_output():
    with open("/dev/full", "w") as full:
        done = in_a_process("--version", stdout=full)
    assert (done.returncode, done.stderr) == (2, "weft: standard output: No space left on device\n")


def test_a_closed_pipe_as_output():
    reader, writer = os.pipe()
    os.close(reader)
    done = in_a_process("-h", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_output_that_holds_ascii_only_escapes_the_rest(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console.write_any_text()
    print("µs –")
    sys.stdout.flush()
    assert raw.getvalue() == b"\\xb5s \\u2013\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--model", LONG], "no such directory"),
        (["generate", "--model", LONG, "--dummy-weights"], "is not one whose sizes are known"),
        (["generate", "--mode", LONG], "is unknown; choose one of reference"),
        (["generate", "--device", LONG], "is unknown; choose one of auto"),
        (["generate", "--dtype", LONG], "is unknown; choose one of auto"),
        (["generate", "--stop", LONG, "--max-tokens", "0", "--world-size", "1"], "max_tokens=0"),
        (["generate", f"--{LONG}"], "No such option"),
        ([LONG], "No such command"),
        (["bench", LONG], "is unknown; choose one of all-reduce"),
        (["bench", "gemm", "--shapes", LONG], "is neither a set"),
        (["bench", "gemm", "--shapes", f"qwen3-32b/{LONG}"], "has no part"),
        (["bench", "gemm", "--providers", LONG], "is unknown; gemm has"),
        (["bench", "gemm", "--dtype", LONG], "is unknown; choose one of bf16"),
        (["bench", "gemm", "--json", LONG], "File name too long"),
        (["bench", "gemm", "--world-size", LONG], "is not a list of positive numbers"),
        (["bench", "mlp", "--model", LONG], "is unknown; choose one of qwen3-0.6b"),
        (["bench", "mlp", "--mode", LONG], "is unknown; choose from auto"),
        (["tune", LONG], "is unknown; choose one of all-reduce"),
        (["tune", "gemm", "--out", LONG], "File name too long"),
        (["check", LONG], "File name too long"),
        (["check", __file__, "--function", LONG], "with --function"),
    ],
)
def test_long_names_are_shortened(arguments, says):
    refused(run(*arguments), says, "characters) ..." if LONG in str(arguments[-1]) else "")


@pytest.mark.parametrize("size", ["-1", "0", str(2**70)])
def test_sizes_of_heaps_that_no_machine_has(size):
    refused(run("generate", "--world-size", "1", "--heap-bytes", size), f"heap_bytes={size} is not an integer in 1 .. ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["bench", "all-reduce"],
        ["tune", "all-reduce"],
        ["check", shapes.__file__, "--function", "op_of"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_billion_ranks_are_refused_at_once(arguments):
    device = [] if arguments[0] == "check" else ["--device", "sim"]
    refused(run(*arguments, *device, "--world-size", 10**9), "1000000000", "at most")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_nested_json_of_a_checkpoint(tmp_path, name):
    model = shutil.copytree(BUILTIN, tmp_path / "model")
    (model / name).write_text(NESTED)
    chat = ["--chat"] if name == "tokenizer_config.json" else []
    refused(run("generate", "--model", model, "--world-size", "1", *chat), name)


def test_nested_and_huge_json_elsewhere(tmp_path):
    file = tmp_path / "nested.json"
    for text in (NESTED, '{"a": ' * 50_000, "9" * 5000):
        file.write_text(text)
        for read in (tuned.read, workloads.read):
            with pytest.raises(ValueError, match="nested.json: not a"):
                read(file)
        refused(run("tune", "all-reduce", "--device", "sim", "--out", file), "nested.json: not a file of weft tune")
        refused(run("trace", "summary", file), "nested.json is not a trace that weft.trace has written")
        with pytest.raises(ValueError, match="nested.json:1: not a line as"):
            asks_of(file, 1, 1)


def test_named_shapes_say_what_simulated_ranks_run_instead(monkeypatch):
    monkeypatch.setattr(bench_command, "_measure", lambda runs, how, simulated, asked, reports: None)
    result = run("bench", "gemm-rs", "--shapes", "qwen3-32b:4096", "--device", "sim")
    says = "weft: --shapes qwen3-32b:4096: simulated ranks run 32x48x32 instead, since a tile takes them milliseconds; "
    assert result.stderr.startswith(says) and result.stderr.count("\n") == 1
    assert run("bench", "gemm-rs", "--shapes", "32,48,32", "--device", "sim").stderr == ""


def test_an_answer_whose_tokens_arrive_together_has_no_rate():
    result = run("generate", "--device", "sim", "--world-size", "1", "--prompt", "1+1=", "--max-tokens", "2")
    assert " s, none came after it (the simulator's" in result.stderr
    result = run("generate", "--device", "sim", "--world-size", "1", "--max-tokens", "3")
    assert " tokens/s after it (the simulator's" in result.stderr and " 0.0 tokens/s" not in result.stderr


def test_doctor_s_json_is_ascii_whatever_the_machine():
    assert json.loads(run("doctor", "--json").stdout)
