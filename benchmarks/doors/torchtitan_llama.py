"""torchtitan's Llama 3 of 8B layers with its fused tensor parallelism, on torch's ops and on weft: losses and tokens a second.

    PYTHONPATH=TITAN python -m benchmarks.doors.torchtitan_llama --world-size 2 --json RUNS/titan.json [--layers 4]

TITAN holds torchtitan 0.3.0, spmd_types 0.2.3, einops, tyro, typeguard, docstring_parser and shtab (`pip install --no-deps
--target TITAN`, 8 MB); what else torchtitan imports (datasets, torchdata, wandb, tensorboard, a class that torch 2.11 lacks)
has a stand-in here, since none of it is used. The model, its tensor parallelism (`tp_gemm_backend="dist_gemm"`, or "default")
and its loss are torchtitan's. The loop is this script's: generated tokens, bf16 weights, AdamW, no FSDP. A way that fails
says so in its row. Losses of 20 steps must be within 0.5 % of the losses without weft.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.doors.timing import counted_since, counts_of, write

STEPS, WARM_UP, LIMIT = 20, 6, 0.005
ABSENT = ("datasets", "torchdata", "wandb", "tensorboard", "torch.utils.tensorboard", "torch_checkpointing")


class StandIn(types.ModuleType):
    """Module whose every attribute is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == absent or name.startswith(f"{absent}.") for absent in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def complete_torch() -> None:
    """Give torch 2.11 the one name that torchtitan 0.3 imports from a newer torch, for FSDP."""
    from torch.distributed import fsdp

    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})  # type: ignore[attr-defined]


class Titan:
    """torchtitan's model over ranks, and a training step of it.

    on_weft  torch's fused ops run on weft for the group of its tensor parallelism
    """

    def __init__(self, flavor: str, layers: int, length: int, backend: str, device: torch.device, ranks: int) -> None:
        from torchtitan.components.loss import CrossEntropyLoss
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed import utils as distributed
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.llama3 import model_registry
        from torchtitan.models.llama3.config_registry import llama3_debugmodel_dist_gemm

        config = llama3_debugmodel_dist_gemm()
        config.parallelism.tensor_parallel_degree = ranks
        config.activation_checkpoint = None
        config.training.seq_len, config.training.local_batch_size = length, 1
        spec = model_registry(flavor, tp_gemm_backend=backend)
        spec.model.layers = spec.model.layers[:layers]
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        config.model_spec = spec
        self.dims = ParallelDims.from_config(config.parallelism, ranks)
        self.dims.build_mesh()
        distributed.set_spmd_backend(config.parallelism.spmd_backend)
        spec.model.update_from_config(config=config)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
        try:
            with torch.device("meta"):
                self.model = spec.model.build()
        finally:
            torch.set_default_dtype(before)
        self.model.parallelize(self.dims)
        self.model.to_empty(device=device)
        self.vocab_size, self.device, self.length = spec.model.vocab_size, device, length
        self.loss = CrossEntropyLoss.Config(global_vocab_size=self.vocab_size).build(compile_config=config.compile)
        self.context = distributed.get_spmd_context(parallel_dims=self.dims)
        self._draw_weights()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)

    def _draw_weights(self) -> None:
        """The same weights at each run. Ranks draw alike: what is replicated is equal, and shards are too."""
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(std=0.02)
            for module in self.model.modules():
                if hasattr(module, "_init_self_buffers"):
                    module._init_self_buffers(buffer_device=self.device)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of a step, which is taken."""
        from torchtitan.distributed.spmd_types import annotate_input_spmd_types

        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        inputs, labels, more = annotate_input_spmd_types(self.dims, inputs, labels, {})
        with self.context():
            predicted = self.model(inputs, **more)
            loss, _ = self.loss(predicted, labels, torch.tensor(self.length, device=self.device))
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss.detach()


def run(titan: Titan, settle: Callable[[], None], steps: int) -> tuple[list[float], float]:
    """(losses, tokens a second after the first steps) of generated tokens that repeat, so that there is something to learn."""
    generator = torch.Generator(titan.device).manual_seed(1)
    shape = (1, titan.length + 1)
    batches = [torch.randint(0, titan.vocab_size, shape, generator=generator, device=titan.device) for _ in range(2)]
    losses, begin = [], 0.0
    for number in range(steps):
        if number == min(WARM_UP, steps - 1):
            settle()
            begin = time.perf_counter()
        losses.append(titan.step(batches[number % len(batches)]))
    settle()
    seconds = time.perf_counter() - begin
    return [float(loss) for loss in losses], titan.length * (steps - min(WARM_UP, steps - 1)) / seconds


WAYS = ("default", "default", False), ("dist_gemm", "dist_gemm", False), ("weft", "dist_gemm", True)


def trained(team: Any, sizes: tuple[str, int, int], backend: str, on_weft: bool, steps: int) -> dict[str, Any]:
    """Losses, tokens a second of the slowest rank, and on weft what became of its eager calls in all steps."""
    from weft.integrations import torch as door

    titan = Titan(*sizes, backend, team.device, team.size)
    of_group, before = team, dict[str, int]()
    if on_weft:
        mesh = titan.dims.get_dense_tp_mesh()
        assert door.install(mesh), "weft does not serve the group of torchtitan's tensor parallelism"
        of_group = weft.Team.of(mesh)
        before = counts_of(of_group)
    try:
        losses, rate = run(titan, team.synchronize, steps)
    finally:
        door.uninstall()
    counts = counted_since(of_group, before) if on_weft else {}
    return {"losses": losses, "tokens_per_second": min(team.exchange(rate)), **counts}


def measure(team: Any, sizes: tuple[str, int, int], steps: int, file: Path | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, backend, on_weft in WAYS:
        try:
            row = trained(team, sizes, backend, on_weft, steps)
            rows.append({"what": name, **row})
            told = f"{row['tokens_per_second']:.0f} tokens/s, losses {row['losses'][0]:.4f} … {row['losses'][-1]:.4f}"
        except Exception as error:  # the other ways still run
            traceback.print_exc()
            told = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            rows.append({"what": name, "failed": told})
        if team.rank == 0:
            print(f"{name}: {told}", flush=True)
        write(file, team, "torchtitan", rows, flavor=sizes[0], layers=sizes[1], length=sizes[2])
        if team.device.type == "cuda":
            torch.cuda.empty_cache()
    default, theirs, ours = rows
    failed = [row["what"] for row in rows if "failed" in row]
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")
    apart = max(abs(one / other - 1) for one, other in zip(ours["losses"], theirs["losses"], strict=True))
    if team.rank == 0:
        gain, over_default = (ours["tokens_per_second"] / row["tokens_per_second"] for row in (theirs, default))
        print(f"losses within {apart:.2%}; weft over dist_gemm {gain:.3f}, over default {over_default:.3f}")
    assert apart <= LIMIT, f"losses differ by {apart:.2%}"
    return rows


def main(team: Any, sizes: tuple[str, int, int], steps: int, file: str | None) -> None:
    sys.meta_path.insert(0, StandIns())
    complete_torch()
    measure(team, sizes, steps, Path(file) if file else None)


def command() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--flavor", default="8B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--json")
    options = parser.parse_args()
    sizes = options.flavor, options.layers, options.length
    weft.launch(main, options.world_size, "cuda", args=(sizes, STEPS, options.json))


if __name__ == "__main__":
    command()
