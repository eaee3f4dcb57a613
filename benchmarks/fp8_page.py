"""Tables of docs/fp8-gemms.md, from the files of `benchmarks.fp8_gemm`, `benchmarks.fp8_grouped`, of steps and engines.

python -m benchmarks.fp8_page
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pages import DOCS, write

LAB = Path(__file__).parent / "lab"
DENSE, GROUPED = LAB / "h200-fp8-gemm.json", LAB / "h200-fp8-grouped-deep-gemm.json"
STEPS = LAB.parent / "results" / "h200-x2-fp8" / "model.w2.json"
ENGINES = LAB / "h200-x2-vllm-0.26"
# µs by (N, K) and M; at 4,096 rows of the first, what cuBLAS's block form takes.
DENSE_GOALS = {
    (25600, 5120): {1: 36.0, 16: 37.0, 64: 40.0, 128: 42.0, 4096: None},
    (5120, 12800): {1: 19.0, 16: 20.0, 64: 23.0, 128: 26.0, 4096: 484.0},
}
# ms of a step on two GPUs, by model and label.
STEP_GOALS = {
    "qwen3-32b": {
        "decode 1x128": 4.9, "decode 32x1024": 6.4, "decode 128x128": 8.5,
        "prefill 32x128": 150.0, "prefill 1x1024": 38.0, "prefill 1x128": 6.8,
    },
    "qwen3-30b-a3b": {"decode 1x1024": 1.6, "decode 8x1024": 3.2, "decode 32x1024": 5.2, "decode 128x1024": 7.0},
    "qwen3-8b": {"decode 1x128": 1.6},
}  # fmt: skip
# Models whose fp8 engines ran beside vLLM without FlashInfer.
BESIDE = "qwen3-32b", "qwen3-30b-a3b"


def times(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[tuple, dict[str, float]]:
    """Time of each provider by the fields `keys`, where it ran."""
    found: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if "us" in row:
            found.setdefault(tuple(row[key] for key in keys), {})[row["provider"]] = row["us"]
    return found


def cell(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def commit(document: dict[str, Any]) -> str:
    return document["revision"].split()[0][:8]


def goal(
    what: str, wanted: float, measured: float, document: dict[str, Any], digits: int = 1, most: bool = True
) -> str:
    """Row of a goal. most: less is better, else more is."""
    share = measured / wanted if most else wanted / measured
    missed = "reached" if share <= 1 else f"{100 * (share - 1):.0f} %"
    cells = what, f"{'≤' if most else '≥'} {cell(wanted, digits)}", cell(measured, digits), missed, commit(document)
    return f"| {' | '.join(cells)} |"


def goals(dense: dict[str, Any], grouped: dict[str, Any]) -> Iterator[str]:
    """Rows of the goals."""
    us = times([row for row in dense["rows"] if not row.get("gated")], ("N", "K", "M"))
    for (N, K), by_rows in DENSE_GOALS.items():
        for M, wanted in by_rows.items():
            found = us[N, K, M]
            yield goal(f"{N} x {K}, M={M}", wanted or found["cublas block x8"], found["auto x8"], dense)
    for label, least, sizes in (("to 128", 0.9, range(1, 129)), ("of 4096", 0.8, (4096,))):
        ratios = [one["deep_gemm x8"] / one["auto x8"] for (_, _, M), one in us.items() if M in sizes]
        below = sum(ratio < least for ratio in ratios)
        what = f"DeepGEMM / weft, M {label}, the least ({below} of {len(ratios)} below)"
        yield goal(what, least, min(ratios), dense, 2, most=False)
    for report in json.loads(STEPS.read_text())["reports"]:
        model = report["command"].partition("--model ")[2].split()[0]
        for row in report["rows"]:
            wanted = STEP_GOALS[model].get(row["label"])
            timed = row["median_us"] is not None and row["provider"] != "weft.fp8_wire"
            if wanted is not None and timed:
                yield goal(f"{model}, W=2, {row['label']}", wanted, row["median_us"] / 1e3, report["machine"], 2)
    layer = times(grouped["rows"], ("tokens", "gemm"))[4096, "layer"]
    yield goal("experts, 4096 tokens, bf16 / fp8", 1.5, layer["bf16"] / layer["fp8"], grouped, 2, most=False)
    for model in BESIDE:
        ours, theirs = (json.loads((ENGINES / f"{by}-{model}-fp8.json").read_text()) for by in ("weft", "vllm"))
        tokens = {(row["prompts"], row["tokens"]): row["per_token_ms"] for row in ours["rows"]}
        for row in theirs["rows"]:
            if (shape := (row["prompts"], row["tokens"])) in tokens:
                what = f"{model}, W=2, vLLM 0.26.0 without FlashInfer / weft, a token, {shape[0]}x{shape[1]}"
                yield goal(what, 1.3, row["per_token_ms"] / tokens[shape], ours, 2, most=False)


def tables() -> dict[str, str]:
    """Tables of docs/fp8-gemms.md, and the line that says what they are of, by their marks."""
    dense, grouped = json.loads(DENSE.read_text()), json.loads(GROUPED.read_text())
    of = f"{dense['gpu']}, torch {dense['torch']}, Triton {dense['triton']}"
    measured = f"On one {of}, dense GEMMs at {commit(dense)}, experts at {commit(grouped)}."
    gemms = ["| N x K | M | bf16, cuBLAS | rows, cuBLAS | blocks, cuBLAS | DeepGEMM | weft | DeepGEMM / weft |"]
    gemms.append("|---|---:" + "|---:" * 6 + "|")
    kept = [row for row in dense["rows"] if not row.get("gated")]
    for (N, K, M), us in times(kept, ("N", "K", "M")).items():
        names = "cublas bf16", "cublas row fast x8", "cublas block x8", "deep_gemm x8", "auto x8"
        cells = [cell(us.get(name)) for name in names]
        gemms.append(f"| {N} x {K} | {M} | {' | '.join(cells)} | {cell(us['deep_gemm x8'] / us['auto x8'], 2)} |")
    experts = ["| tokens | GEMM | weft bf16 | weft fp8 | DeepGEMM, GEMM alone | DeepGEMM / weft fp8 |"]
    experts.append("|---:|---" + "|---:" * 4 + "|")
    for (tokens, gemm), us in times(grouped["rows"], ("tokens", "gemm")).items():
        alone = us.get("deep_gemm contiguous", us.get("deep_gemm contiguous, GEMMs alone"))
        label = {"gate_up": "gate and up", "down": "down", "layer": "both"}[gemm]
        ratio = cell(alone / us["fp8"], 2) if alone else "–"
        experts.append(f"| {tokens} | {label} | {cell(us['bf16'])} | {cell(us['fp8'])} | {cell(alone)} | {ratio} |")
    missed = ["| what | goal | measured | missed by | commit |", "|---|---:|---:|---:|---|", *goals(dense, grouped)]
    return {
        "measured": measured,
        "gemms": "\n".join(gemms),
        "experts": "\n".join(experts),
        "goals": "\n".join(missed),
    }


if __name__ == "__main__":
    write(DOCS / "fp8-gemms.md", tables())
