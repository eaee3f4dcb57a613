"""The page of engines beside each other, from the files of `benchmarks.engines`.

    python -m benchmarks.engine_page > docs/beside-vllm.md

Each model, form of its weights and number of drafts that both engines have in a folder of FOLDERS is a table; all rows are
printed, also where weft is slower.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

LAB = Path(__file__).parent / "lab"
FOLDERS = ("h200-x2-vllm-0.26",)
HEAD = """# weft beside vLLM

The same requests, answered by both engines on the same GPUs, one engine after the other on one machine: random weights, prompts
of random tokens, greedy answers of 65 tokens, no prefix caching. *First* is the time of `generate()` for one token, *a token*
the further time divided by the further tokens, *tokens/s* the new tokens of all sequences over the whole time. Ratios are
vLLM's time over weft's: above 1 weft is faster. `benchmarks/engines.sh` measures, and
`python -m benchmarks.engine_page > docs/beside-vllm.md` writes this page from [its files](../benchmarks/lab/FOLDER).

vLLM runs with its defaults: torch.compile, CUDA graphs, FlashAttention 3, vLLM's all-reduce, its tuned tables of experts, and
for blocks of fp8 the kernels that it chooses itself. It captures graphs of exactly the measured batches. Left out of its
package, which must fit the way to the machine: FlashInfer (sampling; prompts of gated delta nets, which run by vLLM's Triton
kernels here; its fused all-reduces need NVLink multicast, which is off there), FlashAttention 2, and code for other GPUs. Its
KV cache has a fixed size, because several engines start at the same time; one is measured while the others wait.
""".replace("FOLDER", FOLDERS[0])


def key_of(report: dict[str, Any]) -> tuple[str, str, int]:
    return report["model"], report.get("quantization") or "bf16", report.get("drafts", 0)


def pairs(folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(weft's report, vLLM's) of each setting that has both, by name."""
    reports: dict[str, dict[tuple[str, str, int], dict[str, Any]]] = {"weft": {}, "vllm": {}}
    for file in sorted(folder.glob("*.json")):
        report = json.loads(file.read_text())
        if report.get("engine") in reports:
            reports[report["engine"]][key_of(report)] = report
    return [(ours, reports["vllm"][key]) for key, ours in sorted(reports["weft"].items()) if key in reports["vllm"]]


def tokens_a_second(row: dict[str, Any], new: int = 64) -> float:
    return row["prompts"] * (1 + new) / (row["first_ms"] + new * row["per_token_ms"]) * 1e3


def section(ours: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """A table, with what was special of its runs."""
    model, form, drafts = key_of(ours)
    speculation = f", {drafts} drafts of its MTP head, {ours['acceptance']} tokens a step" if drafts else ""
    lines = [
        f"## {model}, {'blocks of fp8' if form == 'fp8' else form}{speculation}, {ours['world_size']} x {ours['device']}", "",
        f"| prompts x tokens | weft: first, ms | a token, ms | tokens/s | vLLM {other['version']}: first, ms | a token, ms "
        "| tokens/s | first, ratio | a token, ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    rows = {(row["prompts"], row["tokens"]): row for row in other["rows"]}
    ratios = []
    for row in ours["rows"]:
        cells = [f"{row['prompts']}x{row['tokens']}"]
        beside = rows.get((row["prompts"], row["tokens"]))
        for one in (row, beside):
            cells += (
                ["–"] * 3
                if one is None
                else [f"{one['first_ms']:.1f}", f"{one['per_token_ms']:.2f}", f"{tokens_a_second(one):,.0f}"]
            )
        if beside is not None:
            ratios.append([beside[field] / row[field] for field in ("first_ms", "per_token_ms")])
            cells += [f"{ratio:.2f}" for ratio in ratios[-1]]
        lines.append("| " + " | ".join(cells) + (" |" if beside is not None else " | – | – |"))
    mean = [math.exp(sum(math.log(one[at]) for one in ratios) / len(ratios)) for at in (0, 1)] if ratios else [1.0, 1.0]
    ready = (
        f"weft is ready after {ours['ready_seconds']:.0f} s and vLLM after {other['ready_seconds']:.0f} s, caches cold"
    )
    lines += [
        "",
        f"Geometric means {mean[0]:.2f} and {mean[1]:.2f}; {ready}; weft at {ours['revision'].split()[0][:8]}.",
        "",
    ]
    return lines


def folders() -> list[Path]:
    return [LAB / name for name in FOLDERS]


def page(folders: list[Path]) -> str:
    lines = [HEAD]
    for folder in folders:
        for ours, other in pairs(folder):
            lines += section(ours, other)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", default=folders())
    print(page(parser.parse_args().folders), end="")


if __name__ == "__main__":
    main()
