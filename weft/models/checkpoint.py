"""A checkpoint directory in Hugging Face format: config.json, and safetensors in one file or sharded."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Collection, Mapping
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weft.arguments import shortened
from weft.errors import CheckpointError
from weft.models.generation import GenerationDefaults
from weft.parallel.sharding import Shard

# safetensors' names and torch's. Integers and floats of 8 bits mean something only beside scales, which weft does not read.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
COMPARED_ROWS = 8192

Progress = Callable[[int, int], None]
"""progress(bytes read so far, bytes to read), of this rank."""


def as_directory(name: str | PathLike[str]) -> Path:
    """CheckpointError for "", which would mean the current one."""
    if name == "":
        raise CheckpointError("model='' names no directory; name one, or leave it out for the built-in model")
    return Path(name)


def read_file(path: Path) -> bytes:
    """The content of a regular file. CheckpointError for a FIFO or a device, from which a read would not return."""
    check_regular(path)
    # Without blocking, and looked at again: it may have become another since.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _check_mode(path, os.fstat(file.fileno()).st_mode)
        return file.read()


def check_regular(path: Path) -> None:
    """CheckpointError unless it is a regular file or a link to one. FileNotFoundError where there is nothing."""
    _check_mode(path, os.stat(path).st_mode)


def _check_mode(path: Path, mode: int) -> None:
    kinds = {stat.S_IFIFO: "FIFO", stat.S_IFDIR: "directory", stat.S_IFSOCK: "socket"}
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"{path}: is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file; put the checkpoint's own file there"
        )


def is_directory(path: Path) -> bool:
    """False also for a name that no file can have, such as one of 5,000 characters."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_object(path: Path) -> dict[str, Any]:
    """Of a JSON file. FileNotFoundError where there is none, CheckpointError where it holds no object."""
    try:
        content = json.loads(read_file(path).decode("utf-8"))
    except (FileNotFoundError, CheckpointError):
        raise
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of 4,300 digits
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
        if not is_directory(self.directory):
            raise CheckpointError(
                f"{shortened(self.directory)}: no such directory; pass one with config.json and *.safetensors in it"
            )
        if (self.directory / "adapter_config.json").exists():
            raise CheckpointError(
                f"{self.directory}: adapter_config.json names an adapter, which weft does not apply; merge it into the weights"
            )
        self.config = self.read_json("config.json")
        self._tensors: dict[str, Any] | None = None

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

    def generation_defaults(self) -> GenerationDefaults:
        """Sampling defaults from generation_config.json, or else config.json, where transformers 4.x had them once."""
        name = "generation_config.json"
        there = (self.directory / name).exists()
        return GenerationDefaults.from_dict(self.read_json(name) if there else self.config, legacy=not there)

    def dtype(self) -> str:
        """Data type of the first weight that is not quantized, as torch names it."""
        for name, file in self._files().items():
            if (dtype := file.get_slice(name).get_dtype()) in DTYPES:
                return DTYPES[dtype]
        raise CheckpointError(
            f"{self.directory}: no tensor of {', '.join(DTYPES)} in it; take one that was not quantized"
        )

    def differ(self, one: str, other: str) -> bool:
        """True where both tensors are there and are not equal. Reads them, a part at a time."""
        files = self._files()
        if one not in files or other not in files:
            return False
        parts = [files[name].get_slice(name) for name in (one, other)]
        if parts[0].get_shape() != parts[1].get_shape() or parts[0].get_dtype() != parts[1].get_dtype():
            return True
        starts = range(0, (parts[0].get_shape() or [0])[0], COMPARED_ROWS)
        return not all(torch.equal(*(part[start : start + COMPARED_ROWS] for part in parts)) for start in starts)

    def unused(self, names: Collection[str]) -> list[str]:
        """Tensors in the checkpoint beside `names`, but for a table that older checkpoints keep."""
        return [name for name in self._files() if name not in names and not name.endswith("rotary_emb.inv_freq")]

    def load(self, shards: Mapping[str, Shard], progress: Progress | None = None) -> list[str]:
        """Fills every shard from the tensor of the same name. Tensors that no shard asks for are left alone.

        Returns the names of those of which this rank has a part that is NaN or infinite.
        """
        files = self._files()
        total = sum(shard.target.nbytes for shard in shards.values())
        done = 0
        sums: list[torch.Tensor] = []
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
            # NaN or infinite where one of its summands is; the host reads it at the end, so a GPU adds up beside the copies.
            sums.append(shard.target.sum(dtype=torch.float32))
            done += shard.target.nbytes
            if progress is not None:
                progress(done, total)
        odd = torch.stack(sums).isfinite().logical_not().tolist() if sums else []
        # Finite values may have an infinite sum.
        return [name for name, odd in zip(shards, odd, strict=True) if odd and not shards[name].target.isfinite().all()]

    def _files(self) -> dict[str, Any]:
        if self._tensors is None:
            self._tensors = self._open_files()
        return self._tensors

    def _open_files(self) -> dict[str, Any]:
        """Tensor name → the open file that holds it."""
        # Of both transformers takes the one file.
        if (self.directory / "model.safetensors").exists():
            names = ["model.safetensors"]
        elif (self.directory / "model.safetensors.index.json").exists():
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
            names = sorted(set(weight_map.values()))
        else:
            raise CheckpointError(f"{self.directory}: no model.safetensors and no model.safetensors.index.json in it")
        return {tensor: file for name in names for file in [self._open(name)] for tensor in file.keys()}  # noqa: SIM118

    def _open(self, name: str) -> Any:
        path = self.directory / name
        try:
            check_regular(path)
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"{self.directory}: {name} is missing, though the index names it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or damaged ({error}); download it again") from None


def _is_inside(name: str) -> bool:
    """True for a name that stays in its directory. It may be a link that leaves it: a hub's cache is made of these."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
