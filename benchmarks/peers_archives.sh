#!/bin/sh
# Make the archives that benchmarks/peers.sh unpacks, for Hopper and Python 3.12, without a CUDA toolkit or a GPU.
#
#     sh benchmarks/peers_archives.sh OUT
#
# OUT gets titan.tar.xz (1.1 MB), flashinfer.tar.xz (1.4 MB) and deepgemm.tar.xz (3.1 MB). PYTHON (default: python3.12) needs only
# pip; wheels, nvcc 13.0 and headers come from PyPI into OUT/work. Of FlashInfer these are the modules that are timed, unchanged,
# between stand-ins for what its package imports at its top, and its all-reduce with norm, built by benchmarks/flashinfer_norm.cu.
set -eu
[ $# -eq 1 ] || { echo "usage: sh $0 OUT" >&2 && exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/work"
out=$(cd "$1" && pwd) work=$out/work
install() { "${PYTHON:-python3.12}" -m pip install -q --no-deps --no-compile --upgrade --target "$@"; }

install "$work/titan" torchtitan==0.3.0 spmd_types==0.2.3 einops tyro typeguard docstring_parser shtab
rm -rf "$work/titan/bin" "$work/titan/torchtitan_recipes"

install "$work/ffi" apache-tvm-ffi==0.1.11
install "$work/deepgemm" sgl-deep-gemm==0.1.5.post1
strip -s "$work/deepgemm/deep_gemm/_C.so"

install "$work/whole" flashinfer-python==0.7.2.post1
install "$work/cuda" nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.* nvidia-cuda-runtime==13.0.* \
    nvidia-cuda-cccl==13.0.*
cuda=$work/cuda/nvidia/cu13 data=$work/whole/flashinfer/data
chmod +x "$cuda"/bin/* "$cuda"/nvvm/bin/*
# As FlashInfer's flags for sm_90a.
"$cuda/bin/nvcc" -std=c++17 -O3 -use_fast_math -DNDEBUG -w -DPy_LIMITED_API=0x03090000 -D_GLIBCXX_USE_CXX11_ABI=1 \
    --compiler-options=-fPIC --expt-relaxed-constexpr -static-global-template-stub=false -gencode=arch=compute_90a,code=sm_90a \
    -DFLASHINFER_ENABLE_F16 -DFLASHINFER_ENABLE_BF16 -DFLASHINFER_ENABLE_FP8_E4M3 -DFLASHINFER_ENABLE_FP8_E5M2 \
    -DFLASHINFER_ENABLE_FP8_E8M0 -DFLASHINFER_ENABLE_FP4_E2M1 "-I$data/cccl/libcudacxx/include" "-I$data/cccl/cub" \
    "-I$data/cccl/thrust" "-I$data/include" "-I$data/csrc" "-I$data/cutlass/include" "-I$data/spdlog/include" \
    "-I$work/ffi/tvm_ffi/include" "-I$cuda/include" -c "$here/flashinfer_norm.cu" -o "$work/norm.o"

package=$work/flashinfer/flashinfer
rm -rf "$work/flashinfer"
mkdir -p "$package/jit" "$package/comm/all_gather_matmul"
for name in trtllm_ar cuda_ipc torch_symmetric_memory all_gather_matmul/__init__ all_gather_matmul/all_gather_matmul \
    all_gather_matmul/all_gather_matmul_triton all_gather_matmul/broadcast_input all_gather_matmul/configs; do
    cp "$work/whole/flashinfer/comm/$name.py" "$package/comm/$name.py"
done
c++ -shared -s "$work/norm.o" -o "$package/trtllm_comm.so" -L"$cuda/lib" -l:libcudart.so.13 -L"$work/ffi/tvm_ffi/lib" -ltvm_ffi
touch "$package/comm/__init__.py" "$package/jit/__init__.py"
echo '__version__ = "0.7.2.post1"' > "$package/__init__.py"
cat > "$package/utils.py" << 'PYTHON'
def register_custom_op(name, fn=None, /, *, mutates_args, device_types=None, schema=None):
    return lambda function: function


def round_up(x, y):
    return -(-x // y) * y
PYTHON
cat > "$package/comm/mnnvl.py" << 'PYTHON'
class CommBackend: ...


class SymmDeviceMemory: ...


class TorchDistBackend: ...
PYTHON
cat > "$package/jit/comm.py" << 'PYTHON'
from pathlib import Path
from types import SimpleNamespace

import tvm_ffi


def gen_trtllm_comm_module():
    file = Path(__file__).resolve().parents[1] / "trtllm_comm.so"
    return SimpleNamespace(build_and_load=lambda: tvm_ffi.load_module(str(file)))
PYTHON

for name in flashinfer deepgemm; do
    cp -r "$work/ffi/tvm_ffi" "$work/ffi"/apache_tvm_ffi-*.dist-info "$work/$name"
    rm -rf "$work/$name/tvm_ffi/include" "$work/$name/tvm_ffi/3rdparty"
done
for name in titan flashinfer deepgemm; do
    tar -C "$work/$name" --exclude __pycache__ -cJf "$out/$name.tar.xz" .
done
ls -l "$out"/*.tar.xz
