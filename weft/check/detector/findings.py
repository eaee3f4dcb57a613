"""Findings of a check as data: kind, place, tensor, both sides, remedy."""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass, replace

# Kinds of findings, and the remedy of each.
REMEDIES = {
    "race": "order the two: after the first, a notify (release) that the second side waits for (acquire)",
    "missing-barrier": "put tl.debug_barrier() between the stores and the release, or use wl.notify, which contains it",
    "cta-race": "put tl.debug_barrier() between the store and the load: one thread of a program may load before another stores",
    "undrained-tma": "tensor-descriptor stores land later: use wl.notify, which drains them, or store with tl.store",
    "unquieted": "call wl.quiet(team) first, which completes put_nbi and get_nbi, or wl.fence(team) before the notify of a put",
    "proxy-fence": "descriptor loads need a proxy fence after the acquire: use wl.wait, which contains one, or tl.load",
    "scope": "use scope='sys' on both sides: 'gpu' orders programs of one GPU only, 'cta' threads of one program",
    "relaxed-order": "release with sem='release' (or wl.notify) and acquire with sem='acquire' (or wl.wait) on the same signal",
    "early-access": "call wl.follow_previous_kernel() first: launch_pdl=True lets a kernel start before the previous one ends",
    "unfollowed": "call wl.follow_previous_kernel() in every program of a kernel launched with launch_pdl=True",
    "uninitialised": "write the memory before reading it: zero it, or wait for the peer that fills it",
    "use-after-free": "call team.free() after the last use on every rank",
    "out-of-bounds": "keep the index inside the tensor, or mask the access",
    "misaligned": "align the address to the size of the access",
    "untranslated": "reach a peer's memory through wl.symm_at(ptr, peer, team)",
    "signal-reset": "do not reset signals: let them grow, and wait for the next epoch (wl.next_epoch)",
    "epoch-back": "signals only grow: notify with a value larger than the last",
    "unadvanced": "call wl.advance_call (wl.advance_epoch) at the end of every program that calls wl.next_call (wl.next_epoch)",
    "uncleared": "clear a stage (wl.lamport_clear) after it is read and before peers write it again: rotate three stages",
    "overtaken": "put wl.fence(team) between the clear and the next words sent, or read the cleared words back (volatile)",
    "tile-store": "store rows tile.row .. and the columns of tile.column alone, and mask rows from tile.rows on",
    "tile-read": "load rows of tile.owner from shard alone, only rows of the tile; or pass positions=True with the map",
    "tile-owner": "return the same rank on all ranks, in 0 .. W - 1, whose rows the tile has; or positions=True",
    "tile-map": "give every row of 0 .. covers - 1 to one tile of each column; rows of 0 mark an entry without a tile",
    "equality-wait": "wait for >= (wl.wait): a signal may go past the value between two polls",
    "overshoot": "notify once for each count waited for",
    "residency": "launch at most team.max_programs(num_warps) programs, cooperatively, and loop over the work in them",
    "deadlock": "notify the awaited signal, on its rank, with the awaited value, from a task that can reach the notify; "
    "weft.init(debug=True) gives each wait a time limit",
    "launch-mismatch": "launch the same kernels in the same order on all ranks, or check which rank waits for which",
    "compile-error": "write that line in the part of Python that Triton compiles; the simulator runs more of it",
    "call-mismatch": "make the same collective calls on all ranks, in one order, with equal arguments where the op needs them",
    "divergence": "fix the order in which values are combined, or pass deterministic=False if the op does not promise one",
    "error": "correct the line that raises it; the replay raises it again",
}  # fmt: skip
# Remedies in the words of a program on torch's symmetric memory, where they differ.
OF_TORCH = {
    "race": "order the two: after the first a release that the second side acquires (sem=, scope='sys'); between streams an "
    "event or wait_stream, between ranks a barrier of the handle",
    "missing-barrier": "put tl.debug_barrier() between the stores and the release, and between an acquire by single threads "
    "and the loads",
    "undrained-tma": "tensor-descriptor stores land later: put cp.async.bulk.wait_group 0 and a CTA barrier before the "
    "release, or store with tl.store",
    "proxy-fence": "descriptor loads need fence.proxy.async after the acquire, in every thread; or load with tl.load",
    "relaxed-order": "release with sem='release' and acquire with sem='acquire' on the same signal, with scope='sys' across "
    "GPUs",
    "early-access": "call tl.extra.cuda.gdc_wait() first: launch_pdl=True lets a kernel start before the previous one ends",
    "unfollowed": "call tl.extra.cuda.gdc_wait() in every program of a kernel launched with launch_pdl=True",
    "use-after-free": "keep the tensor until its last use on every rank",
    "signal-reset": "do not reset signals: let them grow, or reset one only after all that wait for it have answered",
    "equality-wait": "wait for >=, or answer before the next write: a signal may go past the value between two polls",
    "residency": "launch at most as many programs as are resident, cooperatively, and loop over the work in them",
    "deadlock": "signal the awaited word with the awaited value, from a task that can reach it; give the wait a time limit",
}
# Kinds that name the cause of a race. They are still races: `allow(race)` covers them.
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

# Kinds about bodies and maps of weft.tiles.
TILES = frozenset({"tile-store", "tile-read", "tile-owner", "tile-map"})

# Verbs of a kernel's accesses to data.
STORES, LOADS = ("store", "descriptor store"), ("load", "descriptor load")

_MARKER = re.compile(r"#\s*weft:\s*allow\(([\w, -]+)\)\s*(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Source line of a kernel or of host code."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of a finding's accesses: its task, verb and place, and the last synchronisation before it.

    through  tensor of signals of that synchronisation, "" if none
    ended    write that a wait or acquire has seen there, "" if none
    """

    rank: int
    task: str
    verb: str
    place: Place | None
    sync: str
    through: str = ""
    ended: str = ""

    @property
    def line(self) -> int | None:
        return self.place.line if self.place else None


# Line, as the side of a finding -> what its atomics have read in a run, and whether they add floats.
Arrivals = dict[Side, tuple[int, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One error in a kernel or in host code.

    kind     key of REMEDIES
    message  one sentence that says what is missing
    tensor   name of the tensor, "" if none is concerned; ``rank`` owns it; elements ``first`` to ``last`` are concerned
    sides    accesses, the earlier first
    detail   further lines (a deadlock's list of waiting tasks)
    advice   remedy, where a better one than the kind's is known
    allowed  reason of a ``# weft: allow(kind) reason`` on one of its lines; None without one
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
        """Signals of the later side's last synchronisation."""
        return self.sides[-1].through if self.sides else ""

    @property
    def head(self) -> str:
        """Kind, and elements of the tensor, if one is concerned."""
        if not self.tensor:
            return self.kind
        span = f"{self.first}" if self.first == self.last else f"{self.first}..{self.last}"
        return f"{self.kind}  {self.tensor}[{span}] of rank {self.rank}"

    @property
    def lines(self) -> tuple[int | None, ...]:
        return tuple(side.line for side in self.sides)

    @property
    def cause(self) -> tuple:
        """Identity of the finding: kind, tensor and source lines, regardless of ranks, programs and elements."""
        places = sorted(str(side.place or side.verb) for side in self.sides)
        return (self.kind, self.tensor, *places) if places else (self.kind, self.message)


def in_words_of_torch(finding: Finding) -> Finding:
    """The finding with a remedy that names no primitive of weft."""
    advice = finding.advice
    if not advice or "wl." in advice or "team." in advice:
        advice = OF_TORCH.get(finding.kind, "")
    advice = advice.replace("notify after", "release after").replace("wait before", "acquire before")
    return replace(finding, advice=advice)


def allowed_by(kind: str, sides: tuple[Side, ...]) -> str | None:
    """Reason of a marker on one of the sides' lines that allows ``kind``.

    A marker without a reason allows nothing.
    """
    for side in sides:
        marker = _MARKER.search(side.place.text) if side.place else None
        if marker is not None and marker[2].strip():
            kinds = {word.strip() for word in marker[1].split(",")}
            if kind in kinds or (kind in RACES and "race" in kinds):
                return marker[2].strip()
    return None
