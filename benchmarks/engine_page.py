"""The page of engines beside each other, from the files of `benchmarks.engines`.

    python -m benchmarks.engine_page > docs/beside-vllm.md

Each model, form of its weights and number of drafts that weft and another engine have in a folder of FOLDERS is a table; all
rows are printed, also where weft is slower.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

LAB = Path(__file__).parent / "lab"
FOLDERS = ("h200-x1-vllm-0.26", "h200-x2-vllm-0.26", "h200-x2-vllm-0.26-flashinfer", "h200-x4-vllm-0.26")
OTHERS = {"vllm": "vLLM", "sglang": "SGLang"}
HEAD = """# weft beside vLLM

The same requests, answered by each engine on the same GPUs, one engine after the other on one machine: random weights, prompts
of random tokens, greedy answers of 65 tokens, no prefix caching. *First* is the time of `generate()` for one token, *a token*
the further time divided by the further tokens, *tokens/s* the new tokens of all sequences over the whole time. Ratios are
the other engine's time over weft's: above 1 weft is faster. `benchmarks/engines.sh` measures, and
`python -m benchmarks.engine_page > docs/beside-vllm.md` writes this page from its files of [one](../benchmarks/lab/FOLDER0),
[two](../benchmarks/lab/FOLDER1) ([with FlashInfer](../benchmarks/lab/FOLDER2)) and [four GPUs](../benchmarks/lab/FOLDER3).

vLLM runs with its defaults, but for three settings: DeepGEMM's kernels are compiled at their first calls, not before (rows in
which one was are left out), no all-reduces by symmetric memory, which needs multicast, and no FlashInfer sampler, which greedy
answers do not call. So: torch.compile, CUDA graphs, FlashAttention 3, its tuned tables of experts, and kernels that it
chooses itself. It captures graphs of exactly the measured batches. Its KV cache has a fixed size, because several engines start
at the same time; one is measured while the others wait. Left out of its package, which must fit the way to the machine, are
FlashAttention 2, code for other GPUs, and FlashInfer where a table says so. With FlashInfer installed, vLLM 0.26 by default
fuses all-reduces with the norms that follow on Hopper, without NVLink multicast too, and takes FlashInfer's GEMM for fewer than
32 rows in blocks of fp8, and its kernel for prompts of gated delta nets. So figures on several GPUs, and of few prompts in fp8,
under which "without FlashInfer" stands, are not those of vLLM as its authors set it up.
"""
for number, folder in enumerate(FOLDERS):
    HEAD = HEAD.replace(f"FOLDER{number}", folder)
SGLANG = """
SGLang runs with its defaults for Hopper: CUDA graphs of prompts and of decode steps, the overlapped scheduler,
FlashAttention 3, its all-reduce, FlashInfer's fused one for mixtures, DeepGEMM for dense layers in blocks of fp8, and
Triton with its tuned tables for experts. Graphs of decode steps are of exactly the measured batches, the KV cache has the
bytes of vLLM's, and DeepGEMM's kernels are compiled as they are called, not all at the start. Left out of its package:
kernels of heads other than 128, code for other GPUs, and what needs CuTe DSL.
"""


def key_of(report: dict[str, Any]) -> tuple[str, str, int]:
    return report["model"], report.get("quantization") or "bf16", report.get("drafts", 0)


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
    beside = ", vLLM with FlashInfer" if any(other.get("flashinfer") for other in others) else ""
    if ours.get("draft_head") == "fp8":
        speculation += ", weft's drafts by the head in fp8"
    if ours.get("adaptive"):
        speculation += ", of weft as many as pay"
    lines = [
        f"## {model}, {'blocks of fp8' if form == 'fp8' else form}{speculation}, {machine}{beside}",
        "",
        "| prompts x tokens | weft: first, ms | a token, ms | tokens/s | " + "".join(
            f"{OTHERS[other['engine']]} {other['version']}: first, ms | a token, ms | tokens/s "
            "| first, ratio | a token, ratio |"
            for other in others
        ),
        "|---|---:|---:|---:|" + "---:|---:|---:|---:|---:|" * len(others),
    ]  # fmt: skip
    ratios: dict[str, list[list[float]]] = {other["engine"]: [] for other in others}
    for row in ours["rows"]:
        cells = [f"{row['prompts']}x{row['tokens']}", *figures(row)]
        for other in others:
            shapes = {(one["prompts"], one["tokens"]): one for one in other["rows"]}
            beside = shapes.get((row["prompts"], row["tokens"]))
            cells += figures(beside)
            if beside is None:
                cells += ["–"] * 2
                continue
            both = [beside[field] / row[field] for field in ("first_ms", "per_token_ms")]
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
        + f"Caches cold, weft is ready after {ours['ready_seconds']:.0f} s{''.join(ready)}; weft at "
        f"{ours['revision'].split()[0][:8]}.",
        "",
    ]
    return lines


def lacks_flashinfer(report: dict[str, Any]) -> bool:
    return report["engine"] == "vllm" and not report.get("flashinfer") and bool(report["rows"])


def mean(ratios: list[list[float]], at: int) -> float:
    """Geometric mean, 1 of none."""
    return math.exp(sum(math.log(one[at]) for one in ratios) / max(len(ratios), 1))


def folders() -> list[Path]:
    return [LAB / name for name in FOLDERS]


def page(folders: list[Path]) -> str:
    settings = [setting for folder in folders for setting in compared(folder)]
    has_sglang = any(other["engine"] == "sglang" for _, others in settings for other in others)
    head = HEAD.replace("beside vLLM", "beside vLLM and SGLang", 1) if has_sglang else HEAD
    lines = [head + SGLANG * has_sglang]
    for ours, others in settings:
        lines += section(ours, others)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", default=folders())
    print(page(parser.parse_args().folders), end="")


if __name__ == "__main__":
    main()
