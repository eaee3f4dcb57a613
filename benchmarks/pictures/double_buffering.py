"""Picture of double buffering: why a half may be written again two calls later, and not one."""

from __future__ import annotations

from benchmarks.pictures.svg import Palette, box, document, line, text
from benchmarks.pictures.timeline import TIP

CALLS, CALL, LEFT, WIDTH, BOX = (1, 2, 3), 240, 70, 800, 78
LANES = (58, 138)  # of rank 0 and of rank 1, which is later
LATE = (0, 24)


def picture(colours: Palette) -> str:
    parts = [
        TIP.format(fill=colours.arrow),
        text(8, 18, "Two halves: call e writes half e % 2 of its peers", colours.ink, 13, weight="bold"),
        box(8, 28, 10, 10, colours.wire),
        text(23, 37, "half 1", colours.faint, 11),
        box(70, 28, 10, 10, colours.other),
        text(85, 37, "half 0", colours.faint, 11),
        line(132, 33, 156, 33, colours.arrow, 1, "tip"),
        text(163, 37, "a notify that a wait awaits", colours.faint, 11),
    ]
    for rank, y in enumerate(LANES):
        parts.append(text(8, y + 18, f"rank {rank}", colours.ink, 12, weight="bold"))
        for call in CALLS:
            x = LEFT + (call - 1) * CALL + LATE[rank]
            fill = colours.wire if call % 2 else colours.other
            for at, words in ((x, f"{call}: write"), (x + BOX + 46, f"{call}: load")):
                parts.append(box(at, y, BOX, 26, fill))
                parts.append(text(at + BOX / 2, y + 17, words, "#ffffff", 11, "middle"))
            peer = 1 - rank
            to = LEFT + (call - 1) * CALL + LATE[peer] + BOX + 46
            here, there = (y + 26, LANES[peer]) if rank == 0 else (y, LANES[peer] + 26)
            proves = (rank, call) == (1, 2)
            parts.append(line(x + BOX, here, to, there, colours.arrow, 2.4 if proves else 1, "tip"))
    told = (
        "The thick arrow: rank 1 notifies in call 2 after its loads of call 1, and rank 0 waits for it before call 3.",
        "So call 3 may write half 1 again. With one half, call 2 would write what rank 1 may still load in call 1.",
    )
    parts += [text(8, 190 + 17 * row, words, colours.faint, 11.5) for row, words in enumerate(told)]
    return document(WIDTH, 218, "Double buffering between two ranks", parts)
