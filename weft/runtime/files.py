"""Write a file that the user has named: the one place where weft does."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from weft.errors import CannotWrite


def put(path: Path, text: str) -> None:
    """The file is there whole or as it was before, whenever this process is killed. CannotWrite if it cannot be.

    It is written under a new name that cannot be guessed and then takes its place, so that no link that is there already is
    followed; see `check_target` for what is refused.
    """
    check_target(path)
    unfinished = path.with_name(f".weft-{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # Mode as the umask says.
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
    """CannotWrite for what is there and is no regular file. A link is none: it may have been laid by another user, or be
    /dev/stdout, and to replace it would surprise as much as to follow it."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CannotWrite(str(path), error.strerror or str(error)) from None
    if stat.S_ISLNK(mode):
        raise CannotWrite(str(path), "it is a symbolic link")
    if stat.S_ISDIR(mode):
        raise CannotWrite(str(path), "Is a directory")
    if not stat.S_ISREG(mode):
        raise CannotWrite(str(path), "it is a device or a pipe")
