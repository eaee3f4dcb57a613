"""What a check finds, as data: kind, place, tensor, both sides, and what to change."""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass

# Kinds, and what each asks of whoever wrote the kernel.
REMEDIES = {
    "race": "order the two: a notify (release) after the first that the second side waits for (acquire)",
    "missing-barrier": "put tl.debug_barrier() between the stores and the release, or use wl.notify, which contains it",
    "cta-race": "put tl.debug_barrier() between the store and the load: one thread of a program may load before another stores",
    "undrained-tma": "a tensor-descriptor store lands later: use wl.notify, which drains it, or store with tl.store",
    "unquieted": "call wl.quiet(team) before: put_nbi and get_nbi complete there; or wl.fence(team) before a notify of a put",
    "proxy-fence": "descriptor loads need a proxy fence after the acquire: use wl.wait, which contains it, or tl.load",
    "scope": "use scope='sys' on both sides: 'gpu' orders one GPU's programs only, 'cta' one program's threads",
    "relaxed-order": "release with sem='release' (or wl.notify) and acquire with sem='acquire' (or wl.wait) on the same word",
    "early-access": "call wl.follow_previous_kernel() before it: with launch_pdl=True a kernel begins beside the one before",
    "unfollowed": "call wl.follow_previous_kernel() in every program of a kernel that is launched with launch_pdl=True",
    "uninitialised": "write the memory before it is read: zero it, or wait for the peer that fills it",
    "use-after-free": "call team.free() after the last use on every rank",
    "out-of-bounds": "keep the index inside the tensor, or mask the access",
    "misaligned": "align the address to the size of the access",
    "untranslated": "reach a peer's memory through wl.symm_at(ptr, peer, team)",
    "signal-reset": "do not reset signals: let them grow and wait for the next epoch (wl.next_epoch)",
    "epoch-back": "signals only grow: notify with a value that is larger than the last",
    "uncleared": "clear a stage (wl.lamport_clear) after it was read and before peers write it again: rotate three",
    "overtaken": "put wl.fence(team) between the clearing and the next words sent, or read the cleared words back (volatile)",
    "equality-wait": "wait for >= (wl.wait): a signal may pass the value between two polls",
    "overshoot": "notify once for each count that is waited for",
    "residency": "launch at most team.max_programs(num_warps) programs, cooperatively, and loop over the work",
    "deadlock": "notify what is waited for, on its rank, with what the wait asks for, from a task that can get there",
    "launch-mismatch": "launch the same kernels in the same order on all ranks; if they are to differ, see who waits for whom",
    "divergence": "fix the order in which values are combined, or say that the op does not promise it (deterministic=False)",
    "error": "see the message",
}  # fmt: skip
# A race that has one of these causes is still a race: `allow(race)` covers them.
RACES = frozenset(
    {
        "race",
        "missing-barrier",
        "cta-race",
        "undrained-tma",
        "unquieted",
        "proxy-fence",
        "scope",
        "relaxed-order",
        "signal-reset",
        "overtaken",
        "early-access",
    }
)

_MARKER = re.compile(r"#\s*weft:\s*allow\(([\w, -]+)\)\s*(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A source line of a kernel (or of host code)."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the accesses: who (task), what (verb), where, and the last synchronisation it had done by then, through which
    tensor of signals ("" if none)."""

    rank: int
    task: str
    verb: str
    place: Place | None
    sync: str
    through: str = ""

    @property
    def line(self) -> int | None:
        return self.place.line if self.place else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    kind     a key of REMEDIES
    message  one sentence: what is missing
    tensor   its name, "" where none is concerned; ``rank`` owns it; elements ``first`` to ``last`` are concerned
    sides    the accesses, the earlier first
    detail   further lines (a deadlock's list of waiting tasks)
    advice   what to change, where that is known better than by the kind
    allowed  the reason of a ``# weft: allow(kind) reason`` on one of its lines; None where there is none
    """

    kind: str
    message: str
    tensor: str = ""
    rank: int = 0
    first: int = 0
    last: int = 0
    sides: tuple[Side, ...] = ()
    detail: tuple[str, ...] = ()
    allowed: str | None = None
    advice: str = ""

    @property
    def remedy(self) -> str:
        return self.advice or REMEDIES[self.kind]

    @property
    def through(self) -> str:
        """The signals through which the later side synchronised last."""
        return self.sides[-1].through if self.sides else ""

    @property
    def lines(self) -> tuple[int | None, ...]:
        return tuple(side.line for side in self.sides)

    @property
    def cause(self) -> tuple:
        """Findings with equal causes are one: kind, tensor and source lines, whatever the ranks, programs and elements."""
        places = sorted(str(side.place or side.verb) for side in self.sides)
        return (self.kind, self.tensor, *places) if places else (self.kind, self.message)


def allowed_by(kind: str, sides: tuple[Side, ...]) -> str | None:
    """The reason why a marker on one of the sides' lines allows findings of ``kind``; a marker without a reason does not."""
    for side in sides:
        marker = _MARKER.search(side.place.text) if side.place else None
        if marker is not None and marker[2].strip():
            kinds = {word.strip() for word in marker[1].split(",")}
            if kind in kinds or (kind in RACES and "race" in kinds):
                return marker[2].strip()
    return None
