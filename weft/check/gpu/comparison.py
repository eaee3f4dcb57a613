"""Findings of the simulator and of GSan beside each other: what both have, what one lacks, and why."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import weft
from weft.check.detector.findings import RACES, Finding, Side
from weft.check.report import Found

_LANGUAGE = Path(weft.__file__).parent / "language"
# Verbs of accesses by weft's primitives, at which GSan names a line of weft's.
_SIGNALS = ("notify", "wait", "atomic")
# Kinds of wrong places: a store there is also a race with the program that rightly stores there.
_PLACES = ("tile-store",)
# Kinds of races that GSan's model lacks.
UNMODELLED = {
    "missing-barrier": "GSan takes a program for one thread",
    "cta-race": "GSan takes a program for one thread",
    "undrained-tma": "GSan takes a descriptor's store for complete where it is issued",
    "proxy-fence": "GSan knows no asynchronous proxy",
    "unquieted": "on GPUs put_nbi and get_nbi are made in order, so their kernel's accesses are ordered there",
    "overtaken": "Lamport words go through assembly, which GSan does not follow",
    "signal-reset": "a signal that goes back is no race where atomic operations of system scope write it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both sets of findings of one program.

    both       GSan's finding, and the simulator's finding that it is
    only_gpu   GSan's findings that the simulator lacks
    only_sim   the simulator's races that GSan has not shown, with the reason
    """

    both: tuple[tuple[Finding, Found], ...]
    only_gpu: tuple[Finding, ...]
    only_sim: tuple[tuple[Found, str], ...]


def compare(simulated: Sequence[Found], on_gpus: Iterable[Finding]) -> Comparison:
    """Compare findings by their lines: GSan's names one of its two lines, the simulator's both."""
    both: list[tuple[Finding, Found]] = []
    only_gpu: list[Finding] = []
    for finding in on_gpus:
        same = next((entry for entry in simulated if _is_same(finding, entry)), None)
        if same is None:
            only_gpu.append(finding)
        else:
            both.append((finding, same))
    shown = [id(entry) for _, entry in both]
    stopped = bool(both or only_gpu)
    only_sim = [
        (entry, why_not_shown(entry.finding, stopped))
        for entry in simulated
        if id(entry) not in shown and entry.finding.kind in RACES
    ]
    return Comparison(both=tuple(both), only_gpu=tuple(only_gpu), only_sim=tuple(only_sim))


def why_not_shown(finding: Finding, stopped: bool) -> str:
    """Reason why GSan has not shown a race of the simulator's. ``stopped``: it has shown another one."""
    if finding.kind in UNMODELLED:
        return UNMODELLED[finding.kind]
    outside = next((side for side in finding.sides if not _is_kernel(side)), None)
    if outside is not None:
        return f"GSan follows kernels' accesses, and one side is a {outside.verb} by {outside.task}"
    if any("lamport" in side.verb for side in finding.sides):
        return UNMODELLED["overtaken"]
    if stopped:
        return "GSan ends the program at the first race"
    return "this run has not shown it"


def confirmed(entry: Found, finding: Finding, where: str) -> Found:
    """The simulator's finding with a line that GSan has shown it."""
    line = f"shown by GSan on {where}: {finding.sides[-1].verb} by rank {finding.rank}, {finding.sides[-1].place}"
    return replace(entry, finding=replace(entry.finding, detail=(*entry.finding.detail, line)))


def _is_kernel(side: Side) -> bool:
    return " kernel " in f" {side.task} " and not side.verb.startswith("host")


def _calls_primitive(side: Side) -> bool:
    return side.verb.startswith(_SIGNALS) or (side.place is not None and "wl." in side.place.text)


def _is_same(finding: Finding, entry: Found) -> bool:
    """True if GSan's finding is this one of the simulator's or follows from it."""
    simulated = (entry.finding, *entry.also)
    if finding.kind not in RACES:
        return any(one.kind == finding.kind for one in simulated)
    races = [one for one in simulated if one.kind in RACES or one.kind in _PLACES]
    later = finding.sides[-1]
    if later.place is None:
        return False
    if _LANGUAGE in Path(later.place.file).parents:
        return any(_calls_primitive(side) for race in races for side in race.sides)
    if "volatile=True" in later.place.text and any(race.kind == "relaxed-order" for race in races):
        return True  # GSan names the poll that carries no order, the simulator the data that it was to order
    here = os.path.realpath(later.place.file), later.place.line
    places = [side.place for race in races for side in race.sides if side.place is not None]
    return any((os.path.realpath(place.file), place.line) == here for place in places)
