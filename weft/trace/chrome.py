"""Timelines as JSON in the format of Chrome's and Perfetto's viewers, and back.

A process is a rank, a thread a track, a slice an event, and a flow an arrow. Times are microseconds, as the format wants them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from weft.trace.timeline import Arrow, Event, Timeline


def to_json(timeline: Timeline) -> str:
    """Text of a trace file."""
    tracks = sorted({(event.rank, event.track) for event in timeline.events}, key=_in_order)
    threads = {track: number for number, track in enumerate(tracks)}
    lines: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in tracks}):
        lines.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        lines.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
    for (rank, track), thread in threads.items():
        here = {"ph": "M", "pid": rank, "tid": thread}
        lines.append(here | {"name": "thread_name", "args": {"name": track}})
        lines.append(here | {"name": "thread_sort_index", "args": {"sort_index": thread}})
    for event in timeline.events:
        slice_ = {"ph": "X", "cat": event.kind, "name": event.name, "dur": event.duration / 1e3, "args": _args(event)}
        lines.append(slice_ | _place(event, threads, event.start))
    for number, arrow in enumerate(timeline.arrows):
        notify, wait = timeline.events[arrow.notify], timeline.events[arrow.wait]
        flow = {"cat": "notify", "name": "releases", "id": number}
        ends = {"s": (notify, notify.start, arrow.notify), "f": (wait, max(wait.start, wait.end - 1), arrow.wait)}
        for phase, (event, time, at) in ends.items():
            lines.append(flow | _place(event, threads, time) | {"ph": phase, "bp": "e", "args": {"slice": at}})
    about = {
        "world_size": timeline.world_size, "clock": timeline.clock, "residual_ns": timeline.residual_ns,
        "streams_ns": timeline.streams_ns, "lost": timeline.lost,
    }  # fmt: skip
    body = ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    return f'{{"displayTimeUnit": "ns", "otherData": {json.dumps({"weft": about})}, "traceEvents": [\n{body}\n]}}\n'


def _place(event: Event, threads: dict[tuple[int, str], int], time: int) -> dict[str, float]:
    return {"pid": event.rank, "tid": threads[event.rank, event.track], "ts": time / 1e3}


def _args(event: Event) -> dict[str, Any]:
    known = {
        "kernel": event.kernel or None,
        "program": event.program,
        "cause": event.cause or None,
        "bytes": event.nbytes or None,
        "value": event.signal.value if event.signal is not None else None,
    }
    return {name: value for name, value in known.items() if value is not None}


def read(file: str | Path) -> Timeline:
    """Timeline of a trace file. ValueError for a file that ``weft.trace`` has not written."""
    try:
        return _from(json.loads(Path(file).read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError):
        raise ValueError(
            f"{file} is not a trace that weft.trace has written; pass the file that it was given"
        ) from None


def _from(document: dict[str, Any]) -> Timeline:
    about, lines = document["otherData"]["weft"], document["traceEvents"]
    counts = {name: about[name] for name in ("world_size", "residual_ns", "streams_ns", "lost")}
    if not all(isinstance(count, int | float) for count in counts.values()):
        raise TypeError
    tracks = {line["tid"]: line["args"]["name"] for line in lines if line["name"] == "thread_name"}
    events = tuple(
        Event(
            rank=line["pid"], track=tracks[line["tid"]], kind=line["cat"], name=line["name"], start=round(line["ts"] * 1e3),
            end=round((line["ts"] + line["dur"]) * 1e3), program=line["args"].get("program"),
            kernel=line["args"].get("kernel", ""), cause=line["args"].get("cause", ""), nbytes=line["args"].get("bytes", 0),
        )
        for line in lines
        if line["ph"] == "X"
    )  # fmt: skip
    starts = {line["id"]: line["args"]["slice"] for line in lines if line["ph"] == "s"}
    arrows = tuple(Arrow(notify=starts[line["id"]], wait=line["args"]["slice"]) for line in lines if line["ph"] == "f")
    return Timeline(clock=about["clock"], events=events, arrows=arrows, **counts)


def _in_order(track: tuple[int, str]) -> tuple:
    """Sort key that puts SM 10 after SM 9."""
    rank, name = track
    return rank, [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
