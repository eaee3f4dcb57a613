"""Host-side meetings of the ranks over a ``torch.distributed`` store: bounded in time, and aware of ranks that failed."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from weft.errors import CallMismatch, PeerFailed, PeerSilent

# Long enough for the slowest rank to compile its kernels.
PATIENCE_SECONDS = 300.0
# How often a waiting rank looks whether a peer has failed.
_GLANCE_SECONDS = 0.25


class Meeting:
    def __init__(self, store: dist.Store, name: str, rank: int, size: int, patience: float = PATIENCE_SECONDS) -> None:
        self._store = dist.PrefixStore(f"weft/{name}", store)
        self._rank, self._size, self._patience = rank, size, patience
        self._count = 0
        self._failed = False

    def exchange(self, what: str, item: Any) -> list[Any]:
        """Every rank's item, in rank order; ``what`` names the call.

        CallMismatch if they are in different calls, PeerSilent after the patience, PeerFailed as soon as a peer has failed.
        """
        self._count += 1
        self._store.set(f"{self._count}/{self._rank}", pickle.dumps((what, item)))
        deadline = time.monotonic() + self._patience
        found = []
        for peer in range(self._size):
            key = f"{self._count}/{peer}"
            # Polled, since a wait with a timeout would make the store print a warning for each one that runs out.
            if not self._watch(lambda key=key: self._store.check([key]), deadline):
                absent = [p for p in range(self._size) if not self._store.check([f"{self._count}/{p}"])]
                raise PeerSilent(self._rank, absent, f"{what} (host call #{self._count})", self._patience)
            found.append(pickle.loads(self._store.get(key)))
        # Everybody has come to this meeting, so everybody has read the one before the last.
        if self._count > 2:
            self._store.delete_key(f"{self._count - 2}/{self._rank}")
        calls = [call for call, _ in found]
        if any(call != what for call in calls):
            raise CallMismatch(self._rank, self._count, calls)
        return [item for _, item in found]

    def watch(self, done: Callable[[], bool]) -> None:
        """Return once ``done()``; PeerFailed if a peer fails first."""
        self._watch(done, float("inf"))

    def _watch(self, done: Callable[[], bool], deadline: float) -> bool:
        pause, looked = 0.0, time.monotonic()
        while not done():
            time.sleep(pause)
            pause = min(0.001, pause + 0.00001)
            now = time.monotonic()
            if now > deadline:
                return False
            if now - looked > _GLANCE_SECONDS:
                self.raise_if_a_peer_failed()
                looked = now
        return True

    def fail(self, message: str) -> None:
        """Tell the peers that this rank is lost, so that they stop waiting for it."""
        if not self._failed:
            self._failed = True
            self._store.set(f"failed/{self._rank}", message)

    def raise_if_a_peer_failed(self) -> None:
        for peer in range(self._size):
            if peer != self._rank and self._store.check([f"failed/{peer}"]):
                raise PeerFailed(self._rank, peer, self._store.get(f"failed/{peer}").decode())
