"""Consequential findings: each is listed under its cause and not counted.

    divergence, overshoot,        under any ordering finding, one about tiles, or call-mismatch
    an AssertionError of main
    uninitialised                 under an ordering finding of that tensor at the reading line
    deadlock                      under a finding of the awaited signals, one about tiles, or call-mismatch
    tile-read, tile-store,        under tile-owner
    out-of-bounds
    an ordering finding           under one of the signal through which its second side synchronised last; or under one of the
                                  same tensor that shares a line with it and names a more specific cause
    early-access                  under another one, or `unfollowed`, of the same kernel
    a finding of that kernel,     under unadvanced
    or one without a place
    uncleared                     under an ordering finding of two stores to that stage; a race with a load follows from it

Only findings of a common run are folded (`divergence`: of a common world size), and only under findings that no marker allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.check.detector.findings import RACES, TILES, Finding, Side

# Kinds that may make results differ between schedules.
DISORDER = RACES | {"uncleared"}
_HANGS = DISORDER | {"epoch-back", "equality-wait"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Finding with the numbers of the runs that showed it."""

    finding: Finding
    runs: frozenset[int]


def causes_of(seen: Sequence[Seen]) -> list[int]:
    """Index of each finding's cause, its own index if it has none."""
    parents = list(range(len(seen)))

    def root(index: int) -> int:
        while parents[index] != index:
            index = parents[index]
        return index

    for index, effect in enumerate(seen):
        for other, cause in enumerate(seen):
            if other != index and root(other) != index and _explains(cause, effect, earlier=other < index):
                parents[index] = other
                break
    return [root(index) for index in range(len(seen))]


def _explains(cause: Seen, effect: Seen, *, earlier: bool) -> bool:
    one, other = cause.finding, effect.finding
    if one.allowed is not None or other.allowed is not None or not cause.runs & effect.runs:
        return False
    kind, is_ordering = other.kind, one.kind in RACES
    same = bool(one.tensor) and one.tensor == other.tensor
    touching = same and bool(_places(one) & _places(other))
    if one.kind == "unadvanced":
        follows = kind in RACES | {"uninitialised", "overshoot", "deadlock", "divergence"} or _is_assertion(other)
        return follows and (not other.sides or _is_assertion(other) or _kernel(one) in map(_kernel_of, other.sides))
    if one.kind in TILES or one.kind == "call-mismatch":
        wrong = _is_assertion(other) and effect.runs <= cause.runs
        misplaced = one.kind == "tile-owner" and kind in ("tile-read", "tile-store", "out-of-bounds")
        return wrong or misplaced or kind in ("divergence", "overshoot", "deadlock")
    if kind == "divergence":
        return one.kind in DISORDER
    if kind == "overshoot":
        return is_ordering
    if kind == "error":
        return one.kind in DISORDER and _is_assertion(other) and effect.runs <= cause.runs
    if kind == "uninitialised":
        return is_ordering and touching
    if kind == "deadlock":
        return one.kind in _HANGS and same
    if kind == "uncleared":
        return is_ordering and touching and _is_of_stores(one)
    if kind == "early-access" and one.kind in ("early-access", "unfollowed"):
        return _kernel(one) == _kernel(other) and (earlier or one.kind == "unfollowed")
    if kind in RACES and one.kind == "uncleared":
        return touching and not _is_of_stores(other)
    if kind in RACES and is_ordering:
        if not same:
            return other.through == one.tensor != "" and (earlier or one.through != other.tensor)
        says_more = (one.kind != "race") - (kind != "race")
        return touching and (says_more > 0 or says_more == 0 and earlier)
    return False


def _places(finding: Finding) -> set[tuple[str, int]]:
    return {(side.place.file, side.place.line) for side in finding.sides if side.place is not None}


def _is_of_stores(finding: Finding) -> bool:
    return all("load" not in side.verb for side in finding.sides)


def _is_assertion(finding: Finding) -> bool:
    return finding.kind == "error" and finding.message.startswith("AssertionError")


def _kernel(finding: Finding) -> str:
    """Kernel of the later side."""
    return _kernel_of(finding.sides[-1]) if finding.sides else ""


def _kernel_of(side: Side) -> str:
    """Kernel of a side's task, from "rank 0 kernel NAME program 1"."""
    return side.task.partition(" kernel ")[2].partition(" program ")[0]
