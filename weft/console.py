"""Shared parts of the subcommands of `weft`: errors as one line, logging, progress, lists, files."""

from __future__ import annotations

import atexit
import errno
import io
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, get_args, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperGroup

from weft.arguments import DEVICES, did_you_mean, listed, quoted, shortened
from weft.errors import CannotWrite, WeftError
from weft.runtime import logs
from weft.runtime.files import check_target

if TYPE_CHECKING:
    from weft.models import DecoderConfig

# Value of a flag → torch's name.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DTYPES |= {name: name for name in DTYPES.values()}
T = TypeVar("T")
_LONGEST_KEY = 4096
notices = logs.logger_of(logs.NOTICES)


def layout_of(text: str | None) -> str | tuple[int, int] | None:
    """Layout that --expert-layout names: a name, or (ep, tp) of EPxTP. ValueError for other text."""
    if text is None or text in ("whole", "slices"):
        return text
    parts = text.split("x")
    if len(parts) != 2 or not all(re.fullmatch("[1-9][0-9]{0,5}", part) for part in parts):
        raise ValueError(f"--expert-layout {quoted(text)} is not whole, slices or EPxTP, such as 2x4")
    return int(parts[0]), int(parts[1])


def talks() -> bool:
    """True in the process that prints: under torchrun, rank 0."""
    from weft.runtime.environment import coordinates

    where = coordinates()
    return where is None or where.rank == 0


@contextmanager
def progress(shown: bool) -> Iterator[Callable[[str], None]]:
    """Yield say(line), which shows the last line on a terminal, and every line elsewhere, on stderr."""
    console = Console(stderr=True, highlight=False)
    if not shown:
        yield lambda line: None
    elif draws(console):
        with console.status("starting") as status:
            yield status.update
    else:
        yield notices.info


def draws(console: Console) -> bool:
    """True if a command draws its progress on ``console``: a terminal, without -q."""
    return console.is_terminal and notices.isEnabledFor(logging.INFO)


def numbers(flag: str, text: str | None) -> tuple[int, ...]:
    """Positive integers of a comma-separated flag, each once. ValueError for other text."""
    listed = words(flag, text)
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in listed):
        raise ValueError(f"--{flag} {shortened(text)} is not a list of positive numbers, as in 2,4")
    return tuple(dict.fromkeys(map(int, listed)))


def words(flag: str, text: str | None) -> tuple[str, ...]:
    """Names of a comma-separated flag; () if it was not given. ValueError if it names nothing."""
    if text is None:
        return ()
    listed = tuple(word.strip() for word in text.split(",") if word.strip())
    if not listed:
        raise ValueError(f"--{flag} {quoted(text)} names nothing; name something, or leave --{flag} out")
    return listed


def one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """ValueError unless a flag has one of the values that it takes."""
    if value not in (allowed := tuple(allowed)):
        near = did_you_mean(value, allowed)
        raise ValueError(f"--{name} {shortened(value)} is unknown; choose one of {listed(allowed)}{near}")


def check_simulable(model: str, config: DecoderConfig, small: str) -> None:
    """ValueError for a model too large for simulated ranks. ``small``: flags of one that is not."""
    from weft.models.config import check_simulable

    check_simulable(f"--model {model}", config, f"run it on a machine with GPUs, or run {small}")


def check_torchrun(device: str) -> None:
    """WeftError if each process of torchrun would make all virtual ranks, or this one has no GPU."""
    from weft.runtime.environment import coordinates

    if (where := coordinates()) is None:
        return
    import torch

    gpus = torch.cuda.device_count()
    if device != "sim" and where.local_rank < gpus:
        return
    why = "--device sim runs all of them in one process" if device == "sim" else f"this machine has {gpus} GPUs"
    raise WeftError(
        f"torchrun started {where.world_size} ranks, and {why}; run the command without torchrun, with --device sim "
        f"--world-size {where.world_size} (virtual ranks)"
    )


def check_output(flag: str, file: Path | None) -> None:
    """ValueError unless a file can be written there. Tries it: a file's mode may say otherwise."""
    if file is None:
        return
    try:
        check_target(file)
        if file.is_file():
            file.open("ab").close()
    except CannotWrite as error:
        raise ValueError(f"{flag} {error}") from None
    except OSError as error:
        raise ValueError(f"{flag} {CannotWrite(str(file), error.strerror)}") from error


def api_key_of(key: str | None, file: Path | None) -> str | None:
    """API key of --api-key, --api-key-file or the environment. ValueError for one that cannot be sent."""
    from weft.runtime.environment import api_key

    if key is not None and file is not None:
        raise ValueError(f"--api-key and --api-key-file {file} are both given; leave one out, best --api-key")
    source = "--api-key"
    if file is not None:
        source = f"--api-key-file {file}"
        try:
            with file.open("rb") as opened:
                key = opened.read(_LONGEST_KEY + 1).decode().strip()
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{source} cannot be read: {error}; pass a file that holds the key alone") from None
        if len(key) > _LONGEST_KEY:
            raise ValueError(
                f"{source} holds more than {_LONGEST_KEY:,} characters; pass a file that holds the key alone"
            )
    elif key is None and (key := api_key()) is not None:
        source = "WEFT_API_KEY in the environment"
    if key is not None and (not key or key != key.strip() or not key.isprintable()):
        raise ValueError(f"{source} is no key: it is empty, has blanks around it, or characters that are not printable")
    return key


@contextmanager
def one_line_errors(traceback: bool) -> Iterator[None]:
    """Report errors of callers and files as one line on stderr, exit status 2; the rest as a traceback."""
    try:
        yield
    except (WeftError, ValueError, OSError) as error:
        if traceback:
            raise
        fail(error)


def fail(error: Exception) -> NoReturn:
    """End the command with a line on stderr and exit status 2; silently with 1 if its reader has left."""
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        _drop_output()
        sys.exit(1)
    try:
        typer.echo(f"weft: {message_of(error)}", err=True)
    except OSError:  # stderr is full as well
        _drop_output()
    sys.exit(2)


# Errors that concern standard output if they name no file.
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG)
_LONG = re.compile(r"\S{300,}")


def message_of(error: Exception) -> str:
    """Message of an error, long names shortened; for an OSError the file and the reason."""
    text = str(error)
    if isinstance(error, OSError) and not isinstance(error, WeftError) and error.strerror:
        where = error.filename if error.filename is not None else "standard output"
        if error.filename is not None or error.errno in _OF_OUTPUT:
            text = f"{shortened(os.fsdecode(where) if isinstance(where, (str, bytes)) else where)}: {error.strerror}"
    return without_long_names(text)


def without_long_names(text: str) -> str:
    """Shorten runs of 300 characters or more in a text."""
    return _LONG.sub(lambda match: shortened(match[0]), text)


def write_any_text() -> None:
    """Let stdout and stderr escape characters that their encoding lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Drop buffered output: it has no reader, and Python would fail on it again at its end."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedFlags:
    """Flags of a command that refuses a flag beside another one, also with its default value.

    typed  names of the fields that stand on the command line
    """

    typed: frozenset[str] = frozenset()

    def given(self, *names: str) -> dict[str, object]:
        """Values of flags that are typed or have other values than their defaults.

        names  of the fields that are asked for; none: all
        """
        asked = [one for one in fields(self) if one.name != "typed" and (not names or one.name in names)]
        given = [one.name for one in asked if one.name in self.typed or getattr(self, one.name) != one.default]
        return {f"--{name.replace('_', '-')}": getattr(self, name) for name in given}


def option(default: object, help: str, *names: str, **options: object) -> Any:
    """Field of a dataclass of flags, by its default; MISSING: the flag is required.

    names    by default the field's; a bool then has no negative form
    options  further ones of typer.Option
    """
    return field(default=default, metadata={"names": names, "options": {"help": help, **options}})


def from_flags(flags: type[T], run: Callable[[T], None]) -> Callable[..., None]:
    """Command `run`, with a flag for each field of the dataclass `flags`, of which it gets an instance.

    A field that is a dataclass itself stands for the flags of its fields.
    """

    def made(kind: type, given: dict[str, Any]) -> Any:
        parts = get_type_hints(kind)
        return kind(
            **{
                one.name: made(parts[one.name], given) if is_dataclass(parts[one.name]) else given[one.name]
                for one in fields(kind)
            }
        )

    def command(context: typer.Context, **given: object) -> None:
        sources = {name: context.get_parameter_source(name) for name in given}
        typed = frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")
        with one_line_errors(given.get("traceback", False)):
            asked = made(flags, given | {"typed": typed})
        run(asked)

    of_command = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [of_command, *_parameters(flags)]
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameters(flags: type) -> Iterator[Parameter]:
    hints = get_type_hints(flags, include_extras=True)
    for one in fields(flags):
        if is_dataclass(hints[one.name]):
            yield from _parameters(hints[one.name])
        elif one.name != "typed":
            default, hint = Parameter.empty if one.default is MISSING else one.default, hints[one.name]
            if one.metadata:  # of `option`
                names = one.metadata["names"] or ((f"--{one.name.replace('_', '-')}",) if hint is bool else ())
                hint = Annotated[hint, typer.Option(*names, **one.metadata["options"])]
            yield Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def complete_device(incomplete: str) -> list[str]:
    """Completions of --device."""
    return [word for word in DEVICES if word.startswith(incomplete)]


# Spellings of a flag, weft's own first.
WORLD_SIZE = ("--world-size", "--tensor-parallel-size", "-tp")


def annotations_of(command: Callable[..., None]) -> dict[str, Any]:
    """Annotations of a command's parameters, as written.

    Python 3.10's get_type_hints puts an Optional around the annotation of a parameter whose default is None.
    """
    return {name: each.annotation for name, each in signature(command, eval_str=True).parameters.items()}


def single_valued(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, which refuses different values for a flag with several spellings.

    The parser would silently take the last one, so it is told that the flag may be repeated.
    """
    hints, parameters, spellings = annotations_of(command), [], {}
    for name, parameter in signature(command).parameters.items():
        kind, option = get_args(hints[name]) or (hints[name], None)  # None: of the context
        if option is not None and option.param_decls:  # without the first one, which typer keeps in `default`
            spellings[name] = (option.default, *option.param_decls)
            [kind] = {*(get_args(kind) or (kind,))} - {type(None)}
            option = copy(option)
            option.metavar = f"<{kind.__name__}>"
            hints[name] = Annotated[list[kind] | None, option]
            parameter = parameter.replace(default=None if parameter.default is None else [parameter.default])
        parameters.append(parameter.replace(annotation=hints[name]))

    def checked(**given: object) -> None:
        with one_line_errors(given["traceback"]):
            for name, (first, *further) in spellings.items():
                values = list(dict.fromkeys(given[name] or [None]))
                if len(values) > 1:
                    given_as = " and ".join(map(shortened, values))
                    raise ValueError(f"{first} (also {', '.join(further)}) is given as {given_as}; give one value")
                given[name] = values[0]
        command(**given)

    checked.__name__, checked.__doc__, checked.__annotations__ = command.__name__, command.__doc__, hints
    checked.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return checked


def logged(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with -v and -q, which say what is printed to stderr beside its results and errors."""
    hints = annotations_of(command)
    flags = {
        "verbose": Annotated[
            int,
            typer.Option("-v", "--verbose", count=True, show_default=False, help="Say more; -vv: plans and memory too"),
        ],
        "quiet": Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing but results and errors")],
    }

    def shown(*, verbose: int, quiet: bool, **given: object) -> None:
        with one_line_errors(given.get("traceback", False)):
            if verbose and quiet:
                raise ValueError("-v and -q are both given; leave one out")
            logs.show(-1 if quiet else min(verbose, 2))
        try:
            command(**given)
        finally:
            logs.hide()

    shown.__name__, shown.__doc__, shown.__annotations__ = command.__name__, command.__doc__, hints | flags
    shown.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            *(one.replace(annotation=hints[name]) for name, one in signature(command).parameters.items()),
            Parameter("verbose", Parameter.KEYWORD_ONLY, default=0, annotation=flags["verbose"]),
            Parameter("quiet", Parameter.KEYWORD_ONLY, default=False, annotation=flags["quiet"]),
        ]
    )
    return shown


class Commands(TyperGroup):
    """Subcommands of `weft`, which an interrupt, a closed pipe or a full disk ends without a traceback."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:
        """Take two words for a command named by two, such as `bench serve`."""
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in self.commands else args)

    def shell_complete(self, ctx: typer.Context, incomplete: str) -> list[Any]:
        """Leave out commands named by two words, which a shell would take apart."""
        return [one for one in super().shell_complete(ctx, incomplete) if " " not in one.value]

    def make_context(self, *args: object, **extra: object) -> Any:
        with _short_usage_errors():
            return super().make_context(*args, **extra)

    def main(self, *args: object, **extra: object) -> Any:
        write_any_text()
        try:
            try:
                with _ended_while_loading():
                    return super().main(*args, **extra)
            finally:
                atexit.register(_end_without_traceback)  # now, to run before what was registered meanwhile
                if sys.stdout is not None:  # None if it was closed before Python began
                    sys.stdout.flush()  # not later, where nothing would turn its error into a line
        except OSError as error:
            if "--traceback" in sys.argv:
                raise
            fail(error)

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            with _short_usage_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            _drop_output()
            sys.exit(130)


@contextmanager
def _ended_while_loading() -> Iterator[None]:
    """Scope in which an interrupt ends this process at once if it comes while modules are loaded.

    Raised there it is lost, or leaves a module half loaded: torch swallows what comes as it loads NumPy.
    """

    def interrupted(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                os._exit(130)
            frame = frame.f_back
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_without_traceback() -> None:
    """Let a further interrupt end this process, which exits, without a traceback of exit handlers."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def _short_usage_errors() -> Iterator[None]:
    """Shorten usage errors of typer, which repeat what was typed."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "show") and isinstance(message := getattr(error, "message", None), str):
            error.message = without_long_names(message)  # type: ignore[attr-defined]
        raise
