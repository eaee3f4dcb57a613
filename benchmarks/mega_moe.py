"""DeepGEMM's MegaMoE for Hopper beside weft's mixture of experts: a whole layer in fp8, the ranks with tokens of their own.

    PYTHONPATH=PACKAGES python -m benchmarks.mega_moe --world-size 2 --json RUNS/megamoe.json [MODEL:TOKENS,… …] [--once]

PACKAGES holds sgl-deep-gemm 0.1.5.post1 with apache-tvm-ffi 0.1.11 (5 MB). It compiles its kernels by nvcc at the first call, a
kernel for each model, number of ranks and of tokens; --once calls each once and times nothing, so that several such runs at the
same time compile for a run after them. It needs torch's symmetric memory, outside of torch's pool
(TORCH_SYMMMEM_IMPLICIT_POOL=0, as benchmarks/peers.sh sets it), and neither NVSHMEM nor multicast.

A layer is the router's GEMM, the choice of k experts, and the experts; x is in bf16. Weights have scales of 128 x 128 blocks;
MegaMoE rounds rows between the GEMMs by groups of 64 columns, weft by groups of 128. Up to MOST_EXACT tokens the results are
compared with the dequantized layer in fp32, beyond with each other. Times are of calls in a row in CUDA graphs, then eager.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import weft
from benchmarks.doors.timing import captured, distance, in_a_row
from weft import ops
from weft.bench.harness import machine
from weft.bench.ops.moe_shapes import MIXTURES, Mixture
from weft.kernels.fp8 import E4M3, Fp8
from weft.parallel.mixture import moe
from weft.runtime.files import put

SHAPES = "qwen3-30b-a3b:128,4096", "deepseek-v3:128,4096"
CALLS = 4
MOST_EXACT = 512
LIMIT = 0.08  # relative RMS: bytes of e4m3 keep 3 bits of fraction, of x and of rows between the GEMMs


class Layer(NamedTuple):
    """This rank's tokens and experts of one shape."""

    mixture: Mixture
    x: torch.Tensor
    router: torch.Tensor
    gate_up: Fp8
    down: Fp8

    def routing(self) -> ops.Routing:
        return ops.route(self.x @ self.router.T, self.mixture.k)


def drawn(shape: tuple[int, int, int], generator: torch.Generator) -> Fp8:
    """Experts' weights whose results have about the variance of their inputs."""
    held, N, K = shape
    make = {"device": generator.device, "generator": generator}
    data = torch.empty(shape, dtype=E4M3, device=generator.device)
    for expert in range(held):  # one by one: in fp32 all would not fit
        data[expert] = (torch.randn((N, K), **make) * 16).to(E4M3)
    scales = (0.5 + torch.rand((held, N // 128, K // 128), **make)) * K**-0.5 / 16
    return Fp8(data, scales)


def layer_of(team: Any, mixture: Mixture, tokens: int, weights: tuple[Fp8, Fp8]) -> Layer:
    generator = torch.Generator(team.device).manual_seed(1 + team.rank)
    x = torch.randn((tokens, mixture.hidden), device=team.device, generator=generator).bfloat16()
    shared = torch.Generator(team.device).manual_seed(0)
    router = torch.randn((mixture.experts, mixture.hidden), device=team.device, generator=shared) * mixture.hidden**-0.5
    return Layer(mixture, x, router.bfloat16(), *weights)


def by_weft(team: Any, layer: Layer) -> Callable[[], torch.Tensor]:
    given = layer.x, layer.router, layer.gate_up, layer.down, team
    return lambda: moe(*given, k=layer.mixture.k, max_tokens=len(layer.x))


def by_deep_gemm(team: Any, layer: Layer) -> Callable[[], torch.Tensor]:
    import deep_gemm

    x, mixture = layer.x, layer.mixture
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
        team.group, mixture.experts, len(x), mixture.k, mixture.hidden, mixture.features
    )
    if buffer.handle.buffer_ptrs[team.rank] != buffer.buffer.data_ptr():
        raise RuntimeError("its buffer is a part of an allocation of torch's pool; set TORCH_SYMMMEM_IMPLICIT_POOL=0")
    # As bytes: torch may lack a copy of e4m3.
    first = layer.gate_up.data.view(torch.uint8), layer.gate_up.scales
    (mixed, scales), down = deep_gemm.transform_weights_for_mega_moe_sm90(first, (layer.down.data, layer.down.scales))
    gate_up, out = (mixed.view(E4M3), scales), torch.empty_like(x)

    def call() -> torch.Tensor:
        ids, weights = layer.routing()
        into = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
        deep_gemm.mega_moe_pre_dispatch_sm90(x, ids, weights.float(), *into, num_tokens=len(x))
        deep_gemm.fp8_mega_moe(out, gate_up, down, buffer)
        return out

    return call


def dequantized(weight: Fp8, expert: int) -> torch.Tensor:
    scales = weight.scales[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.data[expert].float() * scales


def expected(team: Any, layer: Layer) -> torch.Tensor:
    """This rank's rows of the layer in fp32: each rank computes its experts' summands for all tokens."""
    ids, weights = layer.routing()
    rows, chosen, factors = (gathered(team, one) for one in (layer.x.float(), ids, weights.float()))
    out = torch.zeros_like(rows)
    held = len(layer.gate_up.data)
    for expert in range(held):
        token, choice = (chosen == team.rank * held + expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = (rows[token] @ dequantized(layer.gate_up, expert).T).chunk(2, 1)
            y = (torch.nn.functional.silu(gate) * up) @ dequantized(layer.down, expert).T
            out.index_add_(0, token, y * factors[token, choice, None])
    return summed(team, out).chunk(team.size)[team.rank]


def gathered(team: Any, x: torch.Tensor) -> torch.Tensor:
    whole = x.new_empty((team.size * len(x), *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x.contiguous(), group=team.group)
    return whole


def summed(team: Any, x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x, group=team.group)
    return x


WAYS = {"weft": by_weft, "megamoe": by_deep_gemm}


def measured(team: Any, layer: Layer, name: str, wanted: torch.Tensor | None, once: bool) -> tuple[dict, torch.Tensor]:
    """(the row's times and distance, the result). ``wanted``: None for the first of two that are compared with each other."""
    call = WAYS[name](team, layer)
    out = call().clone()
    team.synchronize()
    away = max(team.exchange(0.0 if wanted is None else distance(out, wanted)))
    if not away < LIMIT:
        raise ValueError(f"relative RMS {away:.3g} of {name}'s result, more than {LIMIT}")
    row = {"away": round(away, 4)}
    return row if once else {**row, "graph": captured(team, call, CALLS), "eager": in_a_row(team, call, CALLS)}, out


def of_shape(team: Any, layer: Layer, once: bool) -> dict[str, dict[str, Any]]:
    exact = len(layer.x) <= MOST_EXACT
    wanted, rows = expected(team, layer) if exact else None, {}
    for name in WAYS:
        try:
            rows[name], out = measured(team, layer, name, wanted, once)
            wanted = out if wanted is None else wanted
        except Exception as error:  # the other way still runs
            traceback.print_exc()
            rows[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        if team.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main(team: Any, words: list[str], once: bool, file: str | None) -> None:
    document: dict[str, Any] = {"where": machine.describe(team), "limit": LIMIT, "rows": []}
    for word in words:
        model, _, tokens = word.partition(":")
        mixture = MIXTURES[model]
        held = mixture.experts // team.size
        generator = torch.Generator(team.device).manual_seed(100 + team.rank)
        hidden, features = mixture.hidden, mixture.features
        weights = drawn((held, 2 * features, hidden), generator), drawn((held, hidden, features), generator)
        for count in map(int, tokens.split(",")):
            rows = of_shape(team, layer_of(team, mixture, count, weights), once)
            for name, row in rows.items():
                document["rows"].append({"model": model, "tokens": count, "way": name, **row})
                if team.rank == 0:
                    print(document["rows"][-1], flush=True)
            if file is not None and team.rank == 0:
                put(Path(file), json.dumps(document, indent=1) + "\n")
        del weights
    if failed := [row for row in document["rows"] if "failed" in row]:
        raise RuntimeError(f"{len(failed)} of {len(document['rows'])} rows failed")


def command() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    args = list(options.shapes), options.once, options.json
    weft.launch(main, options.world_size, "cuda", args=args, heap_bytes=4 << 30)


if __name__ == "__main__":
    command()
