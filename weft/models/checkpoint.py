"""A checkpoint directory in Hugging Face format: config.json, and safetensors in one file or sharded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from weft.errors import CheckpointError
from weft.layers.shard import Shard

# As safetensors names them. Integers and floats of 8 bits mean something only beside scales, which nobody here reads.
DTYPES = ("F64", "F32", "F16", "BF16")

Progress = Callable[[int, int], None]
"""progress(bytes read so far, bytes to read), of this rank."""


def as_directory(name: str | PathLike[str]) -> Path:
    """CheckpointError for "", which would mean the current one."""
    if name == "":
        raise CheckpointError("model='' names no directory; name one, or leave it out for the built-in model")
    return Path(name)


def read_object(path: Path) -> dict[str, Any]:
    """Of a JSON file. FileNotFoundError where there is none, CheckpointError where it holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(content).__name__}, not an object; download it again")
    return content


class Checkpoint:
    """Reads config.json at once. `load` opens each file of weights once, and reads only the shards that are asked for.

    CheckpointError, in one line, for what is missing, damaged or of another shape, from whichever call meets with it.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = as_directory(directory)
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{self.directory}: no such directory; pass one with config.json and *.safetensors in it"
            )
        self.config = self.read_json("config.json")

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            return read_object(self.directory / name)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.directory}: no {name} in it, so it is not a Hugging Face checkpoint"
            ) from None

    def eos_token_ids(self) -> frozenset[int]:
        """From generation_config.json, or else config.json; empty where neither names any."""
        name, found = "generation_config.json", None
        if (self.directory / name).exists():
            found = self.read_json(name).get("eos_token_id")
        if found is None:
            name, found = "config.json", self.config.get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise CheckpointError(
                f"{self.directory / name}: eos_token_id={found!r} is not a token id or a list of them"
            )
        return frozenset(ids)

    def load(self, shards: Mapping[str, Shard], progress: Progress | None = None) -> None:
        """Fills every shard from the tensor of the same name. Tensors that no shard asks for are left alone."""
        files = self._open_files()
        total = sum(shard.target.nbytes for shard in shards.values())
        done = 0
        for name, shard in shards.items():
            if name not in files:
                raise CheckpointError(f"{self.directory}: tensor {name} is missing; the checkpoint is not complete")
            tensor = files[name].get_slice(name)
            shape = tuple(tensor.get_shape())
            if shape != shard.shape:
                raise CheckpointError(
                    f"{self.directory}: tensor {name} has shape {shape}, but config.json asks for {shard.shape}"
                )
            if (dtype := tensor.get_dtype()) not in DTYPES:
                raise CheckpointError(
                    f"{self.directory}: tensor {name} is of {dtype}, so it has been quantized; weft reads {', '.join(DTYPES)}"
                )
            shard.copy_from(tensor)
            done += shard.target.nbytes
            if progress is not None:
                progress(done, total)

    def _open_files(self) -> dict[str, Any]:
        """Tensor name → the open file that holds it."""
        if (self.directory / "model.safetensors.index.json").exists():
            weight_map = self.read_json("model.safetensors.index.json").get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(
                    f"{self.directory}: model.safetensors.index.json has no weight_map; download it again"
                )
            if wrong := [name for name in weight_map.values() if not isinstance(name, str)]:
                raise CheckpointError(
                    f"{self.directory}: model.safetensors.index.json has {wrong[0]!r} for a file's name; download it again"
                )
            names = sorted(set(weight_map.values()))
        elif (self.directory / "model.safetensors").exists():
            names = ["model.safetensors"]
        else:
            raise CheckpointError(f"{self.directory}: no model.safetensors and no model.safetensors.index.json in it")
        return {tensor: file for name in names for file in [self._open(name)] for tensor in file.keys()}  # noqa: SIM118

    def _open(self, name: str) -> Any:
        path = self.directory / name
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"{self.directory}: {name} is missing, though the index names it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or damaged ({error}); download it again") from None
