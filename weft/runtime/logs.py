"""Logging: a logger for each module, the rank in each record, the output of the command line.

A program that configures no logging sees weft's warnings, which the standard library prints to stderr, and nothing else.
"""

from __future__ import annotations

import logging
import sys

from weft.runtime.virtual_rank import rank_of_this_thread

# Logger of what the command line itself says, such as the address that a server listens at.
NOTICES = "weft.cli"
# Verbosity of the command line: -q, neither, -v, -vv.
LEVELS = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG}


def logger_of(module: str) -> logging.Logger:
    """Logger of a module of weft. Its records have ``rank``: the rank that logs, None outside of ranks."""
    logger = logging.getLogger(module)
    logger.addFilter(_add_rank)
    return logger


def show(verbosity: int) -> None:
    """Print records of weft to stderr, in this process, as a command does with this verbosity."""
    hide()
    weft, notices = logging.getLogger("weft"), logging.getLogger(NOTICES)
    weft.addHandler(_CommandHandler(verbosity))
    weft.setLevel(LEVELS[verbosity])
    notices.setLevel(min(LEVELS[verbosity], logging.INFO) if verbosity >= 0 else logging.ERROR)


def hide() -> None:
    """Undo ``show``."""
    for handler in _handlers():
        logging.getLogger("weft").removeHandler(handler)
        for name in ("weft", NOTICES):
            logging.getLogger(name).setLevel(logging.NOTSET)


def verbosity() -> int | None:
    """Verbosity of ``show`` in this process; None without it. A command gives it to its ranks' processes."""
    return next((handler.verbosity for handler in _handlers()), None)


class _CommandHandler(logging.Handler):
    """Handler of the command line. An error of stderr ends the command, as for its other output."""

    def __init__(self, verbosity: int) -> None:
        super().__init__()
        self.verbosity = verbosity

    def emit(self, record: logging.LogRecord) -> None:
        # With -v what all ranks would say alike is said once.
        if record.levelno < logging.WARNING and self.verbosity < 2 and getattr(record, "rank", None):
            return
        print(self.format(record), file=sys.stderr, flush=True)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.name == NOTICES:
            return text
        name = record.name if self.verbosity > 1 else "weft"
        rank = getattr(record, "rank", None)
        return f"{name}: {'' if rank is None else f'rank {rank}: '}{text}"


def _handlers() -> list[_CommandHandler]:
    return [one for one in logging.getLogger("weft").handlers if isinstance(one, _CommandHandler)]


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = _rank()
    return True


def _rank() -> int | None:
    virtual = rank_of_this_thread()
    if virtual is not None or "torch" not in sys.modules:
        return virtual
    from torch import distributed

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else None
