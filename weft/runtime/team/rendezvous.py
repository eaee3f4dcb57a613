"""Host-side rendezvous of the ranks over a store, bounded in time and aware of failed ranks.

A message is data (`codec`), never code. Where `launch` started the ranks, it carries an HMAC under the secret of the run, which
covers its key: messages that another program has written, or copied from another key, are refused before they are decoded.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from weft.errors import ArgumentMismatch, CallMismatch, ForeignMessage, PeerFailed, PeerSilent
from weft.runtime import codec

if TYPE_CHECKING:
    import torch.distributed as dist

    from weft.runtime.store import FolderStore

# Long enough for the slowest rank to compile its kernels.
PATIENCE_SECONDS = 300.0
# Seconds between two checks of a waiting rank for failed peers.
_GLANCE_SECONDS = 0.25
# Most characters of a text from another rank that are shown.
_LONGEST_TEXT = 2000


class Rendezvous:
    """One rank's end of the rendezvous of a team.

    secret  of the run; None where the store is torchrun's, to which every process that reaches it may write
    """

    def __init__(
        self,
        store: dist.Store | FolderStore,
        name: str,
        rank: int,
        size: int,
        patience: float = PATIENCE_SECONDS,
        secret: bytes | None = None,
    ) -> None:
        self._store, self._prefix, self._secret = store, f"weft/{name}", secret
        self._rank, self._size, self._patience = rank, size, patience
        self._count = 0
        self._failed = False

    def exchange(self, what: str, item: object, patience: float | None = None) -> list[Any]:
        """Items of all ranks, in rank order; ``what`` names the call. patience: None, that of the rendezvous.

        NotExchangeable for an item that cannot be sent, CallMismatch if the ranks are in different calls, PeerSilent after the
        patience, PeerFailed as soon as a peer has failed, ForeignMessage for a message that no rank of this run wrote.
        """
        message = codec.encode((what, codec.encode(item)))
        self._count += 1
        self._set(f"{self._count}/{self._rank}", message)
        patience = self._patience if patience is None else patience
        deadline = time.monotonic() + patience
        called = f"{what} (host call #{self._count})"
        messages = []
        for peer in range(self._size):
            key = f"{self._prefix}/{self._count}/{peer}"
            # Polled, since the store prints a warning for each wait that times out.
            if not self._watch(lambda key=key: self._store.check([key]), deadline):
                absent = [p for p in range(self._size) if not self._store.check([f"{self._prefix}/{self._count}/{p}"])]
                raise PeerSilent(self._rank, absent, called, patience)
            messages.append(self._message(f"{self._count}/{peer}", peer, called))
        # All ranks have reached this rendezvous, so all have read the one before the last.
        if self._count > 2:
            self._store.delete_key(f"{self._prefix}/{self._count - 2}/{self._rank}")
        calls = [call for call, _ in messages]
        if any(call != what for call in calls):
            raise CallMismatch(self._rank, self._count, {peer: shown(call) for peer, call in enumerate(calls)})
        return [self._decoded(item, peer, called) for peer, (_, item) in enumerate(messages)]

    def compare(self, what: str, values: Mapping[str, str], patience: float | None) -> None:
        """``exchange``, with ArgumentMismatch on all ranks unless all pass these ``values`` to ``what``."""
        by_rank = self.exchange(what, dict(values), patience)
        check_alike(self._rank, what, dict(enumerate(by_rank)))

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
        """Tell the peers that this rank has failed, so that they stop waiting for it."""
        if not self._failed:
            self._failed = True
            self._set(f"failed/{self._rank}", shown(" ".join(message.splitlines())).encode())

    def raise_if_a_peer_failed(self) -> None:
        for peer in range(self._size):
            if peer != self._rank and self._store.check([f"{self._prefix}/failed/{peer}"]):
                text = self._get(f"failed/{peer}", peer, "failure").decode(errors="replace")
                raise PeerFailed(self._rank, peer, shown(text))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _message(self, place: str, peer: int, called: str) -> tuple[str, bytes]:
        message = self._decoded(self._get(place, peer, called), peer, called)
        if not (type(message) is tuple and [type(part) for part in message] == [str, bytes]):
            raise ForeignMessage(self._rank, peer, called, "it is not the name of a call and an item")
        return message

    def _decoded(self, data: bytes, peer: int, called: str) -> Any:
        try:
            return codec.decode(data)
        except codec.Malformed as error:
            raise ForeignMessage(self._rank, peer, called, shown(str(error))) from None

    def _set(self, place: str, data: bytes) -> None:
        key = f"{self._prefix}/{place}"
        self._store.set(key, self._mac(key, data) + data)

    def _get(self, place: str, peer: int, called: str) -> bytes:
        key = f"{self._prefix}/{place}"
        stored = self._store.get(key)
        length = 0 if self._secret is None else hashlib.sha256().digest_size
        mac, data = stored[:length], stored[length:]
        if not hmac.compare_digest(mac, self._mac(key, data)):
            raise ForeignMessage(self._rank, peer, called, "it does not carry this run's secret")
        return data

    def _mac(self, key: str, data: bytes) -> bytes:
        return b"" if self._secret is None else hmac.digest(self._secret, key.encode() + b"\0" + data, hashlib.sha256)


def check_alike(rank: int, call: str, by_rank: Mapping[int, Mapping[str, Any]]) -> None:
    """ArgumentMismatch unless these ranks pass equal values under equal names to ``call``."""
    names = dict.fromkeys(name for passed in by_rank.values() for name in passed)
    passed = {name: {r: str(one.get(name)) for r, one in by_rank.items()} for name in names}
    different = {
        name: {rank: shown(value) for rank, value in values.items()}
        for name, values in passed.items()
        if len(set(values.values())) > 1
    }
    if different:
        raise ArgumentMismatch(rank, call, different)


def shown(text: str) -> str:
    """Text of another process, fit for a terminal: shortened, with control characters escaped."""
    cut = text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
