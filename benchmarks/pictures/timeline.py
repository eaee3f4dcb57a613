"""Timeline of an AG-GEMM on four virtual ranks: copies, GEMMs, and an arrow from each notify to the wait that it released."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import weft
from benchmarks.pictures.svg import Palette, box, document, line, text
from weft.ops.overlap import all_gather_matmul
from weft.trace.chrome import read
from weft.trace.timeline import Event, Timeline

TIP = (
    '<defs><marker id="tip" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0 0L6 3L0 6z" fill="{fill}"/></marker></defs>'
)
RANKS, ROWS, COLUMNS, K = 4, 2048, 2560, 1024
WIDTH, LEFT, TOP, LANE, GAP = 860, 118, 44, 20, 16
TRACKS = {"copy": 0, "gemm": 1}


def main(team: weft.Team, file: str) -> None:
    x = torch.ones(ROWS // team.size, K, dtype=torch.bfloat16, device=team.device)
    w = torch.ones(COLUMNS, K, dtype=torch.bfloat16, device=team.device)
    with weft.trace(file, team):
        # By name, since the choice for a shape this small may be the sequential design.
        all_gather_matmul.ALL_GATHER_MATMUL.run(all_gather_matmul.Pipelined(), team, x, w)


def traced() -> Timeline:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "trace.json")
        weft.simulate(main, world_size=RANKS, sms=4, args=(file,))
        return read(Path(file))


def picture(timeline: Timeline, colours: Palette) -> str:
    end = max(event.end for event in timeline.events)
    scale = (WIDTH - LEFT - 16) / end
    height = TOP + RANKS * (2 * LANE + GAP) + 30

    def left(nanoseconds: int) -> float:
        return LEFT + nanoseconds * scale

    def top(event: Event) -> float:
        lane = TRACKS["copy" if event.track == "copy engine" else "gemm"]
        return TOP + event.rank * (2 * LANE + GAP) + lane * LANE

    title = "all_gather_matmul: each rank's copy engine sends its shard while the GEMM of another shard runs"
    parts = [
        TIP.format(fill=colours.arrow),
        text(LEFT, 18, title, colours.ink, 13, weight="bold"),
        box(LEFT, 26, 10, 10, colours.wire),
        text(LEFT + 15, 35, "copy to a peer", colours.faint, 11),
        box(LEFT + 110, 26, 10, 10, colours.weft),
        text(LEFT + 125, 35, "GEMM of a shard", colours.faint, 11),
        line(LEFT + 228, 31, LEFT + 252, 31, colours.arrow, 1, "tip"),
        text(LEFT + 259, 35, "a notify releases a wait", colours.faint, 11),
        text(WIDTH - 16, 35, "virtual time, four simulated H200s", colours.faint, 11, "end"),
    ]
    for rank in range(RANKS):
        y = TOP + rank * (2 * LANE + GAP)
        parts += [
            text(8, y + LANE + 4, f"rank {rank}", colours.ink, 12, weight="bold"),
            text(LEFT - 6, y + 14, "copies", colours.faint, 11, "end"),
            text(LEFT - 6, y + LANE + 14, "GEMMs", colours.faint, 11, "end"),
            line(LEFT, y + 2 * LANE, WIDTH - 16, y + 2 * LANE, colours.line),
        ]
    for event in timeline.events:
        if event.kind in TRACKS:
            fill = colours.wire if event.kind == "copy" else colours.weft
            told = f"rank {event.rank}, {event.name}: {event.start / 1000:.1f} to {event.end / 1000:.1f} us"
            parts.append(
                box(left(event.start), top(event) + 3, (event.end - event.start) * scale, LANE - 5, fill, told)
            )
    for arrow in timeline.arrows:
        notify, wait = timeline.events[arrow.notify], timeline.events[arrow.wait]
        if notify.track == "copy engine":
            to = (left(wait.end), top(wait) + LANE / 2)
            parts.append(line(left(notify.start), top(notify) + LANE / 2, *to, colours.arrow, 0.9, "tip"))
    bottom = TOP + RANKS * (2 * LANE + GAP)
    for microseconds in range(0, end // 1000 + 1, 10):
        x = left(microseconds * 1000)
        parts.append(line(x, bottom - 8, x, bottom - 3, colours.faint))
        parts.append(text(x, bottom + 10, f"{microseconds} us", colours.faint, 11, "middle"))
    return document(WIDTH, height, "Timeline of an AG-GEMM on four ranks", parts)
