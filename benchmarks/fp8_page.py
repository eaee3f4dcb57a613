"""The page of fp8 GEMMs beside DeepGEMM and cuBLAS, from the files of `benchmarks.fp8_gemm` and `benchmarks.fp8_grouped`.

Goals of fp8 stand beside what these files hold, and the files of steps and engines.

python -m benchmarks.fp8_page > docs/fp8-gemms.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAB = Path(__file__).parent / "lab"
DENSE, GROUPED = LAB / "h200-fp8-gemm.json", LAB / "h200-fp8-grouped-deep-gemm.json"
STEPS = LAB.parent / "results" / "h200-x2-fp8" / "model.w2.json"
ENGINES = LAB / "h200-x2-vllm-0.26"
HEAD = """# fp8 GEMMs beside DeepGEMM and cuBLAS

One {gpu}, torch {torch}, Triton {triton}, sgl-deep-gemm 0.1.4.post1, CUDA graphs, weights cold, one run for all columns of a
table. `benchmarks/fp8_gemm.py` and `benchmarks/fp8_grouped.py` measure, and
`python -m benchmarks.fp8_page > docs/fp8-gemms.md` writes this page. Each result is compared with the product
of the dequantized operands before it is timed. The dense GEMMs are of {dense}, the experts of {grouped}; commits are named so
in all of this page. [Goals](#goals) stand below.

## Dense, of Qwen3-32B on two GPUs, µs

Weights in blocks of 128 x 128, rows in fp8 with a scale for 128 columns, given before the call; cuBLAS by rows has one scale
for a row and one for a column: another format. The last column is DeepGEMM's time over weft's: above 1 weft is faster.

| N x K | M | bf16, cuBLAS | rows, cuBLAS | blocks, cuBLAS | DeepGEMM | weft | DeepGEMM / weft |
|---|---:|---:|---:|---:|---:|---:|---:|
"""
BETWEEN = """
## Experts of Qwen3-30B-A3B, µs

128 experts, 8 for a token, hidden 2,048, features 768. weft's first GEMM gathers the tokens' rows, applies SiLU and product,
and writes its result in fp8; its second reads that. DeepGEMM's rows lie expert by expert before the clock starts, and its times
are the times of the GEMMs alone ("contiguous": an expert's rows begin at a multiple of 128): less than a layer takes.

| tokens | GEMM | weft bf16 | weft fp8 | DeepGEMM, GEMM alone | DeepGEMM / weft fp8 |
|---:|---|---:|---:|---:|---:|
"""
TAIL = """
weft is faster at one row of all dense shapes, DeepGEMM at 64 and 128 rows of most, by up to 20 %, and at 4,096 rows by 10 %:
there weft calls cuBLAS's block form. At 4,096 tokens DeepGEMM's grouped GEMMs take two thirds of weft's time, without gathering
and SiLU.

## Goals

On H200s, in CUDA graphs, weights cold; dense GEMMs take fp8 rows, steps include all. µs, of steps ms, or ratios.

| what | goal | measured | missed by | commit |
|---|---:|---:|---:|---|
"""
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
MISSES = """
AG-GEMM of 4,096 rows is 1.59 to 1.70 times as fast as in bf16 (goals 1.35 with blocks, 1.6 with scales of rows), and at most
1.06 times as long as its GEMM alone (goal 1.06), in a run whose files were lost ([table](quantization.md#overlap)). Beside
DeepGEMM and NCCL it has not been timed: `weft bench ag-gemm+block_fp8@qwen3-32b:4096,8192 --world-size 2` has them as
providers. On one GPU a token of Qwen3-8B's engine took 2.86 ms, at 26bd7ccb (goal of a step 2.5). With FlashInfer vLLM
0.26.0 takes 1.297, 1.28 and 1.18 times as long as weft for 1, 32 and 128 prompts of Qwen3-32B (goal 1.3) and 1.45 times for
one of Qwen3-8B ([files](../benchmarks/lab/h200-x2-vllm-0.26-flashinfer)).

What misses its goal, what was tried, and what one would try:

- **Gate and up, up to 128 rows.** In a layer of one row 35.5 µs, with six stages in place of four 36.2
  ([file](../benchmarks/lab/h200-fp8-layers.json), 26bd7ccb); steps of 256 columns, two under a scale, are built and no rule
  takes them (733cd1ce). The bytes take 30.5 µs. 200 tiles of 128 columns on 132 SMs: 68 SMs have two and read twice as much.
  That this is the limit was not traced. Next: tiles that share K so that all SMs read alike.
- **Down, up to 128 rows.** Tiles of 64 columns with eight stages took 18.3 µs in a layer of one row, with four 22.2; of 32
  rows 21.6 and 21.3; tiles of 128 columns with six stages 23.0 and 21.1 (the same file). Decode steps take eight stages up to
  32 rows since 733cd1ce, after the table above. There the norm adds the partials up; here a kernel of 1.3 µs does, and the
  rule takes other tiles: `benchmarks/fp8_gemm.py` times the decode step's design too ("as partials").
- **DeepGEMM at 64 and 128 rows.** Tiles whose rows fill the tensor instructions took 25.4 µs in place of 28.3 for 64 rows of
  5120 x 12800. Triton waits for each step's sums before it scales them and multiplies the next. Next: two accumulators in
  turn, or warps that only load.
- **Decode of Qwen3-32B.** A layer takes 83.5 µs on one GPU without communication (26bd7ccb), its bytes 57; the goal asks for
  72 a layer with all-reduces. Tried: rows in fp8 by the kernels before (seven launches), then eight stages: a token of the
  engine fell from 5.60 ms (26bd7ccb) to 5.51 (285370a5) and 5.50 (24e2035a). The steps of 62ba3dd5 took 5.54 and 8.34 ms on
  another machine, at 18c23352: how much of the difference is the machine's was not measured. Left: the two GEMMs above, 2 to
  5 µs a layer, and attention, 6.3 µs of which the bytes take 0.1.
- **Prompts of Qwen3-32B.** One of 1,024 tokens by both recipes: 40.5 ms replicated, 41.1 under sequence parallelism
  ([files](../benchmarks/results/h200-x2-fp8-prompts), 9db60856). Of 1 x 128 and 32 x 128 nothing else was tried. 64 and 128
  rows are where GEMMs above are slower than DeepGEMM; sums travel in 16 bits, and hide under short GEMMs no longer.
- **Decode of Qwen3-30B-A3B.** The second GEMM of few pairs in one flat loop with five stages: 26.5 µs in place of 28.6 for 32
  tokens (8dd8d722); then two launches fewer, since the norms round rows: steps of 1, 8, 32 and 128 sequences fell from 2.32,
  3.77, 6.14 and 7.86 ms (18c23352, 18b57ee2) to those above. A layer has eight launches that depend on one another, and takes
  4 times its bytes' time for one sequence.
  [What could be one launch](layer-launches.md#what-could-be-one-launch).
- **Grouped GEMMs of 4,096 tokens.** Two products of half a tile each (81bda44b) were no faster than 64 rows of the weight in
  two programs an SM, which a sweep found (0e35dba2). Tensor cores idle half of the time, since Triton waits for each step's
  sums. Next: as for DeepGEMM.
- **Qwen3-8B, one sequence.** Tried: as for 32B. Its bytes take 0.95 ms of a step at 4.3 TB/s; the rest, 31 µs of each of 36
  layers, is the begin and end of seven launches, the sums over ranks and attention.
- **vLLM at 128 prompts.** A token of the engine takes 9.04 ms, a step 8.62 (of another commit). The rest, of the host or of
  the time until all prompts are read, was not traced.
"""


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


def page() -> str:
    dense, grouped = json.loads(DENSE.read_text()), json.loads(GROUPED.read_text())
    versions = {name: dense[name] for name in ("gpu", "torch", "triton")}
    lines = [HEAD.format(**versions, dense=commit(dense), grouped=commit(grouped)).rstrip("\n")]
    kept = [row for row in dense["rows"] if not row.get("gated")]
    for (N, K, M), us in times(kept, ("N", "K", "M")).items():
        names = "cublas bf16", "cublas row fast x8", "cublas block x8", "deep_gemm x8", "auto x8"
        cells = [cell(us.get(name)) for name in names]
        lines.append(f"| {N} x {K} | {M} | {' | '.join(cells)} | {cell(us['deep_gemm x8'] / us['auto x8'], 2)} |")
    lines.append(BETWEEN.rstrip("\n"))
    for (tokens, gemm), us in times(grouped["rows"], ("tokens", "gemm")).items():
        alone = us.get("deep_gemm contiguous", us.get("deep_gemm contiguous, GEMMs alone"))
        label = {"gate_up": "gate and up", "down": "down", "layer": "both"}[gemm]
        ratio = cell(alone / us["fp8"], 2) if alone else "–"
        lines.append(f"| {tokens} | {label} | {cell(us['bf16'])} | {cell(us['fp8'])} | {cell(alone)} | {ratio} |")
    return "\n".join(lines) + "\n" + TAIL + "\n".join(goals(dense, grouped)) + "\n" + MISSES


if __name__ == "__main__":
    print(page(), end="")
