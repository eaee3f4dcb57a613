"""Report of `weft doctor`: installed parts, the device that weft will use, commands for missing parts.

    findings = examine()
    runnable(findings)      # False: not even the simulator can run

Each part is examined by itself, so that a broken one does not hide the rest.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Literal

Status = Literal["ok", "missing", "wrong", "unused"]

VERDICT = "weft will use"
_INTERPRET = "TRITON_INTERPRET"
_NO_LIMIT = (10_000, 0)
_CPU_TORCH = "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    status   ok: found and used; missing: weft could use it (``remedy`` installs it); wrong: weft cannot run with it;
             unused: weft does not need it here
    remedy   a command for the shell, or ""
    """

    name: str
    value: str
    status: Status
    explanation: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    """A Python package, and the versions ``at_least <= version < below`` that weft works with."""

    name: str
    module: str
    purpose: str
    at_least: tuple[int, int]
    below: tuple[int, int] = _NO_LIMIT
    install: str = ""

    @property
    def remedy(self) -> str:
        return f"pip install {self.install or self.name}"


_PACKAGES = (
    _Package(name="torch", module="torch", purpose="tensors, NCCL", at_least=(2, 11), install=_CPU_TORCH),
    _Package(
        name="Triton",
        module="triton",
        purpose="compiles the kernels; the simulator interprets with it",
        at_least=(3, 6),
        below=(3, 10),
        install='"triton>=3.6,<3.10"',
    ),
    _Package(name="NumPy", module="numpy", purpose="the simulator", at_least=(1, 26)),
    _Package(name="greenlet", module="greenlet", purpose="the simulator", at_least=(3, 0)),
    _Package(name="ml_dtypes", module="ml_dtypes", purpose="the simulator", at_least=(0, 4)),
    _Package(name="safetensors", module="safetensors", purpose="reads checkpoints", at_least=(0, 4)),
    _Package(name="tokenizers", module="tokenizers", purpose="text to tokens", at_least=(0, 20)),
)

_SIMULATOR_NEEDS = ("torch", "Triton", "NumPy", "greenlet", "ml_dtypes")
_GPUS_NEED = ("torch", "Triton", "GPUs")


def examine() -> list[Finding]:
    """Examine this machine. Never raises for a broken part."""
    findings = [_python()]
    findings.extend(_package(package) for package in _PACKAGES)
    findings.extend(_interpret() if _status(findings, "Triton") == "ok" else ())
    findings.extend(_gpus() if _status(findings, "torch") == "ok" else ())
    findings.append(_verdict(findings))
    return findings


def runnable(findings: Sequence[Finding]) -> bool:
    """True if weft can run here, at least in the simulator."""
    return _status(findings, VERDICT) == "ok"


def _python() -> Finding:
    good = (3, 10) <= sys.version_info[:2] < (3, 14)
    return Finding(
        name="Python",
        value=platform.python_version(),
        status="ok" if good else "missing",
        explanation=sys.executable if good else "weft is made for 3.10 to 3.13",
        remedy="" if good else "install Python 3.10 to 3.13, then: make clean demo PYTHON=python3.12",
    )


def _package(package: _Package) -> Finding:
    limit = "" if package.below == _NO_LIMIT else f", < {_dotted(package.below)}"
    wanted = f"{package.purpose}; weft works with >= {_dotted(package.at_least)}{limit}"
    try:
        module = import_module(package.module)
    except ModuleNotFoundError:
        return _missing(package, "not installed", wanted)
    except Exception as error:  # a broken binary may raise any exception
        return _missing(package, "does not import", f"{type(error).__name__}: {error}".splitlines()[0])
    version = str(module.__version__)
    if not package.at_least <= _numbers(version) < package.below:
        return _missing(package, version, wanted)
    value = f"{version}, built for {_built_for(module)}" if package.module == "torch" else version
    return Finding(name=package.name, value=value, status="ok", explanation=package.purpose)


def _interpret() -> Iterator[Finding]:
    from weft.runtime import triton_interpret  # needs Triton

    if triton_interpret.is_set():
        yield Finding(
            name=_INTERPRET,
            value="set",
            status="wrong",
            explanation="Triton's own interpreter runs every kernel; weft's simulator has another one",
            remedy=f"unset {_INTERPRET}",
        )


def _missing(package: _Package, value: str, why: str) -> Finding:
    return Finding(name=package.name, value=value, status="missing", explanation=why, remedy=package.remedy)


def _built_for(torch: ModuleType) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"


def _gpus() -> Iterator[Finding]:
    import torch

    from weft.runtime import capabilities

    count = torch.cuda.device_count()
    if count == 0:
        yield _no_gpus(torch.version.cuda is not None)
        return
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    kinds = Counter(f"{gpu.name}, {gpu.total_memory >> 30} GiB" for gpu in gpus)
    yield Finding(
        name="GPUs",
        value="; ".join(f"{number} x {kind}" for kind, number in kinds.items()),
        status="ok",
        explanation=f"{capabilities.architecture(0)}; rank r runs on GPU r",
    )
    if gpus[0].major == 9:
        yield _deep_gemm()
    if count == 1:
        return
    yield _links()
    yield _peers(capabilities.peer_matrix())
    yield _atomics(
        [(i, j) for i in range(count) for j in range(i) if capabilities.link_between(i, j) == capabilities.PCIE]
    )
    offered = [capabilities.driver_offers_multicast(index) for index in range(count)]
    yield Finding(
        name="multicast",
        value="offered by the driver" if all(offered) else "not offered by the driver",
        status="unused",
        explanation="the fabric may still have it off, which shows when a heap is made; no op of weft needs it",
    )
    shmem = capabilities.nvshmem_available()
    yield Finding(
        name="NVSHMEM",
        value="in this torch" if shmem else "not in this torch",
        status="unused",
        explanation="for several machines, later; one machine uses CUDA symmetric memory",
    )


def _deep_gemm() -> Finding:
    from weft.runtime import deep_gemm  # needs torch

    version, what = deep_gemm.version(), "large GEMMs in blocks of fp8"
    try:
        chosen = deep_gemm.is_chosen()
    except ValueError as error:
        return Finding(
            name="DeepGEMM", value=version or "not installed", status="wrong", explanation=str(error),
            remedy="unset WEFT_DEEP_GEMM",
        )  # fmt: skip
    if chosen:
        return Finding(
            name="DeepGEMM",
            value=version or "not installed",
            status="ok" if version else "missing",
            explanation=what,
            remedy="" if version else deep_gemm.HOW,
        )
    value = f"{version}, WEFT_DEEP_GEMM=0" if version else "not installed"
    return Finding(name="DeepGEMM", value=value, status="unused", explanation=f"{what}: by cuBLAS; {deep_gemm.HOW}")


def _no_gpus(built_for_cuda: bool) -> Finding:
    tool = shutil.which("nvidia-smi")
    seen = _output(tool, "-L").count("GPU ") if tool else 0
    if not seen:
        return Finding(name="GPUs", value="none", status="unused", explanation="the simulator needs none")
    if built_for_cuda:
        why, remedy = "torch cannot use them: does the driver fit, is CUDA_VISIBLE_DEVICES empty?", "nvidia-smi"
    else:
        why, remedy = "this torch is built for the CPU", "pip install --force-reinstall torch"
    return Finding(name="GPUs", value=f"{seen} seen by the driver", status="missing", explanation=why, remedy=remedy)


def _links() -> Finding:
    """Kinds of links in `nvidia-smi topo -m`: NV18 is 18 NVLinks, PIX to SYS are PCIe."""
    tool = shutil.which("nvidia-smi")
    rows = [line.split() for line in (_output(tool, "topo", "-m") if tool else "").splitlines()]
    rows = [row for row in rows if row and row[0].startswith("GPU") and "X" in row]
    kinds = sorted({cell for row in rows for cell in row[1 : len(rows) + 1]} - {"X"})
    if not kinds:
        return Finding(name="links", value="unknown", status="unused", explanation="nvidia-smi topo -m names none")
    fast = all(kind.startswith("NV") for kind in kinds)
    why = "NVLink between all pairs" if fast else "pairs without NVLink (NV...) go over PCIe, which is slower"
    return Finding(name="links", value=", ".join(kinds), status="ok", explanation=why)


def _peers(matrix: Sequence[Sequence[bool]]) -> Finding:
    cut = [f"{i}-{j}" for i, row in enumerate(matrix) for j, reached in enumerate(row) if not reached]
    if not cut:
        return Finding(
            name="peer access", value="every pair", status="ok", explanation="kernels reach all peers' memory"
        )
    return Finding(
        name="peer access",
        value=f"not between {', '.join(cut)}",
        status="missing",
        explanation="ranks must be able to reach each other: choose GPUs that can",
        remedy="nvidia-smi topo -p2p r",
    )


def _atomics(without: Sequence[tuple[int, int]]) -> Finding:
    """``without``: pairs of GPUs whose link carries no atomics."""
    if not without:
        return Finding(name="remote atomics", value="every pair", status="ok", explanation="notify may set and add")
    return Finding(
        name="remote atomics",
        value=f"not between {', '.join(f'{i}-{j}' for i, j in without)}",
        status="unused",
        explanation="PCIe: notify sets only, op='add' is refused; no op of weft adds",
    )


def _verdict(findings: Sequence[Finding]) -> Finding:
    simulator = all(_status(findings, name) == "ok" for name in _SIMULATOR_NEEDS)
    gpus = all(_status(findings, name) == "ok" for name in _GPUS_NEED)
    if _status(findings, _INTERPRET) is not None:
        return Finding(
            name=VERDICT,
            value="nothing: it cannot run",
            status="missing",
            explanation=f"{_INTERPRET} is set",
        )
    peers = _status(findings, "peer access")  # None: there is one GPU, so no pair
    if gpus and peers == "ok":
        return _use("the GPUs", "CUDA symmetric memory: every pair has peer access")
    if gpus and peers is None:
        return _use("the GPU", "one rank on it; more ranks run in the simulator")
    if simulator:
        why = "not every pair of GPUs has peer access" if gpus else "no GPUs to use"
        return _use("the simulator", f"{why}; its results are right, its times mean nothing")
    lacking = [name for name in _SIMULATOR_NEEDS if _status(findings, name) != "ok"]
    remedies = [finding.remedy for finding in findings if finding.name in lacking]
    return Finding(
        name=VERDICT,
        value="nothing: it cannot run",
        status="missing",
        explanation=f"the simulator lacks {', '.join(lacking)}",
        remedy=" && ".join(remedies),
    )


def _use(what: str, why: str) -> Finding:
    return Finding(name=VERDICT, value=what, status="ok", explanation=why)


def _status(findings: Sequence[Finding], name: str) -> Status | None:
    return next((finding.status for finding in findings if finding.name == name), None)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _numbers(version: str) -> tuple[int, int]:
    parts = [part for part in version.split("+")[0].split(".") if part.isdigit()]
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
