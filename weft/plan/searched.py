"""Cache of searches on this machine: a JSON file per GPU, world size and versions, a line a call.

{"schema": 1, "place": {"gpu": "NVIDIA H200", "world_size": 2, "triton": "3.6.0", …}, "calls": [
 {"op": "matmul", "dtype": "bfloat16", "size": [4, 5120, 4096], "row": {"op": …, "us": 7.1}, "reason": "", "digest": "3f…"},
]}

``row`` is one of ``weft.plan.table``; null: no candidate ran, and ``reason`` says why. Damaged lines are skipped: with another
digest, or of an op or a design that this weft does not have. So is a file of another place. Nothing reads a file by itself: an
engine's warm-up gives all ranks the entries of rank 0's file and of its search.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

from weft.errors import CannotWrite
from weft.plan.table import Row
from weft.runtime.codec import exchangeable
from weft.runtime.files import put, text_of
from weft.runtime.logs import logger_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

SCHEMA = 1
DIGITS = 16
logger = logger_of(__name__)
Place = Mapping[str, Any]


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Result of the search of one call.

    op      name, with variants of the call: "matmul+partials"
    size    of the call, as ``weft bench`` has it for the op's form
    row     the fastest design; None: no candidate ran
    reason  why there is no row
    """

    op: str
    dtype: str
    size: tuple[int, ...]
    row: Row | None
    reason: str = ""

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        return self.op, self.dtype, self.size


def default_folder() -> Path:
    return Path.home() / ".cache" / "weft"


def place_of(team: Team, revision: str) -> dict[str, Any]:
    """Properties of machine and software that entries hold for. revision: of weft's sources."""
    caps = team.caps
    return {
        "gpu": caps.device_name,
        "arch": caps.arch,
        "sms": caps.sms,
        "world_size": team.size,
        "heap_bytes": team.node.heap_bytes,
        "links": sorted(set(caps.links)),
        "multicast": caps.multicast,
        "simulated": caps.is_simulated,
        "weft": revision,
        "triton": triton.__version__,
        "torch": str(torch.__version__),
    }


def file_in(folder: Path, place: Place) -> Path:
    """File of a place, such as nvidia-h200.w2.1f0c9ab2.json."""
    gpu = re.sub(r"[^a-z0-9]+", "-", place["gpu"].lower()).strip("-")
    return folder / f"{gpu}.w{place['world_size']}.{_digest(place)[:8]}.json"


def load(path: Path, place: Place, check: Callable[[Row], None]) -> list[Entry]:
    """Entries of a file; none, after one warning, if it is damaged or of another place.

    Damaged lines are skipped, with one warning.

    check  raises ValueError for a row of which its op makes no design
    """
    if not path.exists():
        return []
    try:
        document = json.loads(text_of(path))
        if not isinstance(document, dict) or document.get("schema") != SCHEMA or "calls" not in document:
            raise ValueError(f"it is not a cache of searches of schema {SCHEMA}")
        if (written := document.get("place")) != place:
            names = [name for name in place if not isinstance(written, dict) or written.get(name) != place[name]]
            raise ValueError(f"it is of another machine or version: {', '.join(names)} differ")
        lines = list(document["calls"])
    except (ValueError, TypeError, OSError, RecursionError) as error:
        logger.warning("cache of searches %s is ignored: %s", path, error)
        return []
    entries, wrong = [], []
    for number, line in enumerate(lines):
        try:
            entries.append(_entry(line, check))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            wrong.append(f"calls[{number}]: {error}")
    if wrong:
        logger.warning("cache of searches %s: %d of %d calls are skipped: %s", path, len(wrong), len(lines), wrong[0])
    return entries


def _entry(line: dict[str, Any], check: Callable[[Row], None]) -> Entry:
    """Entry of a line. ValueError, TypeError, KeyError or AttributeError if it is damaged."""
    content = {name: value for name, value in line.items() if name != "digest"}
    if line["digest"] != _digest(content):
        raise ValueError("its digest is another, so it was changed")
    fields = content["row"]
    row = None if fields is None else Row(**{**fields, "shape": tuple(fields["shape"])})
    if row is not None:
        check(row)
    return Entry(**{**content, "size": tuple(content["size"]), "row": row})


def save(path: Path, place: Place, entries: Iterable[Entry], check: Callable[[Row], None]) -> bool:
    """Add ``entries`` to the file, atomically; False, after one warning, if it cannot be written.

    A damaged file is replaced. Of two processes that save at once the last one wins.
    """
    by_key = {entry.key: entry for entry in (*load(path, place, check), *entries)}
    lines = []
    for key in sorted(by_key):
        content = json.loads(json.dumps(dataclasses.asdict(by_key[key])))
        lines.append(json.dumps(content | {"digest": _digest(content)}, ensure_ascii=False))
    head = json.dumps({"schema": SCHEMA, "place": place}, ensure_ascii=False)[:-1]
    try:
        put(path, f'{head}, "calls": [\n ' + ",\n ".join(lines) + "\n]}\n")
    except (OSError, CannotWrite) as error:
        logger.warning("results of the search are not kept in a file: %s", error)
        return False
    return True


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:DIGITS]
