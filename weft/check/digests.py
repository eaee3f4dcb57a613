"""Digests of a run's results, to compare two runs bit for bit and name the first difference."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from typing import Any

import torch

# Path in a rank's result -> digest, for each tensor and each plain value.
Digest = dict[str, bytes]


def digest_of(results: list[Any]) -> Digest:
    """Digest of all ranks' results.

    Tensors by dtype, shape and bits, containers and dataclasses by members, anything else by its pickle.
    """
    digest: Digest = {}
    for rank, result in enumerate(results):
        _take(f"rank {rank}'s result", result, digest)
    return digest


def first_difference(one: Digest, other: Digest) -> str:
    """First path at which the two differ, "" if there is none."""
    return next((place for place in {**one, **other} if one.get(place) != other.get(place)), "")


def _take(place: str, value: object, digest: Digest) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().to_dense().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        head = f"{value.dtype} {tuple(value.shape)}".encode()
        digest[place] = _hash(head, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, (list, tuple)):
        digest[place] = _hash(f"{len(value)}".encode())
        for index, member in enumerate(value):
            _take(f"{place}[{index}]", member, digest)
    elif isinstance(value, dict):
        digest[place] = _hash(pickle.dumps([repr(key) for key in value]))
        for key, member in value.items():
            _take(f"{place}[{key!r}]", member, digest)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Its pickle would depend on how its tensors lie in memory.
        digest[place] = _hash(type(value).__name__.encode())
        for field in dataclasses.fields(value):
            _take(f"{place}.{field.name}", getattr(value, field.name), digest)
    else:
        try:
            digest[place] = _hash(pickle.dumps(value))
        except Exception:  # values that cannot be pickled cannot be compared
            digest[place] = _hash(type(value).__name__.encode())


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
