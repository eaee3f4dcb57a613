"""Store for messages between ranks of one machine: a folder that only their user can enter.

It opens no socket, and is faster than torch's TCPStore: a rendezvous of two CPU processes takes 0.1 ms in place of 0.3.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

# In memory if there is enough of it: files on a disk take five times as long.
_MEMORY = "/dev/shm"
_LEAST_FREE = 1 << 30
_PREFIX = "weft-"
# File of a run's folder that the process that made the folder holds locked while it lives.
_OWNED = ".owned"


class FolderStore:
    """Store with a file for each key, with the methods of a torch store that `Rendezvous` calls."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        # Renamed at the end, so that a reader sees the whole value or none.
        file = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            left = memoryview(value)
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)
        os.rename(f"{path}.part", path)

    def get(self, key: str) -> bytes:
        with open(self._path(key), "rb") as file:
            return file.read()

    def check(self, keys: Sequence[str]) -> bool:
        return all(os.path.exists(self._path(key)) for key in keys)

    def delete_key(self, key: str) -> None:
        os.unlink(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._folder}/{hashlib.sha256(key.encode()).hexdigest()}"


class Given(NamedTuple):
    """Private data of a run that `launch` gives to each rank's process.

    folder     of the run, mode 0700
    secret     of the run, the key of the ranks' HMACs
    sanitized  teams' heaps are GSan's, which instruments the kernels (`weft.runtime.platforms.sanitized`)
    """

    folder: str
    secret: bytes
    sanitized: bool = False


# None if torchrun or the user has started the ranks.
_given: Given | None = None


def give(given: Given) -> None:
    """Tell this process that it is a rank of this run."""
    global _given
    _given = given


def given() -> Given | None:
    return _given


@contextmanager
def private_folder() -> Iterator[str]:
    """A new folder that no other user of this machine can enter; removed at the context's end.

    A process that is killed leaves its folder; the next one removes it.
    """
    roomy = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _LEAST_FREE
    if roomy:
        remove_stale(_MEMORY)
    place = _MEMORY if roomy else None
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place, ignore_cleanup_errors=True) as folder:
        unlocked = os.path.join(folder, f"{_OWNED}.part")
        file = os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with suppress(OSError):  # a file system without locks: the folder is never taken for stale
                fcntl.flock(file, fcntl.LOCK_EX)
                os.rename(unlocked, os.path.join(folder, _OWNED))
            yield folder
        finally:
            os.close(file)


def remove_stale(place: str) -> None:
    """Remove folders of `private_folder` in a local file system whose owners have ended.

    The kernel takes the lock from a process that ends in any way. A folder without the locked file is left alone: it may be
    about to get it.
    """
    for folder in Path(place).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is another's, in use, or removed meanwhile
            about = os.lstat(folder)
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                continue
            file = os.open(folder / _OWNED, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(str(folder))
            finally:
                os.close(file)


def remove(folder: str) -> None:
    """Remove the folder of a run whose owner has ended, once no rank is in `kept`."""
    with suppress(OSError), _locked(folder, fcntl.LOCK_EX):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def kept(folder: str) -> Iterator[None]:
    """Scope in which the folder of a run is not removed. OSError if it was removed before."""
    with _locked(folder, fcntl.LOCK_SH):
        os.stat(folder)
        yield


@contextmanager
def _locked(folder: str, kind: int) -> Iterator[None]:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, kind)
        yield
    finally:
        os.close(file)
