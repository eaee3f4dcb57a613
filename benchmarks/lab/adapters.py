"""Adapters on GPUs: time of both kernels beside the GEMM, and an engine that mixes them, in graphs and without.

    python -m benchmarks.lab.adapters --world-size 2 --json out.json

kernels  µs of a call in a CUDA graph of 20, of Qwen3-8B's matrices on one rank: the GEMM alone, and with add_adapters
engine   Qwen3-0.6B with random weights and eight random adapters of rank 16: tokens of a mixed batch in graphs that equal the
         ones without graphs, of each request; ms a token of 32 sequences without adapters and with
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import weft
from benchmarks.measuring import captured, replay_us
from weft import ops
from weft.engine import Engine, SamplingParams
from weft.models import DecoderConfig
from weft.runtime.files import put

# (N, K, parts) of a rank's qkv, o, gate_up and down.
MATRICES = {"qkv": (6144, 4096, 3), "o": (4096, 4096, 1), "gate_up": (24576, 4096, 2), "down": (4096, 12288, 1)}
MODEL = "qwen3-0.6b"
ADAPTERS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_adapters(Path(folder))
        rows = weft.launch(measure, chosen.world_size, "cuda", args=(folder,))[0]
    if chosen.json is not None:
        put(chosen.json, json.dumps(rows, indent=1))


def make_adapters(folder: Path) -> None:
    sizes = DecoderConfig.named(MODEL)
    H, D = sizes.hidden_size, sizes.head_dim
    shapes = {
        "self_attn.q_proj": (sizes.num_attention_heads * D, H),
        "self_attn.v_proj": (sizes.num_key_value_heads * D, H),
        "self_attn.o_proj": (H, sizes.num_attention_heads * D),
        "mlp.gate_proj": (sizes.intermediate_size, H),
        "mlp.down_proj": (H, sizes.intermediate_size),
    }
    for number in range(ADAPTERS):
        generator, tensors = torch.Generator().manual_seed(number), {}
        for layer in range(sizes.num_hidden_layers):
            for name, (rows, columns) in shapes.items():
                at = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{at}.lora_A.weight"] = torch.randn(16, columns, generator=generator) * 0.02
                tensors[f"{at}.lora_B.weight"] = torch.randn(rows, 16, generator=generator) * 0.02
        directory = folder / f"adapter{number}"
        directory.mkdir()
        put(directory / "adapter_config.json", json.dumps({"peft_type": "LORA", "r": 16, "lora_alpha": 32}))
        save_file(tensors, directory / "adapter_model.safetensors")


def measure(team: weft.Team, folder: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def say(**row: Any) -> None:
        rows.append(row)
        if team.rank == 0:
            print(json.dumps(row), flush=True)

    for T in (1, 32, 256, 4096):
        for name, (N, K, parts) in MATRICES.items():
            say(kernel=name, rows=T, **_kernel_times(team, T, N, K, parts))
    say(**_engine(team, folder))
    return rows


def _kernel_times(team: weft.Team, T: int, N: int, K: int, parts: int) -> dict[str, float]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=team.device, dtype=torch.bfloat16) * 0.1

    x, weight, A, B = random(T, K), random(N, K), random(ADAPTERS, parts * 16, K), random(ADAPTERS, N, 16)
    scale, ends = torch.ones(ADAPTERS, device=team.device), [N * part // parts for part in range(1, parts + 1)]
    number = torch.arange(T, device=team.device, dtype=torch.int32)
    of_rows = {"one": torch.zeros_like(number), "eight": number % ADAPTERS, "none": torch.full_like(number, -1)}

    def adapted(adapters: torch.Tensor) -> None:
        ops.add_adapters(ops.matmul(x, weight), x, A, B, scale, ends, adapters)

    times = {"gemm": _microseconds(lambda: ops.matmul(x, weight))}
    for name, adapters in of_rows.items():
        times[name] = _microseconds(lambda adapters=adapters: adapted(adapters))
    return times


def _microseconds(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    return replay_us(captured([run] * 20), 20)


def _engine(team: weft.Team, folder: str) -> dict[str, Any]:
    lora = {f"a{number}": f"{folder}/adapter{number}" for number in range(ADAPTERS)}
    sizes, options = DecoderConfig.named(MODEL), {"max_batch": 32, "max_seq_len": 1024, "pages": 600}
    prompts = [[(7 * row + 3 * place) % 1000 + 1 for place in range(40)] for row in range(32)]
    names = [None if row % 9 == 0 else f"a{row % ADAPTERS}" for row in range(32)]

    def tokens_of(engine: Engine, chosen: list[str | None], count: int = 24) -> tuple[list[list[int]], float]:
        params = [SamplingParams(max_tokens=count, ignore_eos=True, lora=name) for name in chosen]
        begin, answers = time.perf_counter(), [[] for _ in chosen]
        for piece in engine.answer(prompts[: len(chosen)], params):
            answers[piece.prompt].append(piece.token_id)
        return answers, time.perf_counter() - begin

    def ms_a_token(engine: Engine, chosen: list[str | None]) -> float:
        tokens_of(engine, chosen, 64)
        return round((tokens_of(engine, chosen, 264)[1] - tokens_of(engine, chosen, 64)[1]) * 5, 3)

    plain = Engine(sizes, team, **options)
    without = ms_a_token(plain, [None] * 32)
    del plain
    torch.cuda.empty_cache()
    mixed = Engine(sizes, team, lora=lora, prefix_caching=False, **options)
    in_graphs, _ = tokens_of(mixed, names)
    row = {"engine": MODEL, "world_size": team.size, "ms_without": without, "ms_mixed": ms_a_token(mixed, names)}
    row["ms_base_of_mixed"] = ms_a_token(mixed, [None] * 32)
    del mixed
    torch.cuda.empty_cache()
    eager, _ = tokens_of(Engine(sizes, team, lora=lora, cuda_graph=False, prefix_caching=False, **options), names)
    first = [sum(a == b for a, b in zip(one, other, strict=True)) for one, other in zip(in_graphs, eager, strict=True)]
    return {**row, "equal_tokens_of_24": first, "different_answers": len({*map(tuple, in_graphs)})}


if __name__ == "__main__":
    main()
