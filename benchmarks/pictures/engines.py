"""Milliseconds a token of weft's engine and of other engines, from the files of ``benchmarks.engines`` in benchmarks/lab.

Two engines are compared where one folder, so one machine, has both at one model and form of weights; of several folders with
the same pair the one with the newest version of the other engine is shown, then the one with the most rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pictures.svg import Palette, box, document, line, text
from weft.models.families import PUBLISHED

LAB = Path(__file__).resolve().parent.parent / "lab"
# Numbers of GPUs in words: all pairs on the first are in the picture, on the second the pairs beside SGLang.
GPU, GPUS = "NVIDIA H200", {2: "two H200s", 1: "one H200"}
# Its two engines ran on two machines.
LEFT_OUT = "h200-engines"
PROMPTS, TOKENS = (1, 8, 32, 128), 128
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
# Of the runs in a folder, whose files do not have it.
DATES = {
    "h200-x1-engines": "2026-11-29",
    "h200-x2-engines": "2026-11-26",
    "h200-x2-engines-three": "2026-11-29",
    "h200-x2-vllm-0.26": "2026-11-28",
    "h200-x2-vllm-0.26-flashinfer": "2026-11-28",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Times of two engines on a number of GPUs. ``rows``: (weft's ms a token, the other engine's) by the number of prompts."""

    model: str
    form: str
    gpus: int
    engine: str
    version: str
    date: str
    rows: dict[int, tuple[float, float]]


def pairs(lab: Path = LAB) -> list[Pair]:
    """Pairs by number of GPUs, model, form and engine."""
    newest: dict[tuple[int, str, str, str, bool], tuple[tuple[tuple[int, ...], int], Pair]] = {}
    for folder in sorted(each for each in lab.iterdir() if each.is_dir() and each.name != LEFT_OUT):
        reports = [report for report in map(read, sorted(folder.glob("*.json"))) if report]
        for ours in (report for report in reports if report["engine"] == "weft"):
            for other in reports:
                whole = bool(other.get("flashinfer"))  # else vLLM 0.26 has no fused all-reduces
                gpus = ours["world_size"]
                key = (list(GPUS).index(gpus), ours["model"], form_of(ours), other["engine"], whole)
                rows = rows_of(ours, other)
                same = (other["world_size"], other["model"], form_of(other)) == (gpus, ours["model"], form_of(ours))
                if other["engine"] == "weft" or not same or not rows:
                    continue
                version = tuple(int(part) for part in other["version"].split(".")[:3])
                named = other["version"] + (", with FlashInfer" if whole else "")
                engine = NAMES.get(other["engine"], other["engine"])
                pair = Pair(
                    model=titled(ours["model"]), form=form_of(ours), gpus=gpus, engine=engine, version=named,
                    date=DATES.get(folder.name, ""), rows=rows,
                )  # fmt: skip
                if key not in newest or newest[key][0] < (version, len(rows)):
                    newest[key] = ((version, len(rows)), pair)
    return [pair for _, (_, pair) in sorted(newest.items())]


def read(file: Path) -> dict[str, Any] | None:
    """Report of a run of one engine on the machines that are shown, without drafts; None for other files."""
    report = json.loads(file.read_text())
    is_run = isinstance(report, dict) and {"engine", "version", "rows"} <= report.keys()
    if not is_run or report.get("drafts") or report["device"] != GPU or report["world_size"] not in GPUS:
        return None
    return report


def form_of(report: dict[str, Any]) -> str:
    """Form of the weights: as they were made for the run, or as the model is published; of gpt-oss the experts' alone."""
    published = PUBLISHED.get(report["model"], {}).get("quantization_config", {})
    return report.get("quantization") or published.get("quant_method") or "bf16"


def titled(model: str) -> str:
    """Name as published: Qwen3-30B-A3B of qwen3-30b-a3b."""
    first, *parts = model.split("-")
    return "-".join([first.capitalize(), *(part.upper() for part in parts)])


def rows_of(ours: dict[str, Any], other: dict[str, Any]) -> dict[int, tuple[float, float]]:
    times = [
        {row["prompts"]: row["per_token_ms"] for row in report["rows"] if row["tokens"] == TOKENS}
        for report in (ours, other)
    ]
    return {
        prompts: (times[0][prompts], times[1][prompts]) for prompts in PROMPTS if all(prompts in one for one in times)
    }


def table(shown: Iterable[Pair]) -> str:
    """Rows for the README, in Markdown."""
    head = [
        "| ms a token: weft, the other engine (its time over weft's) | "
        + " | ".join("1 prompt" if prompts == 1 else f"{prompts} prompts" for prompts in PROMPTS)
        + " |",
        "|---|" + "---|" * len(PROMPTS),
    ]
    lines = []
    for pair in shown:
        cells = [
            f"{pair.rows[prompts][0]:.2f}, {pair.rows[prompts][1]:.2f} ({pair.rows[prompts][1] / pair.rows[prompts][0]:.2f}x)"
            if prompts in pair.rows
            else "–"
            for prompts in PROMPTS
        ]
        when = f", {pair.date}" if pair.date else ""
        name = f"{pair.model}, {pair.form}, {GPUS[pair.gpus]}, beside {pair.engine} {pair.version}{when}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*head, *lines]) + "\n"


def picture(shown: list[Pair], colours: Palette) -> str:
    """Two bars for each number of prompts, weft's and the other engine's: all pairs on two GPUs, beside SGLang on one."""
    shown = [pair for pair in shown if pair.gpus == next(iter(GPUS)) or pair.engine == NAMES["sglang"]]
    width, left, bar, top = 860, 190, 11, 46
    most = max(time for pair in shown for times in pair.rows.values() for time in times)
    scale = (width - left - 110) / most
    parts, y = [], top
    for pair in shown:
        name = f"{pair.engine} {pair.version}" + (f", {pair.date}" if pair.date else "")
        parts.append(text(8, y + 12, f"{pair.model}, {pair.form}", colours.ink, 13, weight="bold"))
        parts.append(text(8, y + 29, f"beside {name}", colours.faint, 11))
        parts.append(text(8, y + 44, GPUS[pair.gpus], colours.faint, 11))
        for prompts, (ours, other) in pair.rows.items():
            label = "1 prompt" if prompts == 1 else f"{prompts} prompts"
            parts.append(text(left + 62, y + 16, label, colours.faint, 11, "end"))
            for row, (time, fill) in enumerate(((ours, colours.weft), (other, colours.other))):
                at = y + row * (bar + 1)
                parts.append(box(left + 68, at, time * scale * 0.88, bar, fill))
                ratio = f"  ({other / ours:.2f}x)" if row else ""
                parts.append(text(left + 74 + time * scale * 0.88, at + 9.5, f"{time:.2f}{ratio}", colours.ink, 10.5))
            y += 2 * bar + 9
        y += 14
    head = [
        text(8, 18, "Milliseconds a token, prompts of 128 tokens (less is better)", colours.ink, 13, weight="bold"),
        box(8, 27, 10, 10, colours.weft), text(23, 36, "weft", colours.faint, 11),
        box(60, 27, 10, 10, colours.other), text(75, 36, "the other engine (its time over weft's)", colours.faint, 11),
        line(left + 68, top - 4, left + 68, y - 14, colours.line),
    ]  # fmt: skip
    return document(width, y, "Milliseconds a token beside other engines", [*head, *parts])
