"""An archive of vLLM or SGLang for machines without a network: its packages, for one GPU architecture and offline use.

    python3.12 -m benchmarks.engine_archive vllm vllm.tar.xz --installed names.txt [--work FOLDER] [--arch 90]
    python3.12 -m benchmarks.engine_archive sglang sglang.tar.xz --installed names.txt
    python3.12 -m benchmarks.engine_archive flashinfer vllm-flashinfer.tar.xz --installed names.txt

names.txt lists the packages that the machine has, one in a line: they are left out, as are packages and files that serve other
models, pictures, grammars and servers (ENGINES). What the engine's metadata asks for comes from PyPI, until nothing is missing.
In shared libraries code for other architectures is overwritten with zeros, which compress to nothing; of FlashAttention 3 all
but bf16 without a soft cap too, in heads of 128 and for vLLM 64 and 256. The machine needs this Python, and the torch that the
engine asks for. vLLM 0.26.0 takes 28 MB, in place of 1.8 GB; SGLang 0.5.17 36 MB, in place of 2 GB; FlashInfer for vLLM 3 MB.
Some of FlashInfer's modules are built ahead (flashinfer_modules.py, which says what that needs). `benchmarks/engines.sh`
unpacks all.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from weft.runtime.files import put


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Packages of an engine.

    packages     the engine with its version, and what it imports and does not ask for
    brought      packages that are taken although the machine has another version of them
    left_out     packages that the engine imports only for other models, inputs, back ends, grammars and servers
    placeholders of those, modules whose names the engine imports always: can be imported and not called
    files        parts of the paths of files that are left out
    builder      module of this folder, with its arguments, that adds to the installed packages, if any
    kernels      shared libraries -> what machine code must mention to be kept; all code of other libraries is
    """

    packages: tuple[str, ...]
    brought: frozenset[str] = frozenset()
    left_out: frozenset[str]
    placeholders: tuple[str, ...]
    files: tuple[str, ...]
    kernels: dict[str, re.Pattern[bytes]]
    builder: tuple[str, ...] = ()


# Of FlashAttention 3: the sum of split-KV partials, and the metadata of ragged batches.
ALWAYS = rb"|FlashAttnFwdCombine|prepare_varlen"


def heads(*sizes: int) -> re.Pattern[bytes]:
    """Kernels of FlashAttention 3 for heads of these sizes in bf16, without a soft cap, which is the third flag of a kernel."""
    some = b"|".join(b"%d" % size for size in sizes)
    return re.compile(rb"ELi(?:" + some + rb")ENS_10bfloat16_tEfNS_4arch4Sm90E(?:Lb[01]E){2}Lb0E" + ALWAYS)


ENGINES = {
    "vllm": Engine(
        packages=("vllm==0.26.0",),
        left_out=frozenset(
            (
                "torch", "torchaudio", "torchvision", "triton", "numba", "llvmlite", "xgrammar", "torchcodec", "pynvvideocodec",
                "flashinfer-python", "tilelang", "anthropic", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "quack-kernels",
                "tokenspeed-mla", "humming-kernels", "apache-tvm-ffi", "nvtx", "openai-harmony", "llguidance", "outlines-core",
                "lm-format-enforcer", "fastsafetensors", "cryptography", "fastapi-cloud-cli", "fastar", "sentry-sdk", "rignore",
            )
        ),
        placeholders=("xgrammar", "llguidance", "outlines_core", "lmformatenforcer", "openai_harmony"),
        # FlashAttention 2 and kernels of other architectures, a server in Rust, benchmarks, tokenizers of Mistral.
        files=(
            "_vllm_fa2_C", "vllm/vllm-rs", "fmha_sm100", "vllm/benchmarks/", "mistral_common/data/", "/static/swagger-ui",
            "cpython-310", "cpython-311", "cpython-313", "cpython-314", "pycountry/locales/",
        ),
        kernels={"_vllm_fa3_C": heads(64, 128, 256)},
    ),
    "sglang": Engine(
        packages=("sglang==0.5.17", "dill"),
        # Its registry of configs collides with transformers 5.17's.
        brought=frozenset(("transformers", "tokenizers")),
        # FlashInfer runs by its CUDA sources and nvcc, all but norms, without CuTe DSL, cuDNN and compiled kernels.
        left_out=frozenset(
            (
                "torch", "torchaudio", "torchvision", "triton", "numba", "llvmlite", "xgrammar", "torchcodec", "torchao",
                "tilelang", "anthropic", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "quack-kernels", "nvidia-mathdx",
                "tokenspeed-mla", "humming-kernels", "flash-attn-4", "helion", "kernels", "cuda-python", "cuda-tile",
                "torch-memory-saver", "blobfile", "datasets", "easydict", "interegular", "ipython", "llguidance", "modelscope",
                "mistral-common", "openai-harmony", "outlines", "py-spy", "smg-grpc-servicer", "soundfile", "watchfiles",
                "jiter", "nccl4py", "zstandard",
            )
        ),
        placeholders=("xgrammar", "IPython", "zstandard"),
        # Libraries of other architectures and models, servers in Rust, models of pictures, tests.
        files=(
            "sgl_kernel/sm100/", "sgl_kernel/infllm_ops", "sgl_kernel/flashmla_ops", "sglang/srt/server/_core",
            "sglang/srt/grpc/_core", "sglang/srt/multimodal/_core", "sglang/multimodal_gen/", "sglang/test/",
            "sglang/benchmark/", "sglang/eval/",
        ),
        kernels={"flash_ops": heads(128)},
        builder=("benchmarks.flashinfer_modules", "norm"),
    ),
    # What vLLM 0.26 calls by default on Hopper of the FlashInfer that it asks for; what compiles other modules fails.
    "flashinfer": Engine(
        packages=("flashinfer-python==0.6.14", "apache-tvm-ffi==0.1.10"),
        left_out=frozenset(("torch", "cuda-tile", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl")),
        placeholders=(),
        # Sources, but for the headers of kernels that the GEMM of few rows compiles for each shape.
        files=(
            "data/cccl/", "data/cutlass/", "data/spdlog/", "data/include/", "csrc/fused_moe/", "csrc/nv_internal/cpp/",
            "csrc/nv_internal/include/", "tensorrt_llm/kernels/", "tensorrt_llm/common/", "tensorrt_llm/cutlass_extensions/",
            "tensorrt_llm/thop/", "flashinfer/data/csrc/xqa/", "tvm_ffi/include/", "tvm_ffi/3rdparty/",
        ),
        kernels={},
        builder=("benchmarks.flashinfer_modules", "trtllm_comm", "fp8_blockscale_gemm_90"),
    ),
}  # fmt: skip
PLACEHOLDER = '''"""Stands for a package that is not in the archive: names can be imported and not called."""

import importlib.abc
import importlib.machinery
import sys
import types


class Missing:
    def __init__(self, *args, **kwargs):
        raise RuntimeError(f"{__name__} is not in this archive")

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        return handler.generate_schema(object)


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
__getattr__ = Module(__name__).__getattr__
'''
FATBIN, CUBIN = b"\x50\xed\x55\xba", 2


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


def cut(data: bytes, arch: int, mentioned: re.Pattern[bytes] | None = None) -> bytes:
    """A shared library with the machine code of ``arch`` alone, and of that, what mentions a kernel that is needed."""
    left = bytearray(data)
    for code in codes(data):
        needed = mentioned is None or mentioned.search(data, code.begin, code.end)
        if (code.kind, code.arch) != (CUBIN, arch) or not needed:
            left[code.begin : code.end] = bytes(code.end - code.begin)
    return bytes(left)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def missing(folder: Path, absent: frozenset[str]) -> list[str]:
    """Requirements of the packages in ``folder`` that are neither in it nor ``absent`` on purpose."""
    from packaging.requirements import Requirement

    there = {normal(one.metadata["Name"]): one for one in importlib.metadata.distributions(path=[str(folder)])}
    asked: dict[str, str] = {}
    extras: dict[str, set[str]] = {name: {""} for name in there}
    waiting = list(there)
    while waiting:
        package = waiting.pop()
        for line in there[package].requires or []:
            need = Requirement(line)
            if need.marker is not None and not any(need.marker.evaluate({"extra": one}) for one in extras[package]):
                continue
            name = normal(need.name)
            asked[name] = f"{need.name}{need.specifier}"
            if name in there and not need.extras <= extras[name]:
                extras[name] |= need.extras
                waiting.append(name)
    return [line for name, line in sorted(asked.items()) if name not in there and name not in absent]


def slim(folder: Path, engine: Engine, arch: int) -> None:
    """Leave out of the installed packages what the engine does not need."""
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        name = file.relative_to(folder).as_posix()
        if name.startswith("bin/") or any(part in name for part in engine.files):
            file.unlink()
        elif file.suffix == ".so" and FATBIN in (data := file.read_bytes()):
            [kernels] = [kernels for part, kernels in engine.kernels.items() if part in name] or [None]
            smaller = cut(data, arch, kernels)
            with file.open("wb") as out:
                out.write(smaller)
    for name in engine.placeholders:
        (folder / name).mkdir(exist_ok=True)
        put(folder / name / "__init__.py", PLACEHOLDER)


def make(engine: Engine, target: Path, installed: frozenset[str], work: Path, arch: int) -> None:
    absent = (installed | engine.left_out) - engine.brought
    needs = list(engine.packages)
    while needs:
        print(f"from PyPI: {', '.join(needs)}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(work)]
        subprocess.run([*pip, *needs], check=True)
        needs = missing(work, absent)
    if engine.builder:
        paths = f"{work.resolve()}:{Path(__file__).resolve().parents[1]}"
        subprocess.run([sys.executable, "-m", *engine.builder], check=True, env={**os.environ, "PYTHONPATH": paths})
    slim(work, engine, arch)
    subprocess.run(
        f"tar c --sort=name --exclude=__pycache__ -C '{work}' . | xz -T2 -9e > '{target}'", shell=True, check=True
    )
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("target", type=Path)
    parser.add_argument("--installed", type=Path, required=True, help="names of packages that the machine has")
    parser.add_argument("--work", type=Path, help="folder for the packages (ENGINE-site)")
    parser.add_argument("--arch", type=int, default=90)
    chosen = parser.parse_args()
    names = frozenset(map(normal, chosen.installed.read_text().split()))
    work = chosen.work or Path(f"{chosen.engine}-site")
    make(ENGINES[chosen.engine], chosen.target, names, work, chosen.arch)


if __name__ == "__main__":
    main()
