#!/bin/sh
# Build DeepEP (V1, within a node) and pplx-kernels for `weft bench moe-dispatch moe-combine`, without a CUDA toolkit or a GPU.
#
#     sh benchmarks/packages.sh OUT DEEPEP PPLX
#
# OUT     folder for the two packages: then PYTHONPATH=OUT weft bench moe-dispatch moe-combine --world-size 2
# DEEPEP  checkout of github.com/deepseek-ai/DeepEP at v1.2.1
# PPLX    checkout of github.com/perplexityai/pplx-kernels at 12cecfd, before it needed nvshmem4py
#
# PYTHON (default: python3) has the torch that will run them, with its NVIDIA packages, for CUDA 13; nvcc 13.0 and headers come from
# PyPI into OUT/cuda. ARCH (default: 90a): of H100 and H200. Two minutes on two cores.
set -eu
[ $# -eq 3 ] || { echo "usage: sh $0 OUT DEEPEP PPLX" >&2 && exit 2; }
python=${PYTHON:-python3} arch=${ARCH:-90a}
mkdir -p "$1/objects"
out=$(cd "$1" && pwd) deepep=$(cd "$2" && pwd) pplx=$(cd "$3" && pwd)

site=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
python_headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
if [ ! -d "$out/cuda" ]; then
    "$python" -m pip install -q --no-deps --target "$out/cuda" nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.* \
        nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.*
fi
cuda=$out/cuda/nvidia/cu13 torch=$site/torch nvshmem=$site/nvidia/nvshmem
chmod +x "$cuda"/bin/* "$cuda"/nvvm/bin/*
headers="-I$cuda/include -I$cuda/include/cccl -I$site/nvidia/cu13/include -I$torch/include -I$torch/include/torch/csrc/api/include"
headers="$headers -I$python_headers -I$nvshmem/include"
libraries="-L$cuda/lib -l:libcudart.so.13 -l:libcudadevrt.a -L$torch/lib -Wl,--no-as-needed -lc10 -lc10_cuda -ltorch -ltorch_cpu"
libraries="$libraries -ltorch_cuda"

# compile NAME FLAGS FILE…: objects of sources below the current folder; where rdc=true, what links device code of all of them
compile() {
    name=$1 flags=$2 objects="" device=""
    shift 2
    for file in "$@"; do
        object=$out/objects/$name-$(echo "$file" | tr / -).o
        case $file in
        *.cu)
            "$cuda/bin/nvcc" -std=c++17 -O3 -Xcompiler -fPIC -rdc=$rdc --expt-relaxed-constexpr \
                -gencode "arch=compute_$arch,code=sm_$arch" $nvcc_flags $flags $headers -c "$file" -o "$object"
            device="$device $object"
            ;;
        *) c++ -std=c++17 -O2 -fPIC -w $flags $headers -c "$file" -o "$object" ;;
        esac
        objects="$objects $object"
    done
    [ $rdc = true ] || return 0
    "$cuda/bin/nvcc" -dlink -gencode "arch=compute_$arch,code=sm_$arch" -Xcompiler -fPIC $device -o "$out/objects/$name-link.o" \
        -L"$cuda/lib" -L"$nvshmem/lib" -lnvshmem_device
    objects="$objects $out/objects/$name-link.o"
}

cd "$deepep/csrc"
# Whole kernels: a device link drops those that host code names only through a variable.
rdc=false nvcc_flags=--ptxas-options=--register-usage-level=10 # as its setup.py
compile deep_ep "-I. -DDISABLE_NVSHMEM -DDISABLE_AGGRESSIVE_PTX_INSTRS -DTORCH_EXTENSION_NAME=deep_ep_cpp" \
    kernels/runtime.cu kernels/layout.cu kernels/intranode.cu deep_ep.cpp
c++ -shared $objects -o "$out/deep_ep_cpp.so" $libraries -ltorch_python
rm -rf "$out/deep_ep"
cp -r "$deepep/deep_ep" "$out/deep_ep"

cd "$pplx/csrc"
rdc=true nvcc_flags= # for NVSHMEM's device library
compile pplx "-I. -DPy_LIMITED_API=0x03090000 -DTORCH_EXTENSION_NAME=pplx_kernels" \
    all_to_all/internode_combine.cu all_to_all/internode_dispatch.cu all_to_all/intranode_combine.cu \
    all_to_all/intranode_dispatch.cu core/kernels.cu all_to_all/all_to_all.cpp all_to_all/internode.cpp \
    all_to_all/intranode.cpp core/distributed.cpp bindings/all_to_all_ops.cpp bindings/bindings.cpp bindings/nvshmem.cpp
rm -rf "$out/pplx_kernels"
cp -r "$pplx/src/pplx_kernels" "$out/pplx_kernels"
c++ -shared $objects -o "$out/pplx_kernels/libpplx_kernels.so" $libraries -L"$nvshmem/lib" -l:libnvshmem_host.so.3 \
    -l:libnvshmem_device.a

PYTHONPATH=$out "$python" -c 'import torch, deep_ep, pplx_kernels; print(deep_ep.Buffer, pplx_kernels.AllToAll)'
