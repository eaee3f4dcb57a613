"""Files of a checkpoint that hold text, and its directory.

Without torch: the command line checks directories before it loads it.
"""

from __future__ import annotations

import json
import os
import stat
from os import PathLike
from pathlib import Path
from typing import Any

from weft.arguments import shortened
from weft.errors import CheckpointError

# Most bytes of a file of text: the largest tokenizers and indices have a tenth.
MOST_BYTES = 256 << 20


def as_directory(name: str | PathLike[str]) -> Path:
    """Path of a checkpoint. CheckpointError for "", which would mean the current directory."""
    if name == "":
        raise CheckpointError("model='' names no directory; name one, or leave it out for the built-in model")
    return Path(name)


def read_file(path: Path) -> bytes:
    """Content of a regular file.

    CheckpointError for one of more than MOST_BYTES, and for a FIFO or a device, whose reading may block.
    """
    check_regular(path)
    # Without blocking, and checked again: another file may have taken its place since.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        _check_mode(path, status.st_mode)
        if status.st_size > MOST_BYTES:
            raise CheckpointError(
                f"{path}: has {status.st_size:,} bytes, more than the {MOST_BYTES:,} that weft reads of it; download it again"
            )
        return file.read()


def check_regular(path: Path) -> None:
    """CheckpointError unless the path is a regular file or a link to one. FileNotFoundError for none."""
    _check_mode(path, os.stat(path).st_mode)


def _check_mode(path: Path, mode: int) -> None:
    kinds = {stat.S_IFIFO: "FIFO", stat.S_IFDIR: "directory", stat.S_IFSOCK: "socket"}
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"{path}: is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file; put the checkpoint's own file there"
        )


def check_directory(path: Path, hint: str = "") -> None:
    """CheckpointError, with `hint` at its end, unless the path is a directory."""
    if not os.path.isdir(path):
        what = "is a file" if os.path.exists(path) else "no such directory"
        raise CheckpointError(
            f"{shortened(path)}: {what}; pass a directory with config.json and *.safetensors in it, or a name of the "
            f"Hugging Face hub, such as Qwen/Qwen3-0.6B{hint}"
        )


def read_object(path: Path) -> dict[str, Any]:
    """Object in a JSON file. FileNotFoundError without a file, CheckpointError without an object."""
    try:
        content = json.loads(read_file(path).decode("utf-8"))
    except (FileNotFoundError, CheckpointError):
        raise
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of 4,300 digits
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(content).__name__}, not an object; download it again")
    return content
