"""An archive of vLLM for machines without a network: its packages, for one GPU architecture and what its LLM class imports.

    python3.12 -m benchmarks.vllm_archive vllm-0.26.0-….whl vllm.tar.xz --installed names.txt [--work FOLDER] [--arch 90]

names.txt lists the packages that the machine has, one in a line: they are left out, as are packages that serve other models,
pictures and grammars (LEFT_OUT). What their metadata asks for comes from PyPI, until nothing is missing. In shared libraries
code for other architectures is overwritten with zeros, which compress to nothing; of FlashAttention 3, dtypes other than bf16
too. The machine needs this Python, and the torch that vLLM asks for. vLLM 0.26.0 takes some 40 MB, in place of 1.8 GB.
`benchmarks/engines.sh` unpacks it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from weft.runtime.files import put

# Packages that vLLM imports only for other models, inputs, back ends and grammars.
LEFT_OUT = frozenset(
    (
        "torch", "torchaudio", "torchvision", "triton", "numba", "llvmlite", "xgrammar", "torchcodec", "pynvvideocodec",
        "flashinfer-python", "tilelang", "anthropic", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "quack-kernels",
        "tokenspeed-mla", "humming-kernels", "apache-tvm-ffi", "nvtx",
    )
)  # fmt: skip
# Parts of the wheel: FlashAttention 2 and kernels of other architectures, a server in Rust, benchmarks.
LEFT_OUT_FILES = (
    "_vllm_fa2_C", "vllm/vllm-rs", "fmha_sm100", "vllm/benchmarks/",
    "cpython-310", "cpython-311", "cpython-313", "cpython-314",
)  # fmt: skip
XGRAMMAR = '''"""Stands for xgrammar, which is not in the archive: names can be imported and not called."""

import sys
import types


class Missing:
    def __init__(self, *args, **kwargs):
        raise RuntimeError("xgrammar is not in this archive")


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing


__getattr__ = Module(__name__).__getattr__
for name in ("testing", "structural_tag", "builtin_structural_tag", "grammar", "kernels", "openai_tool_call_schema"):
    sys.modules[f"{__name__}.{name}"] = Module(f"{__name__}.{name}")
'''
FATBIN, CUBIN = b"\x50\xed\x55\xba", 2
# Element types of FlashAttention 3's kernels in their mangled names.
OTHER_DTYPES = re.compile(rb"ENS_6half_tEfNS_4arch|ENS_12float_e4m3_tEfNS_4arch")


class Code(NamedTuple):
    """Code of one architecture in a fat binary: its kind (cubin or PTX), architecture, and the place of its bytes."""

    kind: int
    arch: int
    begin: int
    end: int


def codes(data: bytes) -> Iterator[Code]:
    """All code of the fat binaries in a shared library."""
    at = data.find(FATBIN)
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        place, end = at + header, at + header + size
        if version != 1 or header != 16 or end > len(data):
            at = data.find(FATBIN, at + 4)
            continue
        while place < end:
            kind, _, head, length = struct.unpack_from("<HHIQ", data, place)
            [arch] = struct.unpack_from("<I", data, place + 28)
            yield Code(kind, arch, place + head, place + head + length)
            place += head + length
        at = data.find(FATBIN, end)


def cut(data: bytes, arch: int) -> bytes:
    """A shared library with the machine code of ``arch`` alone."""
    left = bytearray(data)
    for code in codes(data):
        body = data[code.begin : code.end]
        other = OTHER_DTYPES.search(body) and b"FlashAttnFwdCombine" not in body
        if (code.kind, code.arch) != (CUBIN, arch) or other:
            left[code.begin : code.end] = bytes(code.end - code.begin)
    return bytes(left)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def missing(folder: Path, installed: frozenset[str]) -> list[str]:
    """What the packages in ``folder`` ask for, and neither it nor the machine has."""
    from packaging.requirements import Requirement

    there = {normal(one.metadata["Name"]): one for one in importlib.metadata.distributions(path=[str(folder)])}
    asked: dict[str, str] = {}
    for one in there.values():
        for line in one.requires or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                asked[normal(need.name)] = f"{need.name}{need.specifier}"
    return [line for name, line in sorted(asked.items()) if name not in there and name not in installed | LEFT_OUT]


def make(wheel: Path, target: Path, installed: frozenset[str], work: Path, arch: int) -> None:
    with zipfile.ZipFile(wheel) as parts:
        for part in parts.infolist():
            if not any(name in part.filename for name in LEFT_OUT_FILES):
                parts.extract(part, work)
    while needs := missing(work, installed):
        print(f"from PyPI: {', '.join(needs)}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(work)]
        subprocess.run([*pip, *needs], check=True)
    for file in [*work.glob("vllm/**/*.so")]:
        smaller = cut(file.read_bytes(), arch)
        with file.open("wb") as out:
            out.write(smaller)
    (work / "xgrammar").mkdir(exist_ok=True)
    put(work / "xgrammar" / "__init__.py", XGRAMMAR)
    shutil.rmtree(work / "pycountry" / "locales", ignore_errors=True)
    shutil.rmtree(work / "bin", ignore_errors=True)
    subprocess.run(
        f"tar c --sort=name --exclude=__pycache__ -C '{work}' . | xz -T0 > '{target}'", shell=True, check=True
    )
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--installed", type=Path, required=True, help="names of packages that the machine has")
    parser.add_argument("--work", type=Path, default=Path("vllm-site"), help="folder for the packages")
    parser.add_argument("--arch", type=int, default=90)
    chosen = parser.parse_args()
    names = frozenset(map(normal, chosen.installed.read_text().split()))
    make(chosen.wheel, chosen.target, names, chosen.work, chosen.arch)


if __name__ == "__main__":
    main()
