"""A Llama of transformers over ranks: its own plan, the plan on weft, and weft.layers.replace, with torch.compile and without.

    python -m benchmarks.doors.transformers_llama --world-size 2 --json RUNS/transformers.json [--layers 8] [--seconds 200]
        [--ways "replace" "replace, compiled"] [--kinds static captured]

Random weights, bf16, greedy. `prompt`: a forward pass. `step`: one token over a static cache, eager; `captured` the same in a
CUDA graph of this script's. `token`: a token of generate() after the first one, with a growing cache; `static` with a static
cache, whose steps transformers compiles and captures. What compiles comes last, and nothing begins after --seconds. A way that
fails, by its transformers, compiler or capture, has the reason in its row. Logits are compared with the first way's. Rows name
the eager calls of overlapped ops in them that were replayed, and that were launched.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers

import weft
from benchmarks.doors.timing import Times, captured, counted_since, counts_of, distance, in_a_row, tell, write

SIZES = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
PROMPTS, TOKENS = ((8, 2048), (1, 2048)), ((1, 128), (8, 1024))  # batch and length
NEW, REPEATS = 32, 3
CALLS = 4  # decode steps in a row; each takes a place of the cache
PLACES = 128  # of the cache, for the steps of a row
LIMIT = 0.05  # relative RMS of logits in bf16


def model_of(team: Any, layers: int, sizes: dict[str, Any]) -> Any:
    """The model with the same random weights on every rank."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, attn_implementation="sdpa")
    with torch.device(team.device):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def over(model: Any, mesh: Any) -> Any:
    """The model by tp_plan="auto", as from_pretrained makes it."""
    from transformers.distributed import DistributedConfig

    distribute = model.maybe_distribute_model
    managed = "mesh_manager" in inspect.signature(distribute).parameters  # since 5.23
    given = SimpleNamespace(get_mesh=lambda names: mesh) if managed else mesh
    return distribute(model, DistributedConfig(tp_size=mesh.size(), tp_plan="auto"), given)


def planned(team: Any, mesh: Any, layers: int, sizes: dict[str, Any]) -> Any:
    return over(model_of(team, layers, sizes), mesh)


def planned_on_weft(team: Any, mesh: Any, layers: int, sizes: dict[str, Any]) -> Any:
    import weft.integrations.transformers as door

    door.install()
    try:
        return planned(team, mesh, layers, sizes)
    finally:
        door.uninstall()


def replaced(team: Any, mesh: Any, layers: int, sizes: dict[str, Any]) -> Any:
    model = model_of(team, layers, sizes)
    weft.layers.replace(model, team)
    return model


def compiled(team: Any, mesh: Any, layers: int, sizes: dict[str, Any]) -> Any:
    model = replaced(team, mesh, layers, sizes)
    model.forward = torch.compile(model.forward, dynamic=False)
    return model


class Way(NamedTuple):
    """A way to run the model, and the kinds of rows that are timed of it together."""

    name: str
    make: Callable[..., Any]
    kinds: Sequence[str]


EAGER = ("prompt", "step", "captured", "token")
WAYS = (
    Way("tp_plan", planned, EAGER),
    Way("tp_plan on weft", planned_on_weft, EAGER),
    Way("replace", replaced, EAGER),
    Way("tp_plan, again", planned, ("prompt", "step", "token")),  # how far this host's times differ
    Way("replace, compiled", compiled, ("prompt", "step", "captured")),
    Way("tp_plan", planned, ("static",)),
    Way("tp_plan on weft", planned_on_weft, ("static",)),
    Way("replace", replaced, ("static",)),
)


def a_token(model: Any, team: Any, ids: torch.Tensor, **options: Any) -> Times:
    """Microseconds of a token after the first: of NEW + 1 tokens less that of one, by NEW; medians."""
    seconds: dict[int, list[float]] = {1: [], 1 + NEW: []}
    before: dict[str, int] = {}
    for repeat in range(REPEATS + 1):
        for new, taken in seconds.items():
            if repeat == 1 and new == 1:
                before = counts_of(team)
            team.barrier()
            begin = time.perf_counter()
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options)
            team.synchronize()
            if repeat:
                taken.append(time.perf_counter() - begin)
    first, all_of_them = (max(team.exchange(statistics.median(taken))) for taken in seconds.values())
    us = (all_of_them - first) / NEW * 1e6
    return {"us": us, "host_us": us, "first_us": first * 1e6, **counted_since(team, before)}


class Rows:
    """Rows of the table by kind and shape, and what is in the file already.

    until  time.perf_counter() of rank 0 after which nothing begins; None: no limit
    """

    def __init__(self, team: Any, shapes: dict[str, Sequence[tuple[int, int]]], until: float | None) -> None:
        self.team, self.until, self.names = team, until, []
        self.rows: list[dict[str, Any]] = []
        self.cases = []
        for kind, of in shapes.items():
            for shape in of:
                self.rows.append({"what": f"{kind} {shape[0]}x{shape[1]}"})
                self.cases.append((kind, shape, self.rows[-1]))

    def has_time(self) -> bool:
        return self.until is None or self.team.exchange(time.perf_counter() < self.until)[0]

    def put(self, row: dict[str, Any], way: str, times: Times | None, reason: str | None = None) -> None:
        row[way] = times
        if reason is not None:
            row[f"{way}: reason"] = reason
        if self.team.rank == 0:
            print(f"{way}, {row['what']}: {times or reason}", flush=True)


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def measure(
    team: Any, mesh: Any, model_sizes: tuple[int, dict[str, Any]], ways: Sequence[Way], table: Rows, file: Path | None
) -> list[dict]:
    """All rows by ``ways``. model_sizes: number of layers, and the rest of the config."""
    layers, sizes = model_sizes
    generator = torch.Generator(team.device).manual_seed(1)
    draw = {
        shape: torch.randint(1, sizes["vocab_size"], shape, generator=generator, device=team.device)
        for _, shape, _ in table.cases
    }
    wanted = None
    for way in ways:
        cases = [case for case in table.cases if case[0] in way.kinds]
        if not cases:
            continue
        if way.name not in table.names:
            table.names.append(way.name)
            for row in table.rows:
                row[way.name] = None
        try:
            if not table.has_time():
                raise TimeoutError("no time was left")
            model = way.make(team, mesh, layers, sizes)
            with torch.no_grad():
                logits = model(next(iter(draw.values())), logits_to_keep=1).logits.float()
            wanted = logits if wanted is None else wanted
            away = distance(logits, wanted)
            assert away < LIMIT, f"relative RMS of logits {away:.3g}"
        except Exception as error:  # a transformers without this plan, or a compiler: the other ways still run
            for _, _, row in cases:
                table.put(row, way.name, None, said(error))
            cases = []
        for kind, shape, row in cases:
            try:
                if not table.has_time():
                    raise TimeoutError("no time was left")
                table.put(row, way.name, KINDS[kind](model, team, draw[shape]))
            except Exception as error:  # of a compiler or a capture
                table.put(row, way.name, None, said(error))
            write(file, team, "transformers", table.rows, transformers=transformers.__version__, layers=layers)
        model = None
        if team.device.type == "cuda":
            torch.cuda.empty_cache()
            torch._dynamo.reset()
    write(file, team, "transformers", table.rows, transformers=transformers.__version__, layers=layers)
    if team.rank == 0:
        title = f"Llama of {layers} layers, transformers {transformers.__version__}, W={team.size}, µs"
        print(tell(title, table.rows, table.names))
    return table.rows


def prompt(model: Any, team: Any, ids: torch.Tensor) -> Times:
    def forward() -> None:
        with torch.no_grad():
            model(ids, logits_to_keep=1, use_cache=False)

    return in_a_row(team, forward, calls=1, rounds=5)


def step_of(model: Any, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A decode step over a static cache that holds ``ids``; each call takes one more place of it."""
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"  # since 5.24
    cache = transformers.StaticCache(config=model.config, max_cache_len=ids.shape[1] + PLACES)
    last = ids[:, :1].contiguous()
    with torch.no_grad():
        type(model).forward(model, ids, logits_to_keep=1, **{name: cache})

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(last, logits_to_keep=1, **{name: cache}).logits

    return step


def step(model: Any, team: Any, ids: torch.Tensor) -> Times:
    return in_a_row(team, step_of(model, ids), calls=CALLS)


def captured_step(model: Any, team: Any, ids: torch.Tensor) -> Times | None:
    return captured(team, step_of(model, ids), calls=CALLS)


KINDS: dict[str, Callable[[Any, Any, torch.Tensor], Times | None]] = {
    "prompt": prompt,
    "step": step,
    "captured": captured_step,
    "token": a_token,
    "static": lambda model, team, ids: a_token(model, team, ids, cache_implementation="static"),
}


def main(team: Any, options: argparse.Namespace) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (team.size,), mesh_dim_names=("tp",))["tp"]
    shapes = {kind: PROMPTS if kind == "prompt" else TOKENS for kind in KINDS if kind in options.kinds}
    table = Rows(team, shapes, None if options.seconds is None else time.perf_counter() + options.seconds)
    ways = [way for way in WAYS if way.name in options.ways]
    measure(team, mesh, (options.layers, SIZES), ways, table, Path(options.json) if options.json else None)


def command() -> None:
    names = [*dict.fromkeys(way.name for way in WAYS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=names, default=names, help="ways to run the model")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="rows")
    parser.add_argument("--seconds", type=float, help="after which nothing begins")
    parser.add_argument("--json")
    options = parser.parse_args()
    weft.launch(main, options.world_size, "cuda", args=(options,), heap_bytes=2 << 30)


if __name__ == "__main__":
    command()
