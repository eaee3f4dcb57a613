"""Report of a check: findings, their counts and schedules, and commands that replay them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from weft.check.detector.findings import Finding, Side
from weft.check.picture import picture

DEFAULT_SMS = 8  # resident programs of a rank by default
# weft.runtime.capabilities.NVLINK and DEFAULT_GPU, whose module needs torch, which the command's help does without.
DEFAULT_LINK, DEFAULT_GPU = "nvlink", "h200"
# Strategy of a finding that GPUs have shown: their own schedule.
ON_GPUS = "gpu"
# What a search by strategy "exhaustive" has left out, by the way it ended.
_UNEXPLORED = {
    "exhausted": ", except for what the model leaves out: atomics take effect at once and loads are never early, so that store "
    "buffering between atomics and load buffering do not occur; host code is not permuted",
    "bounded": " by --schedules: other orders are left, store buffering between atomics among them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run, or ``runs`` runs with consecutive seeds from ``seed``. Equal values give equal runs."""

    world_size: int
    strategy: str
    seed: int
    depth: int = 3
    sms: int = DEFAULT_SMS
    like: str = DEFAULT_GPU
    runs: int = 1
    node_size: int | None = None
    link: str = DEFAULT_LINK

    def command(self, script: str) -> str:
        """Replay command: for the shell, the marker of a pytest node, or Python if ``script`` is empty."""
        if self.strategy == ON_GPUS:
            return f"weft check {script or 'FILE'} --gpu --world-size {self.world_size}"
        values = {"world_size": self.world_size, "strategy": self.strategy, "seed": self.seed, "schedules": self.runs}
        if self.strategy in ("pct", "mix"):
            values["depth"] = self.depth
        if self.sms != DEFAULT_SMS or self.runs > 1:  # several runs would vary it
            values["sms"] = self.sms
        if self.like != DEFAULT_GPU:
            values["like"] = self.like
        if self.node_size is not None:
            values["node_size"] = self.node_size
        if self.link != DEFAULT_LINK:
            values["link"] = self.link
        if script and "::" not in script:
            return " ".join([f"weft check {script}", *(f"--{n.replace('_', '-')} {v}" for n, v in values.items())])
        listed = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return f"@pytest.mark.weft({listed})" if script else f"weft.check(main, {listed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Finding with its statistics.

    count      number of occurrences, in ``schedules`` runs
    replay     simplest run known to show it
    also       findings that follow from it
    """

    finding: Finding
    count: int
    schedules: int
    replay: Schedule
    also: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report of ``weft.check``.

    findings    by cause, including what a marker allows (``finding.allowed``); consequences are in ``also``
    schedules   number of runs
    exhaustive  "exhausted": every schedule of the reduced space was run; "bounded": the search stopped early; "" otherwise
    script      name of the script in replay commands
    notes       lines about the runs on GPUs (``--gpu``): their end, the slowdown, what GSan has not shown
    """

    findings: tuple[Found, ...]
    schedules: int
    world_sizes: tuple[int, ...]
    exhaustive: str = ""
    script: str = ""
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Found, ...]:
        """Findings that no marker allows."""
        return tuple(f for f in self.findings if f.finding.allowed is None)

    @property
    def ok(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        return self.text()

    def text(self, *, pictures: bool = False) -> str:
        """Report for a kernel's author. ``pictures``: with the timelines of each race."""
        parts = []
        for number, entry in enumerate(self.wrong, 1):
            drawn = picture(entry.finding) if pictures else []
            parts.append("\n".join([paragraph(number, entry, self.script), *(f"     {row}" for row in drawn)]))
        return "\n\n".join([*parts, self.summary])

    @property
    def summary(self) -> str:
        sizes = ", ".join(map(str, self.world_sizes))
        searched = f"; {self.exhaustive}{_UNEXPLORED[self.exhaustive]}" if self.exhaustive else ""
        lines = [f"{len(self.wrong)} finding(s) in {self.schedules} schedules at world size {sizes}{searched}"]
        if max(self.world_sizes) > 1 and all(size & (size - 1) == 0 for size in self.world_sizes):
            lines[0] += "; all powers of two: try world size 3 as well"
        for entry in self.findings:
            if entry.finding.allowed is not None:
                where = ", ".join(sorted({str(side.place) for side in entry.finding.sides if side.place is not None}))
                lines.append(f"allowed: {entry.finding.kind} at {where}: {entry.finding.allowed}")
        lines += self.notes
        return "\n".join(lines)

    def to_json(self) -> str:
        def plain(entry: Found) -> dict[str, Any]:
            return asdict(entry) | {"remedy": entry.finding.remedy, "command": entry.replay.command(self.script)}

        return json.dumps(
            {
                "ok": self.ok,
                "schedules": self.schedules,
                "world_sizes": self.world_sizes,
                "exhaustive": self.exhaustive,
                "notes": self.notes,
                "findings": [plain(f) for f in self.findings],
            },
            indent=2,
        )


def paragraph(number: int, entry: Found, script: str) -> str:
    """Finding as text for a kernel's author."""
    finding = entry.finding
    lines = [f"{number}. {finding.head}", f"   {finding.message}"]
    lines += [f"   {line}" for side in finding.sides for line in side_lines(side)]
    lines += [f"   {line}" for line in finding.detail if line != finding.message]
    lines.append(f"   remedy: {finding.remedy}")
    for other in entry.also:
        places = ", ".join(dict.fromkeys(str(side.place) for side in other.sides if side.place is not None))
        what = f" ({places})" if places and other.kind != "divergence" else f": {other.message}"
        lines.append(f"   also seen: {other.head}{what}")
    times = f"{entry.count} time(s) in {entry.schedules} schedule(s)"
    lines.append(f"   seen {times}; replay: {entry.replay.command(script)}")
    return "\n".join(lines)


def side_lines(side: Side) -> list[str]:
    """Lines of text on one side of a finding: its access, source line and last synchronisation."""
    place, details = side.place, []
    if place is not None and place.text:  # code made by exec has no text
        details.append(place.text)
    if side.sync:
        details.append(f"last synchronisation: {side.sync}")
    if side.ended:
        details.append(f"ended by {side.ended}")
    where = f", {place} in {place.function}{':' if place.text else ''}" if place is not None else ""
    return [f"{side.verb} by {side.task}{where}", *(f"     {line}" for line in details)]
