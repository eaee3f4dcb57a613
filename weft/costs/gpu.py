"""Constants of a GPU and of its links, shipped in gpus/ or measured by ``weft doctor --measure``.

{"schema": 1, "gpu": "NVIDIA H200", "arch": "sm_90", "constants": {"memory": {"value": 4300000.0, "source": "…"}, …},
 "limits": {"cudnn_rows": {"value": 65536, "source": "…"}, …}}

Plans read the shipped file of their GPU, unless ``use`` gave this process measured constants. A GPU without either takes the
constants of the shipped GPU that is most like it (``nearest``), with the GPU's number of SMs. A file without limits, as
``weft doctor --measure`` writes it, has the limits of the nearest shipped GPU.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from weft.arguments import quoted
from weft.plan.memo import forget, remembered
from weft.runtime.codec import exchangeable
from weft.runtime.files import put, text_of
from weft.runtime.logs import logger_of

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities
    from weft.runtime.team.team import Team

logger = logger_of(__name__)
SCHEMA = 1
FOLDER = Path(__file__).parent / "gpus"


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Measured facts of a GPU that no cost function predicts: where one kernel overtakes another.

    cudnn_rows      rows (query heads times new tokens) from which cuDNN's attention beats weft's to prompts of one length,
                    though it needs the keys outside the cache, a memset and a pause
    cudnn_cached    tokens in the cache before the new ones from which it does so too, of twice cudnn_rows rows, though their
                    keys are copied and parts are merged; of fewer rows from four times as many tokens on
    deferred_scale  True: in bf16, GEMMs that divide by a deferred RMS were measured to be faster than norms that do
    """

    cudnn_rows: int
    cudnn_cached: int
    deferred_scale: bool


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Constants of one GPU. Times in µs, rates in bytes or operations per µs.

    gpu       the driver's name of it
    arch      as in ``Capabilities``
    sms       streaming multiprocessors (compute units)
    flops     of a large bf16 GEMM, at the clocks that it runs at
    memory    bytes that a kernel reads
    launch    a kernel's share of a row of kernels in a CUDA graph, without work
    hop       the same of a kernel that stores to a peer and waits for that peer's stores
    stores    bytes that a kernel's stores send, to all peers together
    one_link  bytes that they send to one peer: less than ``stores`` where links go from GPU to GPU
    link      bytes that a copy engine sends to one peer
    copy      start of a copy engine's copy, and the flag after it
    limits    facts that are not predicted
    measured  False: from data sheets
    """

    gpu: str
    arch: str
    sms: int
    flops: float
    memory: float
    launch: float
    hop: float
    stores: float
    one_link: float
    link: float
    copy: float
    limits: Limits
    measured: bool = True

    def wire(self, world_size: int) -> float:
        """Bytes per µs that a kernel's stores send to the peers of ``world_size`` ranks."""
        return min(self.stores, max(1, world_size - 1) * self.one_link)


_OTHER = ("gpu", "arch", "limits", "measured")
CONSTANTS = tuple(field.name for field in dataclasses.fields(Gpu) if field.name not in _OTHER)
# Constants that ``use`` gave this process, by GPU.
_used: dict[str, Gpu] = {}


def use(gpu: Gpu | None) -> None:
    """Let plans of this process read ``gpu``'s constants from now on, on all ranks; None: no change."""
    if gpu is not None and _used.get(gpu.gpu) != gpu:
        _used[gpu.gpu] = gpu
        forget()


def agree(team: Team, file: Path | None = None) -> None:
    """Let plans of all ranks read the constants in rank 0's file, if there is one. Collective.

    file  None: ``default_file``. One that is damaged, of another GPU, or named and missing is ignored with one warning.
          Virtual ranks plan by shipped constants
    """
    if team.device.type == "cpu":
        return
    name = team.caps.device_name
    measured = load(file or default_file(name)) if team.rank == 0 else None
    if team.rank == 0 and file is not None and not file.exists():
        logger.warning("constants of this GPU are not read: costs=%s does not exist; run weft doctor --measure", file)
    if measured is not None and measured.gpu != name:
        text = "constants of %s in %s are ignored: this GPU is %s; run weft doctor --measure here"
        logger.warning(text, measured.gpu, file or default_file(name), name)
        measured = None
    use(team.exchange(measured)[0])


def gpu_of(caps: Capabilities) -> Gpu:
    """Constants of a rank's GPU, equal on all ranks that have such a one."""
    return of_device(caps.device_name, caps.arch, caps.sms)


def of_device(device_name: str, arch: str, sms: int) -> Gpu:
    """Constants of a GPU as its driver describes it."""
    return named(device_name, arch, 0 if is_known(device_name) else sms)


@remembered
def named(device_name: str, arch: str = "", sms: int = 0) -> Gpu:
    """Constants of the GPU of this name, the driver's or a file's ("h200"), or of the nearest one.

    arch, sms  of a GPU without constants; sms also of a GPU some of whose SMs are not to be used
    """
    every = shipped()
    known = _used.get(device_name) or every.get(device_name) or every.get(_alias(device_name))
    known = known or nearest(arch)
    return dataclasses.replace(known, sms=sms) if sms and sms != known.sms else known


def is_known(device_name: str) -> bool:
    """True if there are constants of the GPU of this name: shipped, or given by ``use``."""
    return device_name in _used or device_name in shipped()


def nearest(arch: str) -> Gpu:
    """Constants of the shipped GPU that is most like one of ``arch``."""
    of_arch = [gpu for gpu in shipped().values() if gpu.arch == arch]
    family = arch.partition("_")[0] if "_" in arch else re.sub(r"\d.*", "", arch)
    of_family = [gpu for gpu in shipped().values() if gpu.arch.startswith(family)] if family else []
    # The slowest one: of a GPU without a file less is expected.
    return min(of_arch or of_family or list(shipped().values()), key=lambda gpu: gpu.flops)


@lru_cache
def shipped() -> dict[str, Gpu]:
    """Shipped constants, by the driver's names."""
    return {gpu.gpu: gpu for gpu in (read(file) for file in sorted(FOLDER.glob("*.json")))}


def _alias(name: str) -> str:
    """Driver's name of a shipped GPU by its short name: "h200" for "NVIDIA H200"."""
    file = FOLDER / f"{name.lower()}.json"
    return read(file).gpu if re.fullmatch(r"[a-z0-9-]+", name.lower()) and file.is_file() else ""


def default_file(device_name: str) -> Path:
    """File that ``weft doctor --measure`` writes for the GPU of this name unless another one is named."""
    return Path.home() / ".cache" / "weft" / f"costs-{re.sub(r'[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def read(path: Path) -> Gpu:
    """Constants of a file. ValueError, with file and field, unless all are there."""
    try:
        document = json.loads(text_of(path))
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"it is not a file of a GPU's constants of schema {SCHEMA}")
        constants = document.get("constants")
        if not isinstance(constants, dict) or set(constants) != set(CONSTANTS):
            raise ValueError(f"constants must be {', '.join(CONSTANTS)}")
        for name in ("gpu", "arch"):
            if not isinstance(document.get(name), str) or not document[name]:
                raise ValueError(f"{name}={quoted(document.get(name))} is not a name")
        values = {name: _value(name, constants[name]) for name in CONSTANTS}
        gpu, arch = document["gpu"], document["arch"]
        limits = _limits(document["limits"]) if "limits" in document else named(gpu, arch).limits
        return Gpu(gpu=gpu, arch=arch, limits=limits, measured=document.get("measured", True) is True, **values)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _value(name: str, constant: object) -> float:
    value = constant.get("value") if isinstance(constant, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={quoted(value)} is not a positive number")
    return int(value) if name == "sms" else float(value)


def _limits(content: object) -> Limits:
    kinds = {field.name: bool if field.name == "deferred_scale" else int for field in dataclasses.fields(Limits)}
    if not isinstance(content, dict) or set(content) != set(kinds):
        raise ValueError(f"limits must be {', '.join(kinds)}")
    values = {name: one.get("value") if isinstance(one, dict) else None for name, one in content.items()}
    for name, value in values.items():
        if type(value) is not kinds[name] or value < 0:
            raise ValueError(f"{name}={quoted(value)} is not a {'flag' if kinds[name] is bool else 'number of tokens'}")
    return Limits(**values)


def load(path: Path) -> Gpu | None:
    """Constants of a file; None if there is none, or, after one warning, if it is damaged."""
    try:
        return read(path) if path.exists() else None
    except (ValueError, OSError, KeyError, TypeError) as error:
        logger.warning("constants of this GPU are ignored: %s; remove it, or run weft doctor --measure again", error)
        return None


def write(path: Path, gpu: Gpu, sources: dict[str, str]) -> None:
    """Write a file of ``gpu``'s constants, atomically. sources: by constant."""
    constants = {
        name: {"value": float(f"{getattr(gpu, name):.6g}"), "source": sources.get(name, "")} for name in CONSTANTS
    }
    constants["sms"]["value"] = gpu.sms
    document = {"schema": SCHEMA, "gpu": gpu.gpu, "arch": gpu.arch, "measured": gpu.measured, "constants": constants}
    put(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
