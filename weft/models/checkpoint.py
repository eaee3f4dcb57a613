"""Checkpoint directory in Hugging Face format: config.json, and safetensors in one file or sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from os import PathLike
from pathlib import PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weft.errors import CheckpointError
from weft.models.files import as_directory, check_directory, check_regular, read_object
from weft.models.generation import GenerationDefaults
from weft.models.joined import Joined, joined_name, rows_in
from weft.models.multimodal import is_multimodal, is_of_text, text_config, text_name
from weft.parallel.sharding import Shard

# safetensors' names and torch's.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Of quantized tensors.
STORED = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int32: "I32"}
# Ends of names of tensors that hold scales.
SCALES = ("_scale", "_scale_inv")
# Of tensors that older checkpoints keep, and of the shapes of packed matrices.
SAID = ("rotary_emb.inv_freq", ".weight_shape")
# Of int4 weights whose columns are in another order.
COLUMN_ORDER = ".weight_g_idx"
COMPARED_ROWS = 8192
# Name of the embedding in a model that was saved without its head.
BARE, HEAD_INPUT = "embed_tokens.weight", "fc.weight"

Progress = Callable[[int, int], None]
"""progress(bytes that this rank has read, bytes that it will read)"""


class Checkpoint:
    """Read config.json at once; `load` opens each file of weights once, and reads only the given shards.

    Of a multimodal checkpoint this is the text model: its config.json, and its tensors by the names that its family has.

    CheckpointError, in one line, from the call that finds something missing, damaged or of another shape.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = as_directory(directory)
        check_directory(self.directory)
        if (self.directory / "adapter_config.json").exists():
            raise CheckpointError(
                f"{self.directory}: adapter_config.json names an adapter; pass its model, and this directory as an adapter "
                f"(docs/lora.md), or merge it into the weights"
            )
        content = self.read_json("config.json")
        self.is_multimodal, self.config = is_multimodal(content), text_config(content)
        self._tensors: dict[str, tuple[Any, str]] | None = None
        self._left_out: list[str] = []

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            return read_object(self.directory / name)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.directory}: no {name} in it, so it is not a Hugging Face checkpoint"
            ) from None

    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence token ids from generation_config.json, or else config.json; empty if there are none.

        So without both, where transformers' class of the family has ids that its ``generate`` does not use.
        """
        name, value = "generation_config.json", None
        if (self.directory / name).exists():
            value = self.read_json(name).get("eos_token_id")
        if value is None:
            name, value = "config.json", self.config.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise CheckpointError(
                f"{self.directory / name}: eos_token_id={value!r} is not a token id or a list of them"
            )
        return frozenset(ids)

    def generation_defaults(self) -> GenerationDefaults:
        """Sampling defaults from generation_config.json, or else config.json, as in transformers 4.x."""
        name = "generation_config.json"
        there = (self.directory / name).exists()
        return GenerationDefaults.from_dict(self.read_json(name) if there else self.config, legacy=not there)

    def dtype(self) -> str:
        """torch's name for the data type of the first weight that is not quantized."""
        for name in self._files():
            if not name.endswith(SCALES) and (dtype := self._slice(name).get_dtype()) in DTYPES:
                return DTYPES[dtype]
        raise CheckpointError(
            f"{self.directory}: no tensor of {', '.join(DTYPES)} in it; take one that was not quantized"
        )

    def differ(self, one: str, other: str) -> bool:
        """True if both tensors exist and are not equal. Reads them, a part at a time."""
        files = self._files()
        if one not in files or other not in files:
            return False
        parts = [self._slice(name) for name in (one, other)]
        if parts[0].get_shape() != parts[1].get_shape() or parts[0].get_dtype() != parts[1].get_dtype():
            return True
        starts = range(0, (parts[0].get_shape() or [0])[0], COMPARED_ROWS)
        return not all(torch.equal(*(part[start : start + COMPARED_ROWS] for part in parts)) for start in starts)

    def has(self, name: str) -> bool:
        """True if there is a tensor of this name."""
        return name in self._files()

    def has_any(self, end: str) -> bool:
        """True if there is a tensor whose name ends so."""
        return any(name.endswith(end) for name in self._files())

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor of this name, on the host."""
        file, stored = self._files()[name]
        return file.get_tensor(stored)

    def unused(self, names: Collection[str], joined: Collection[Joined] = ()) -> list[str]:
        """Names of tensors in the checkpoint beside `names`, without what configurations say as well."""
        used = {self._holder(name, joined) for name in names}
        return [name for name in self._files() if name not in used and not name.endswith(SAID)]

    def left_out(self) -> list[str]:
        """Names of tensors beside a multimodal checkpoint's text model."""
        self._files()
        return self._left_out

    def _slice(self, name: str) -> Any:
        file, stored = self._files()[name]
        return file.get_slice(stored)

    def _holder(self, name: str, joined: Collection[Joined]) -> str:
        """Name of the tensor in the checkpoint that has the rows of this one."""
        return name if name in self._files() else joined_name(name, joined) or name

    def load(
        self, shards: Mapping[str, Shard], progress: Progress | None = None, joined: Collection[Joined] = ()
    ) -> list[str]:
        """Fill every shard from the tensor of its name, and return names of tensors with NaN or infinities.

        joined  rules for tensors that hold several matrices, used where a tensor of its name is missing

        Only parts on this rank count. Tensors without a shard are ignored.
        """
        files = self._files()
        if ordered := next((name for name in files if name.endswith(COLUMN_ORDER)), None):
            raise CheckpointError(
                f"{self.directory}: tensor {ordered} gives columns in another order (actorder), which weft does not run; "
                f"take a checkpoint without it"
            )
        sizes = {name: sum(target.nbytes for target in shard.targets) for name, shard in shards.items()}
        total = sum(sizes.values())
        done = 0
        sums: list[torch.Tensor] = []
        for name, shard in shards.items():
            holder = self._holder(name, joined)
            if holder not in files:
                raise CheckpointError(f"{self.directory}: tensor {holder} is missing; the checkpoint is not complete")
            tensor = self._slice(holder)
            if holder != name:
                try:
                    tensor = rows_in(tensor, name, joined, shards)
                except CheckpointError as error:
                    raise CheckpointError(f"{self.directory}: {error}") from None
            shape = tuple(tensor.get_shape())
            if not shard.fits(shape):
                raise CheckpointError(
                    f"{self.directory}: tensor {name} has shape {shape}, but config.json asks for {shard.shape}"
                )
            self._check_dtype(name, tensor.get_dtype(), shard)
            shard.copy_from(tensor)
            # NaN or infinite if a summand is. The host reads it at the end, so a GPU sums while it copies.
            sums.append(torch.stack([_sum(target) for target in shard.targets]).sum())
            done += sizes[name]
            if progress is not None:
                progress(done, total)
        odd = torch.stack(sums).isfinite().logical_not().tolist() if sums else []
        # Finite values can have an infinite sum.
        return [
            name
            for name, odd in zip(shards, odd, strict=True)
            if odd and not all(map(_is_finite, shards[name].targets))
        ]

    def _check_dtype(self, name: str, dtype: str, shard: Shard) -> None:
        """CheckpointError unless a shard can be filled from a tensor of this dtype, by safetensors' name."""
        if shard.stored is None and dtype not in DTYPES:
            raise CheckpointError(
                f"{self.directory}: tensor {name} is of {dtype}, so it has been quantized; weft reads {', '.join(DTYPES)}, and "
                f"{', '.join(STORED.values())} where quantization_config says so"
            )
        if shard.stored is not None and dtype != STORED[shard.stored]:
            raise CheckpointError(
                f"{self.directory}: tensor {name} is of {dtype}, but quantization_config of config.json says that it is of "
                f"{STORED[shard.stored]}; name its module there among the ones that are not quantized"
            )

    def _files(self) -> dict[str, tuple[Any, str]]:
        """Name of a tensor → the open file with it, and its name there."""
        if self._tensors is None:
            self._tensors = self._open_files()
        return self._tensors

    def weight_files(self) -> list[str]:
        """Names of the files of weights, also of missing ones; [] without the usual file and its index."""
        # transformers prefers the single file.
        if (self.directory / "model.safetensors").exists():
            return ["model.safetensors"]
        if not (self.directory / "model.safetensors.index.json").exists():
            return []
        weight_map = self.read_json("model.safetensors.index.json").get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(
                f"{self.directory}: model.safetensors.index.json has no weight_map; download it again"
            )
        if wrong := [name for name in weight_map.values() if not isinstance(name, str)]:
            raise CheckpointError(
                f"{self.directory}: model.safetensors.index.json has {wrong[0]!r} for a file's name; download it again"
            )
        if outside := [name for name in weight_map.values() if not _is_inside(name)]:
            raise CheckpointError(
                f"{self.directory}: model.safetensors.index.json names {outside[0][:200]!r}, which is not in this "
                f"directory; a checkpoint's weights lie beside its index"
            )
        return sorted(set(weight_map.values()))

    def _open_files(self) -> dict[str, tuple[Any, str]]:
        names = self.weight_files()
        if not names:
            raise CheckpointError(f"{self.directory}: no model.safetensors and no model.safetensors.index.json in it")
        tensors: dict[str, tuple[Any, str]] = {}
        for opened in map(self._open, names):
            for stored in opened.keys():  # noqa: SIM118
                name = text_name(stored)
                if self.is_multimodal and not is_of_text(name):
                    self._left_out.append(stored)
                else:
                    tensors[name] = opened, stored
        # A draft's head over hidden states, which may have an embedding too, has this matrix.
        is_bare = BARE in tensors and HEAD_INPUT not in tensors
        return _with_head(tensors) if is_bare else tensors

    def _open(self, name: str) -> Any:
        path = self.directory / name
        try:
            check_regular(path)
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"{self.directory}: {name} is missing, though the index names it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or damaged ({error}); download it again") from None


def _with_head(tensors: Mapping[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """Tensors of a model that was saved without its head, by the names of the whole model.

    Embedding models are saved so. The head is the embedding, as of models whose weights are tied.
    """
    named = {name if name.startswith("lm_head.") else f"model.{name}": at for name, at in tensors.items()}
    return {"lm_head.weight": tensors[BARE], **named}


def _sum(x: torch.Tensor) -> torch.Tensor:
    """fp32 sum of all elements; of e4m3, which has no infinity, NaN or 0; of 4 bits 0."""
    if x.dtype == torch.uint8:
        return x.new_zeros((), dtype=torch.float32)
    if x.dtype != torch.float8_e4m3fn:
        return x.sum(dtype=torch.float32)
    is_nan = ((x.view(torch.uint8) & 0x7F) == 0x7F).any()
    return torch.where(is_nan, torch.nan, 0.0)


def _is_finite(x: torch.Tensor) -> bool:
    return bool((_sum(x) if x.dtype == torch.float8_e4m3fn else x).isfinite().all())


def _is_inside(name: str) -> bool:
    """True for a name that stays in its directory. It may be a link out of it, as in a hub's cache."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
