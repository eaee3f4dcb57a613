"""Command line: ``python -m benchmarks.pictures`` writes all pictures of the README, or those that are named."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.pictures import cast, double_buffering, engines, timeline
from benchmarks.pictures.badges import badges
from benchmarks.pictures.svg import DARK, LIGHT
from weft.runtime.files import put

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "pictures"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        default=["timeline", "check", "engines", "badges", "double-buffering"],
        help="all, if none is named",
    )
    names = parser.parse_args().names
    traced = timeline.traced() if "timeline" in names else None
    for colours in (LIGHT, DARK):
        if traced is not None:
            put(FOLDER / f"timeline-{colours.name}.svg", timeline.picture(traced, colours))
        if "double-buffering" in names:
            put(FOLDER / f"double-buffering-{colours.name}.svg", double_buffering.picture(colours))
        if "engines" in names:
            put(FOLDER / f"engines-{colours.name}.svg", engines.picture(engines.pairs(), colours))
    if "badges" in names:
        for name, content in badges().items():
            put(FOLDER / name, content)
    if "check" in names:
        put(FOLDER / "check.svg", cast.picture(cast.printed()))


if __name__ == "__main__":
    main()
