"""Adapters (LoRA) of matrices, as peft saves them: adapter_config.json, adapter_model.safetensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.layers import TPMLP, TPAttention
from weft.models.family import WeightNames
from weft.models.files import check_regular, read_object
from weft.models.joined import Joined
from weft.ops.gemm.add_adapters import RANKS
from weft.parallel.linear import ColumnParallelLinear, RowParallelLinear
from weft.parallel.tensors import Lora

if TYPE_CHECKING:
    from weft.parallel.sharding import Shard

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Keys of adapter_config.json that change nothing of what an adapter computes, or that its tensors say too.
WITHOUT_EFFECT = frozenset((
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "task_type",
))  # fmt: skip
# Initial weights that leave the base as it is.
PLAIN_BEGINS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter's tensors by their names in a checkpoint, without ".weight": (A [r, K], B [N, r]).

    used  names that a decoder has taken
    """

    name: str
    directory: Path
    scale: float
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    used: set[str] = field(default_factory=set)

    @property
    def rank(self) -> int:
        return max((len(a) for a, _ in self.pairs.values()), default=0)

    def pair(
        self, prefix: str, matrix: str, shapes: Mapping[str, tuple[int, ...]], joined: Collection[Joined]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(A, B) of a matrix below `prefix`, also of rows of a joined one; None: it has no adapter.

        shapes  of the whole matrices below the prefix, by name
        """
        rows, K = shapes[matrix]
        if (pair := self.pairs.get(f"{prefix}.{matrix}")) is not None:
            self._check(f"{prefix}.{matrix}", pair, rows, K)
            self.used.add(f"{prefix}.{matrix}")
            return pair
        for rule in joined:
            if matrix in rule.parts and (pair := self.pairs.get(f"{prefix}.{rule.name}")) is not None:
                sizes = [shapes[part][0] for part in rule.parts]
                self._check(f"{prefix}.{rule.name}", pair, sum(sizes), K)
                self.used.add(f"{prefix}.{rule.name}")
                first = sum(sizes[: rule.parts.index(matrix)])
                return pair[0], pair[1][first : first + rows]
        return None

    def _check(self, name: str, pair: tuple[torch.Tensor, torch.Tensor], rows: int, columns: int) -> None:
        a, b = (tuple(x.shape) for x in pair)
        if a != (b[-1], columns) or b != (rows, a[0]):
            raise CheckpointError(
                f"{self.directory}: adapter of {name}: A has shape {a} and B {b}, and the model's matrix is "
                f"{(rows, columns)}; take the model that it was trained over"
            )


def read_adapter(name: str, directory: str | PathLike[str]) -> Adapter:
    """Adapter of a directory. CheckpointError for one that computes something else than weft does."""
    path = Path(directory)
    try:
        config = read_object(path / CONFIG)
        check_regular(path / TENSORS)
        tensors = load_file(path / TENSORS)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"lora {quoted(name)}: {path} has no {Path(error.filename or CONFIG).name}; pass a directory that peft has "
            f"saved, with {CONFIG} and {TENSORS}"
        ) from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path / TENSORS}: truncated or damaged ({error}); save it again") from None
    scale = scale_of(path, config)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for stored, tensor in tensors.items():
        matrix, _, kind = stored.removesuffix(".weight").rpartition(".")
        if kind not in ("lora_A", "lora_B") or tensor.dim() != 2 or not tensor.is_floating_point():
            raise CheckpointError(
                f"{path}: tensor {stored} is no lora_A or lora_B of a matrix, and weft applies nothing else; train without it"
            )
        pairs.setdefault(matrix.removeprefix("base_model.model."), {})[kind] = tensor
    if half := next((matrix for matrix, pair in pairs.items() if len(pair) < 2), None):
        raise CheckpointError(f"{path}: {half} has only one of lora_A and lora_B; save the adapter again")
    both = {matrix: (pair["lora_A"], pair["lora_B"]) for matrix, pair in pairs.items()}
    for matrix, pair in both.items():
        _check_pair(path, matrix, pair, config["r"])
    adapter = Adapter(name=name, directory=path, scale=scale, pairs=both)
    if not 0 < adapter.rank <= RANKS[-1]:
        raise CheckpointError(f"{path}: the adapter has rank {adapter.rank}; weft takes 1 to {RANKS[-1]}")
    return adapter


def _check_pair(path: Path, matrix: str, pair: tuple[torch.Tensor, torch.Tensor], rank: int) -> None:
    """CheckpointError for A and B that contradict a configuration, or are damaged."""
    if len(pair[0]) != rank:
        raise CheckpointError(
            f"{path}: lora_A of {matrix} has {len(pair[0])} rows, but {CONFIG} says r={rank}, by which B @ A is scaled; save "
            f"the adapter again"
        )
    if not all(x.float().isfinite().all() for x in pair):
        raise CheckpointError(f"{path}: the adapter of {matrix} has NaN or infinities; save it again")


def scale_of(path: Path, config: Mapping[str, Any]) -> float:
    """Factor of B @ A by a configuration. CheckpointError for keys that ask for anything else."""
    given = {key: value for key, value in config.items() if value not in (None, False, "", [], {})}
    kind, bias = given.pop("peft_type", "LORA"), given.pop("bias", "none")
    begin = given.pop("init_lora_weights", True)
    r, alpha, root = given.pop("r", None), given.pop("lora_alpha", 0), given.pop("use_rslora", False)
    for key, value, allowed in (
        ("peft_type", kind, ("LORA",)),
        ("bias", bias, ("none",)),
        ("init_lora_weights", begin, PLAIN_BEGINS),
    ):
        if value not in allowed:
            raise CheckpointError(f"{path / CONFIG}: {key}={quoted(value)} is not supported; weft runs {allowed[0]!r}")
    if type(r) is not int or r < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise CheckpointError(
            f"{path / CONFIG}: r={quoted(r)} and lora_alpha={quoted(alpha)} are no rank and no number"
        )
    if other := next((key for key in given if key not in WITHOUT_EFFECT), None):
        raise CheckpointError(
            f"{path / CONFIG}: {other}={quoted(given[other])} changes what the adapter computes, and weft does not run it; "
            f"train without it"
        )
    return alpha / (math.sqrt(r) if root else r)


def load_adapters(
    directories: Mapping[str, str | PathLike[str]],
    layers: Iterable[tuple[int, nn.Module]],
    names: WeightNames,
    *,
    dtype: torch.dtype,
    whole: bool,
) -> None:
    """Give layers adapters, numbered in this order. CheckpointError for what weft does not run.

    layers  by index; whole: these are all of the model
    dtype   of the adapters, that of activations
    """
    adapters = [read_adapter(name, directory) for name, directory in directories.items()]
    for index, layer in layers:
        prefix = f"{names.layers}.{index}"
        if isinstance(attention := layer.self_attn, TPAttention) and not attention.gated:
            parts = attention.qkv_proj, attention.o_proj
            _fill(f"{prefix}.{names.attention}", attention.shards(), parts, adapters, names.joined, dtype)
        if isinstance(mlp := layer.mlp, TPMLP):
            parts = mlp.gate_up_proj, mlp.down_proj
            _fill(f"{prefix}.{names.mlp}", mlp.shards(), parts, adapters, names.joined, dtype)
    for adapter in adapters:
        left = [matrix for matrix in adapter.pairs if matrix not in adapter.used]
        if left and (whole or not adapter.used):
            raise CheckpointError(
                f"{adapter.directory}: the adapter changes {left[0]}, and weft adds adapters to q_proj, k_proj, v_proj, "
                f"o_proj, gate_proj, up_proj and down_proj of dense layers; train without it"
            )


def _fill(
    prefix: str,
    shards: Mapping[str, Shard],
    layers: Sequence[ColumnParallelLinear | RowParallelLinear],
    adapters: Sequence[Adapter],
    joined: Collection[Joined],
    dtype: torch.dtype,
) -> None:
    """Set `lora` of layers whose matrices lie below a prefix; None where no adapter changes them."""
    for layer in layers:
        parts = list(_parts(layer, shards))
        shapes = {part.name: part.shape for part in parts}
        of_adapters = [[adapter.pair(prefix, part.name, shapes, joined) for part in parts] for adapter in adapters]
        if all(pair is None for pairs in of_adapters for pair in pairs):
            layer.lora = None
            continue
        N, K = layer.matrix.shape
        rank = next(rank for rank in RANKS if rank >= max(adapter.rank for adapter in adapters))
        A = layer.weight.new_zeros(len(adapters), len(parts) * rank, K, dtype=dtype)
        B = layer.weight.new_zeros(len(adapters), N, rank, dtype=dtype)
        for pairs, *of_adapter in zip(of_adapters, A, B, strict=True):
            _fill_adapter(*of_adapter, rank, parts, pairs)
        scale = torch.tensor([adapter.scale for adapter in adapters], dtype=torch.float32, device=A.device)
        layer.lora = Lora(A, B, scale, tuple(part.first + part.size for part in parts))


class Part(NamedTuple):
    """Matrix of a checkpoint in a layer's weight.

    first, size    its rows here
    shape          of the whole matrix
    rows, columns  of the whole matrix that are here
    order          of these rows; None: as in the checkpoint
    """

    name: str
    first: int
    size: int
    shape: tuple[int, int]
    rows: slice
    columns: slice
    order: torch.Tensor | None = None


def _parts(layer: ColumnParallelLinear | RowParallelLinear, shards: Mapping[str, Shard]) -> Iterator[Part]:
    """Matrices in a layer's weight, whose rows lie as its shards say."""
    if isinstance(layer, RowParallelLinear):
        rows, begin = len(layer.weight), layer.team.rank * layer.local
        columns = slice(begin, begin + layer.local)
        yield Part(layer.name, 0, rows, (rows, layer.in_features), slice(None), columns)
        return
    first = 0
    for name, rows in layer.parts.items():
        shard = shards.get(f"{name}.weight")  # None: stored in 4 bits, without another order
        here = slice(rows.start, rows.start + rows.size)
        shape = rows.total, layer.in_features
        yield Part(name, first, rows.size, shape, here, slice(None), None if shard is None else shard.order)
        first += rows.size


def _fill_adapter(
    A: torch.Tensor,
    B: torch.Tensor,
    rank: int,
    parts: Sequence[Part],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
) -> None:
    """Fill A [P * rank, K] and B [N, rank] of one adapter by the pairs of P matrices, None: zeros."""
    for number, (part, pair) in enumerate(zip(parts, pairs, strict=True)):
        if pair is not None:
            a, b = pair[0][:, part.columns], pair[1][part.rows]
            A[number * rank : number * rank + len(a)] = a.to(A)
            b = b if part.order is None else b[part.order.to(b.device)]
            B[part.first : part.first + part.size, : b.shape[1]] = b.to(B)
