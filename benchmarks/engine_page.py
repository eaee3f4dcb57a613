"""Tables of docs/beside-vllm.md, from the files of `benchmarks.engines`.

    python -m benchmarks.engine_page

Each model, form of its weights and number of drafts that weft and another engine have in a folder of FOLDERS is a table; all
rows of all engines are printed, also where weft is slower or has none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.pages import DOCS, write
from benchmarks.pictures.engines import form_of

LAB = Path(__file__).parent / "lab"
FOLDERS = (
    "h200-x1-engines", "h200-x1-vllm-0.26", "h200-x2-engines-three", "h200-x2-vllm-0.26", "h200-x2-vllm-0.26-flashinfer",
    "h200-x4-vllm-0.26",
)  # fmt: skip
OTHERS = {"vllm": "vLLM", "sglang": "SGLang"}
FORMS = {"fp8": "blocks of fp8", "mxfp4": "experts in MXFP4"}


def key_of(report: dict[str, Any]) -> tuple[str, str, int]:
    return report["model"], form_of(report), report.get("drafts", 0)


def compared(folder: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(weft's report, those of other engines) of each setting that weft and another engine have, by name."""
    reports: dict[str, dict[tuple[str, str, int], dict[str, Any]]] = {name: {} for name in ("weft", *OTHERS)}
    for file in sorted(folder.glob("*.json")):
        report = json.loads(file.read_text())
        if report.get("engine") in reports:
            reports[report["engine"]][key_of(report)] = report
    ours = reports.pop("weft")
    settings = [(ours[key], [one[key] for one in reports.values() if key in one]) for key in sorted(ours)]
    return [(one, others) for one, others in settings if others]


def tokens_a_second(row: dict[str, Any], new: int = 64) -> float:
    return row["prompts"] * (1 + new) / (row["first_ms"] + new * row["per_token_ms"]) * 1e3


def figures(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["–"] * 3
    return [f"{row['first_ms']:.1f}", f"{row['per_token_ms']:.2f}", f"{tokens_a_second(row):,.0f}"]


def section(ours: dict[str, Any], others: list[dict[str, Any]]) -> list[str]:
    """A table, with what was special of its runs."""
    model, form, drafts = key_of(ours)
    speculation = f", {drafts} drafts of its MTP head, {ours['acceptance']} tokens a step" if drafts else ""
    machine = f"{ours['world_size']} x {ours['device']}"
    beside = ", weft with DeepGEMM" if ours.get("deep_gemm") else ""
    beside += ", vLLM with FlashInfer" if any(other.get("flashinfer") for other in others) else ""
    if ours.get("draft_head") == "fp8":
        speculation += ", weft's drafts by the head in fp8"
    if ours.get("adaptive"):
        speculation += ", of weft as many as pay"
    lines = [
        f"## {model}, {FORMS.get(form, form)}{speculation}, {machine}{beside}",
        "",
        "| prompts x tokens | weft: first, ms | a token, ms | tokens/s | " + " ".join(
            f"{OTHERS[other['engine']]} {other['version']}: first, ms | a token, ms | tokens/s "
            "| first, ratio | a token, ratio |"
            for other in others
        ),
        "|---|---:|---:|---:|" + "---:|---:|---:|---:|---:|" * len(others),
    ]  # fmt: skip
    ratios: dict[str, list[list[float]]] = {other["engine"]: [] for other in others}
    times = [{(row["prompts"], row["tokens"]): row for row in one["rows"]} for one in (ours, *others)]
    for shape in dict.fromkeys(shape for rows in times for shape in rows):
        of_weft, *of_others = (rows.get(shape) for rows in times)
        cells = ["x".join(map(str, shape)), *figures(of_weft)]
        for other, row in zip(others, of_others, strict=True):
            cells += figures(row)
            if of_weft is None or row is None:
                cells += ["–"] * 2
                continue
            both = [row[field] / of_weft[field] for field in ("first_ms", "per_token_ms")]
            ratios[other["engine"]].append(both)
            cells += [f"{ratio:.2f}" for ratio in both]
        lines.append("| " + " | ".join(cells) + " |")
    means = [
        f"{OTHERS[other['engine']]} {mean(ratios[other['engine']], 0):.2f} and {mean(ratios[other['engine']], 1):.2f}"
        for other in others
        if ratios[other["engine"]]
    ]
    ready = [f", {OTHERS[other['engine']]} after {other['ready_seconds']:.0f} s" for other in others if other["rows"]]
    notes = [
        f"{(OTHERS | {'weft': 'weft'})[one['engine']]}: {one['note']}." for one in (ours, *others) if "note" in one
    ]
    notes += [
        f"vLLM without FlashInfer{', so without fused all-reduces' * (other['world_size'] > 1)}."
        for other in others
        if lacks_flashinfer(other)
    ]
    lines += [
        "",
        *notes,
        *[""] * bool(notes),
        f"Geometric means of the rows that both have: {'; '.join(means)}. "
        * bool(means)
        + f"weft is ready after {ours['ready_seconds']:.0f} s{''.join(ready)}; weft at "
        f"{ours['revision'].split()[0][:8]}.",
        "",
    ]
    return lines


def lacks_flashinfer(report: dict[str, Any]) -> bool:
    return report["engine"] == "vllm" and not report.get("flashinfer") and bool(report["rows"])


def mean(ratios: list[list[float]], at: int) -> float:
    """Geometric mean, 1 of none."""
    return math.exp(sum(math.log(one[at]) for one in ratios) / max(len(ratios), 1))


def tables(folders: Iterable[Path]) -> str:
    """Sections of docs/beside-vllm.md."""
    settings = [setting for folder in folders for setting in compared(folder)]
    return "\n".join(line for ours, others in settings for line in section(ours, others)).rstrip() + "\n"


if __name__ == "__main__":
    write(DOCS / "beside-vllm.md", {"engines": tables(LAB / name for name in FOLDERS)})
