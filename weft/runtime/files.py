"""Files that the user has named: reading of text, and writing, which weft does here only."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from weft.errors import CannotWrite

MOST_TEXT_BYTES = 256 << 20


def text_of(path: Path, most: int = MOST_TEXT_BYTES) -> str:
    """Text of a file in UTF-8. ValueError for more than ``most`` bytes: /dev/zero has no end."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it holds more than {most:,} bytes")
    return content.decode("utf-8")


def put(path: Path, text: str) -> None:
    """Write a file atomically: if this process is killed, the file is complete or unchanged.

    Folders that are missing are made. The file is written under a new unguessable name and then renamed, so that no existing
    link is followed. CannotWrite if that fails, or for targets that `check_target` refuses.
    """
    check_target(path)
    unfinished = path.with_name(f".weft-{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # The umask limits the mode.
        with open(os.open(unfinished, flags, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(unfinished)
        if isinstance(error, OSError):
            raise CannotWrite(str(path), error.strerror or str(error)) from None
        raise


def check_target(path: Path) -> None:
    """CannotWrite unless ``put`` can write there: in place of nothing or a regular file.

    Links are refused too: another user may have made one, or it is /dev/stdout; both following and replacing it would surprise.
    """
    try:
        mode = _mode_of(path)
        if stat.S_ISLNK(mode):
            raise CannotWrite(str(path), "it is a symbolic link")
        if stat.S_ISDIR(mode):
            raise CannotWrite(str(path), "Is a directory")
        if mode and not stat.S_ISREG(mode):
            raise CannotWrite(str(path), "it is a device or a pipe")
        # Tried, since the folder's mode may say otherwise.
        tempfile.TemporaryFile(dir=next(folder for folder in path.absolute().parents if folder.exists())).close()
    except OSError as error:
        raise CannotWrite(str(path), error.strerror or str(error)) from None


def _mode_of(path: Path) -> int:
    """Mode of what lies there; 0 if nothing does."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
