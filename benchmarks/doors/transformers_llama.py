"""A Llama of transformers over ranks: its own plan, the plan on weft, and weft.layers.replace, with torch.compile and without.

    python -m benchmarks.doors.transformers_llama --world-size 2 --json RUNS/transformers.json [--layers 8]

Random weights, bf16, greedy. `prompt`: a forward pass of 8x2048 tokens. `token`: a token of generate() after the first one,
eager, with a growing cache, batch 1 and 8; `static` with a static cache, whose steps transformers compiles and captures. A way
whose transformers is too old, or whose compilation fails, has the reason in its row. Logits are compared with the plan's own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

import weft
from benchmarks.doors.timing import distance, in_a_row, tell, write

SIZES = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
PROMPTS, TOKENS = ((8, 2048), (1, 2048)), ((1, 128), (8, 1024))  # batch and length
NEW, REPEATS = 32, 3
LIMIT = 0.05  # relative RMS of logits in bf16


def model_of(team: Any, layers: int, sizes: dict[str, Any]) -> Any:
    """The model with the same random weights on every rank."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, attn_implementation="sdpa")
    with torch.device(team.device):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def planned(team: Any, mesh: Any, layers: int, sizes: dict[str, Any], on_weft: bool) -> Any:
    """The model by tp_plan="auto", as from_pretrained makes it."""
    from transformers.distributed import DistributedConfig

    if on_weft:
        import weft.integrations.transformers as door

        door.install()
    try:
        config = DistributedConfig(tp_size=team.size, tp_plan="auto")
        model = model_of(team, layers, sizes)
        return model.maybe_distribute_model(model, config, SimpleNamespace(get_mesh=lambda names: mesh))
    finally:
        if on_weft:
            door.uninstall()


def replaced(team: Any, layers: int, sizes: dict[str, Any], compiles: bool) -> Any:
    model = model_of(team, layers, sizes)
    weft.layers.replace(model, team)
    if compiles:
        model.forward = torch.compile(model.forward)
    return model


def ways_of(team: Any, mesh: Any, layers: int, sizes: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "tp_plan", lambda: planned(team, mesh, layers, sizes, on_weft=False)
    yield "tp_plan on weft", lambda: planned(team, mesh, layers, sizes, on_weft=True)
    yield "replace", lambda: replaced(team, layers, sizes, compiles=False)
    yield "replace, compiled", lambda: replaced(team, layers, sizes, compiles=True)


def a_token(model: Any, team: Any, ids: torch.Tensor, **options: Any) -> dict[str, float]:
    """Microseconds of a token after the first: of NEW + 1 tokens less that of one, by NEW; medians."""
    seconds: dict[int, list[float]] = {1: [], 1 + NEW: []}
    for repeat in range(REPEATS + 1):
        for new, taken in seconds.items():
            team.barrier()
            begin = time.perf_counter()
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options)
            team.synchronize()
            if repeat:
                taken.append(time.perf_counter() - begin)
    first, all_of_them = (max(team.exchange(statistics.median(taken))) for taken in seconds.values())
    us = (all_of_them - first) / NEW * 1e6
    return {"us": us, "host_us": us, "first_us": first * 1e6}


def measure(team: Any, mesh: Any, layers: int, sizes: dict[str, Any], shapes: tuple, file: Path | None) -> list[dict]:
    prompts, tokens = shapes
    rows = [{"what": f"{what} {batch}x{length}"} for what, of in
            (("prompt", prompts), ("token", tokens), ("static", tokens)) for batch, length in of]  # fmt: skip
    names, wanted = [], None
    torch.manual_seed(1)
    draw = [torch.randint(1, sizes["vocab_size"], shape, device=team.device) for shape in (*prompts, *tokens, *tokens)]
    for name, make in ways_of(team, mesh, layers, sizes):
        names.append(name)
        try:
            model = make()
            with torch.no_grad():
                logits = model(draw[0], logits_to_keep=1).logits.float()
            wanted = logits if wanted is None else wanted
            away = distance(logits, wanted)
            assert away < LIMIT, f"relative RMS of logits {away:.3g}"
        except (ImportError, AttributeError, TypeError) as error:  # of a transformers without this plan
            for row in rows:
                row |= {name: None, f"{name}: reason": f"{type(error).__name__}: {error}".splitlines()[0]}
            continue
        for row, ids in zip(rows, draw, strict=True):
            row[name] = None
            try:
                row[name] = timed(model, team, row["what"], ids)
            except Exception as error:  # of a compiler or a capture: the row says so
                row[f"{name}: reason"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            if team.rank == 0:
                print(f"{name}, {row['what']}: {row[name] or row[f'{name}: reason']}", flush=True)
            write(file, team, "transformers", rows, transformers=transformers.__version__, layers=layers)
        del model
        if team.device.type == "cuda":
            torch.cuda.empty_cache()
            torch._dynamo.reset()
    if team.rank == 0:
        print(
            tell(f"Llama of {layers} layers, transformers {transformers.__version__}, W={team.size}, µs", rows, names)
        )
    return rows


def timed(model: Any, team: Any, what: str, ids: torch.Tensor) -> dict[str, float]:
    if what.startswith("prompt"):

        def forward() -> None:
            with torch.no_grad():
                model(ids, logits_to_keep=1, use_cache=False)

        return in_a_row(team, forward, calls=1, rounds=5)
    options = {"cache_implementation": "static"} if what.startswith("static") else {}
    return a_token(model, team, ids, **options)


def main(team: Any, layers: int, file: str | None) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (team.size,), mesh_dim_names=("tp",))["tp"]
    measure(team, mesh, layers, SIZES, (PROMPTS, TOKENS), Path(file) if file else None)


def command() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json")
    options = parser.parse_args()
    weft.launch(main, options.world_size, "cuda", args=(options.layers, options.json), heap_bytes=2 << 30)


if __name__ == "__main__":
    command()
