"""What the subcommands of `weft` share: errors as one line, a line that says how far it is, what simulated ranks
can run, lists and files among flags."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from weft.errors import CannotWrite, WeftError
from weft.runtime.files import check_target

if TYPE_CHECKING:
    from weft.models import Qwen3Config

# What a flag may say → torch's name.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DTYPES |= {name: name for name in DTYPES.values()}


def talks() -> bool:
    """One process prints: under torchrun every rank comes here."""
    from weft.runtime.launch import coordinates

    where = coordinates()
    return where is None or where.rank == 0


@contextmanager
def progress(shown: bool) -> Iterator[Callable[[str], None]]:
    """Yields say(line): the last line on a terminal, all of them elsewhere, on stderr."""
    console = Console(stderr=True, highlight=False)
    if not shown:
        yield lambda line: None
    elif console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield lambda line: console.print(line, soft_wrap=True)


def numbers(flag: str, text: str | None) -> tuple[int, ...]:
    """None twice."""
    found = words(flag, text)
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in found):
        raise ValueError(f"--{flag} {text} is not a list of positive numbers, as in 2,4")
    return tuple(dict.fromkeys(map(int, found)))


def words(flag: str, text: str | None) -> tuple[str, ...]:
    """() where the flag was not given. ValueError where it was, with nothing in it."""
    if text is None:
        return ()
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise ValueError(f"--{flag} {text!r} names nothing; name something, or leave --{flag} out")
    return found


def check_simulable(model: str, config: Qwen3Config, small: str) -> None:
    """ValueError for a model that is too large for simulated ranks. ``small``: the flags of one that is not."""
    from weft.models.config import check_simulable

    check_simulable(f"--model {model}", config, f"run it on a machine with GPUs, or run {small}")


def check_torchrun(device: str) -> None:
    """WeftError where every process of torchrun would make all the virtual ranks, or this one has no GPU."""
    import torch

    from weft.runtime.launch import coordinates

    gpus, where = torch.cuda.device_count(), coordinates()
    if where is None or (device != "sim" and where.local_rank < gpus):
        return
    why = "--device sim runs all of them in one process" if device == "sim" else f"this machine has {gpus} GPUs"
    raise WeftError(
        f"torchrun started {where.world_size} ranks, and {why}; run the command without torchrun, with --device sim "
        f"--world-size {where.world_size} (virtual ranks)"
    )


def check_output(flag: str, file: Path | None) -> None:
    """ValueError unless a file can be written there, which is tried: root may write to /proc by its mode, and cannot."""
    if file is None:
        return
    try:
        check_target(file)
        if file.is_file():
            file.open("ab").close()
        folder = next(parent for parent in file.absolute().parents if parent.exists())
        tempfile.TemporaryFile(dir=folder).close()
    except CannotWrite as error:
        raise ValueError(f"{flag} {error}") from None
    except OSError as error:
        raise ValueError(f"{flag} {CannotWrite(str(file), error.strerror)}") from error


@contextmanager
def one_line_errors(traceback: bool) -> Iterator[None]:
    """What a person got wrong is said on stderr, exit status 2. All else is our mistake and keeps its traceback."""
    try:
        yield
    except (WeftError, ValueError) as error:
        if traceback:
            raise
        typer.echo(f"weft: {error}", err=True)
        sys.exit(2)
