"""Modules of FlashInfer that engines call on Hopper, built ahead of time by FlashInfer's own build.

    PYTHONPATH=FOLDER:. python3.12 -m benchmarks.flashinfer_modules trtllm_comm fp8_blockscale_gemm_90
    PYTHONPATH=FOLDER:. python3.12 -m benchmarks.flashinfer_modules norm

FOLDER has flashinfer-python; its `data/aot` gets vLLM's all-reduce with norm (flashinfer_norm.cu) and GEMM of few rows in
blocks of fp8, or SGLang's norms, which FlashInfer loads from there in place of compiling them, the first two for eight minutes.
Needed: ninja, torch with its CUDA headers, and nvcc of the same CUDA version in CUDA_HOME or in the path. No GPU is.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashinfer.jit.core import JitSpec

HERE = Path(__file__).parent
ARCH = "9.0a"


MAKERS = {
    "trtllm_comm": ("flashinfer.jit.comm", "gen_trtllm_comm_module"),
    "fp8_blockscale_gemm_90": ("flashinfer.jit.gemm.fp8_blockscale", "gen_fp8_blockscale_gemm_sm90_module"),
    "norm": ("flashinfer.jit.norm", "gen_norm_module"),
}


def module_of(name: str) -> JitSpec:
    place, maker = MAKERS[name]
    module: JitSpec = getattr(importlib.import_module(place), maker)()
    if name == "trtllm_comm":
        module.sources = [HERE / "flashinfer_norm.cu"]
    return module


def link_names(folder: Path) -> None:
    """Empty libraries in place of those that the modules name at their link and find at run time."""
    for name in ("cuda", "nvrtc"):
        soname = f"-Wl,-soname,lib{name}.so.{1 if name == 'cuda' else 13}"
        library = folder / f"lib{name}.so"
        subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", soname, "-o", str(library)], check=True)


def main() -> None:
    import torch

    headers = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "include"
    with tempfile.TemporaryDirectory() as work:
        link_names(Path(work))
        # FlashInfer reads these when it is imported.
        os.environ |= {
            "FLASHINFER_CUDA_ARCH_LIST": ARCH, "FLASHINFER_WORKSPACE_BASE": work, "LIBRARY_PATH": work,
            "CPLUS_INCLUDE_PATH": str(headers),
        }  # fmt: skip
        for module in map(module_of, sys.argv[1:]):
            if not module.is_aot:
                module.build(verbose=False, need_lock=False)
                module.aot_path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(module.jit_library_path, module.aot_path)
            print(f"{module.aot_path}: {module.aot_path.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
