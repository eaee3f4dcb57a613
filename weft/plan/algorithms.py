"""Cache of cuBLAS algorithms: a JSON file of the fastest one per GPU, cuBLAS version, dtype and shape.

{"schema": 1, "algorithms": [
 {"gpu": "NVIDIA H200", "cublas": "13.1.1", "dtype": "bfloat16", "shape": [777, 13000, 5120],
  "algorithm": {"tile": 24, "cluster": 5, …}, "us": 151.2, "torch_us": 158.9},
]}

An entry stands for one shape on its GPU and cuBLAS version; "algorithm" null: torch.mm's choice is the fastest. Plans read
the entries that this process was given by ``use``, after the rows of the shipped tables. Nothing reads a file by itself:
``weft.ops.warm_up`` gives all ranks the entries of rank 0's file and of its search.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weft.arguments import is_integer, quoted
from weft.errors import CannotWrite
from weft.plan.memo import forget
from weft.plan.table import name_of
from weft.runtime import cublaslt
from weft.runtime.codec import exchangeable
from weft.runtime.cublaslt import Algorithm
from weft.runtime.files import put, text_of
from weft.runtime.logs import logger_of

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

SCHEMA = 1
logger = logger_of(__name__)
# (gpu, cublas, dtype, (M, N, K))
Key = tuple[str, str, str, tuple[int, ...]]


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Fastest algorithm of a GEMM of ``shape`` (M, N, K); None: torch.mm's choice.

    us, torch_us  time of a call by it and by torch.mm, with cold weights
    """

    gpu: str
    cublas: str
    dtype: str
    shape: tuple[int, ...]
    algorithm: Algorithm | None
    us: float
    torch_us: float

    def __post_init__(self) -> None:
        for name in ("gpu", "cublas", "dtype"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise ValueError(f"{name}={quoted(value)} is not a name")
        if len(self.shape) != 3 or not all(is_integer(size) and size > 0 for size in self.shape):
            raise ValueError(f"shape={quoted(self.shape)} is not M, N, K: three positive integers")
        for name in ("us", "torch_us"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={quoted(value)} is not a positive number of microseconds")

    @property
    def key(self) -> Key:
        return self.gpu, self.cublas, self.dtype, self.shape

    @property
    def reason(self) -> str:
        """Text for ``explain``: where the algorithm comes from, and its gain."""
        shape = "x".join(map(str, self.shape))
        fastest = "torch.mm's choice is the fastest" if self.algorithm is None else f"{self.us:.4g} µs"
        return f"cached search: {self.dtype} {shape}: {fastest}, torch.mm {self.torch_us:.4g} µs (cuBLAS {self.cublas})"


# Entries that plans of this process read, and GEMMs without one that `missing` collects.
_used: dict[Key, Entry] = {}
_missing: dict[tuple[torch.dtype, tuple[int, ...]], None] | None = None


def use(entries: Iterable[Entry]) -> None:
    """Let plans read ``entries`` as well, from now on; equal on all ranks of a team."""
    _used.update((entry.key, entry) for entry in entries)
    forget()


def find(M: int, N: int, K: int, dtype: torch.dtype, caps: Capabilities) -> Entry | None:
    """Entry of exactly this shape, for the loaded cuBLAS; None: there is none, or ranks are simulated."""
    if caps.is_simulated or (not _used and _missing is None):
        return None
    key = caps.device_name, cublaslt.version(), name_of(dtype), (M, N, K)
    try:
        entry = _used.get(key)
    except TypeError:  # a symbolic size of torch.compile has no hash
        return None
    if entry is None and _missing is not None:
        _missing[dtype, (M, N, K)] = None
    return entry


@contextmanager
def missing() -> Iterator[dict[tuple[torch.dtype, tuple[int, ...]], None]]:
    """Scope that collects dtype and shape of cuBLAS GEMMs with neither a row nor an entry."""
    global _missing
    _missing = {}
    forget()  # memoised plans would not look
    try:
        yield _missing
    finally:
        _missing = None


def read(path: Path) -> list[Entry]:
    """Entries of a file. ValueError, with file, entry and field, unless all are of this schema."""
    try:
        document = json.loads(text_of(path))
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"it is not a cache of cuBLAS algorithms of schema {SCHEMA}")
        entries = document.get("algorithms")
        if set(document) != {"schema", "algorithms"} or not isinstance(entries, list):
            raise ValueError("it must hold 'schema' and a list of 'algorithms'")
        return [_parsed(number, fields) for number, fields in enumerate(entries)]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _parsed(number: int, fields: object) -> Entry:
    try:
        _check_fields("entry", fields, Entry)
        algorithm = fields["algorithm"]
        if algorithm is not None:
            _check_fields("algorithm", algorithm, Algorithm)
            for name, value in algorithm.items():
                if type(value) is not int or not 0 <= value < 1 << 16:
                    raise ValueError(f"algorithm.{name}={quoted(value)} is not an integer in 0 .. 65535")
            algorithm = Algorithm(**algorithm)
        if not isinstance(fields["shape"], list):
            raise ValueError(f"shape={quoted(fields['shape'])} is not M, N, K: three positive integers")
        return Entry(**{**fields, "shape": tuple(fields["shape"]), "algorithm": algorithm})
    except ValueError as error:
        raise ValueError(f"algorithms[{number}]: {error}") from None


def _check_fields(what: str, fields: object, kind: type) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(fields, dict):
        raise ValueError(f"{quoted(fields)} is no {what}")
    for name in (*fields, *known):
        if name not in known or name not in fields:
            raise ValueError(f"{'unknown' if name in fields else 'missing'} field {quoted(name)} of the {what}")


def load(path: Path) -> list[Entry] | None:
    """Entries of a file, none if it does not exist; None, after one warning, if it is damaged."""
    try:
        return read(path) if path.exists() else []
    except (ValueError, OSError) as error:
        logger.warning("cache of cuBLAS algorithms is ignored: %s; remove it or name another", error)
        return None


def save(path: Path, entries: Iterable[Entry]) -> None:
    """Add ``entries`` to the file, a line for each, atomically.

    Of two processes that save at once the last one wins: the file is complete, and lacks entries of the first.
    """
    by_key = {entry.key: entry for entry in (*(read(path) if path.exists() else ()), *entries)}
    lines = [json.dumps(dataclasses.asdict(by_key[key]), ensure_ascii=False) for key in sorted(by_key)]
    put(path, f'{{"schema": {SCHEMA}, "algorithms": [\n ' + ",\n ".join(lines) + "\n]}\n")


def try_save(path: Path, entries: Iterable[Entry]) -> bool:
    """``save``; False, after one warning, if the file is damaged by now or cannot be written."""
    try:
        save(path, entries)
    except (ValueError, OSError, CannotWrite) as error:
        logger.warning("cuBLAS algorithms found from here on are not kept in a file: %s", error)
        return False
    return True
