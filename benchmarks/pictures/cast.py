"""Animated picture of a terminal: a command and what it printed, line after line. CSS in the SVG moves it."""

from __future__ import annotations

import html
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.pictures.svg import MONO, document

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = "weft check examples/scales_after_rows.py --world-size 2 --schedules 8"
COLUMNS, SIZE, ROW, PAD = 112, 12.0, 16.5, 14
ADVANCE = 0.602  # of a monospaced character, in its size
TYPING, LINE, HOLD = 2.5, 0.45, 6.0  # seconds: the command, each further line, the whole
BACKGROUND, INK, PROMPT, MARKED = "#161b22", "#e6edf3", "#7ee787", "#ffa657"
HEADS = ("1. ", "remedy:", "   remedy:")


def printed() -> list[str]:
    """Lines of the picture, from a run of the command."""
    program = [sys.executable, "-m", *shlex.split(COMMAND)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 1:
        raise RuntimeError(f"{COMMAND}: status {done.returncode}, not 1, findings:\n{done.stdout}{done.stderr}")
    return broken(done.stdout + done.stderr)


def broken(printed: str) -> list[str]:
    """Lines of what is printed, broken where a terminal of COLUMNS would break them."""
    lines = printed.rstrip().splitlines()
    return [whole[at : at + COLUMNS] for whole in lines for at in range(0, max(len(whole), 1), COLUMNS)]


def picture(lines: list[str]) -> str:
    width, height = COLUMNS * SIZE * ADVANCE + 2 * PAD, (len(lines) + 1) * ROW + 2 * PAD
    total = TYPING + LINE * len(lines) + HOLD
    style = [f"text{{font-size:{SIZE}px}}"]
    parts = [f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="{BACKGROUND}"/>']
    typed = len(COMMAND) * SIZE * ADVANCE
    share = 100 * TYPING / total
    style.append(f"@keyframes typing{{0%{{width:0}}{share:.2f}%,100%{{width:{typed + 4:.0f}px}}}}")
    style.append(f"#typed{{animation:typing {total:.2f}s steps({len(COMMAND)}) infinite}}")
    parts.append(
        f'<clipPath id="clip"><rect id="typed" x="{PAD + 16}" y="0" width="{typed + 4:.0f}" height="40"/></clipPath>'
    )
    parts.append(f'<text x="{PAD}" y="{PAD + SIZE}" fill="{PROMPT}">$</text>')
    parts.append(
        f'<text x="{PAD + 16}" y="{PAD + SIZE}" fill="{INK}" clip-path="url(#clip)">{html.escape(COMMAND, quote=False)}</text>'
    )
    for number, words in enumerate(lines):
        shown = html.escape(words, quote=False).replace(" ", "\u00a0")  # renderers differ in what they keep of spaces
        at = 100 * (TYPING + LINE * (number + 1)) / total
        style.append(f"@keyframes l{number}{{0%,{at - 0.01:.2f}%{{opacity:0}}{at:.2f}%,100%{{opacity:1}}}}")
        style.append(f"#l{number}{{animation:l{number} {total:.2f}s infinite}}")
        fill = MARKED if words.startswith(HEADS) or "no order" in words else INK
        y = PAD + SIZE + (number + 1) * ROW
        parts.append(f'<text id="l{number}" x="{PAD}" y="{y:.1f}" fill="{fill}">{shown}</text>')
    # Readers who ask for less motion see the whole at once.
    style.append("@media (prefers-reduced-motion: reduce){*{animation:none !important}}")
    return document(width, height, f"{COMMAND}: what it prints", [f"<style>{''.join(style)}</style>", *parts], MONO)
