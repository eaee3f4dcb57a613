#!/bin/bash
# Run a command with the packages, caches and variables of vLLM or SGLang from archives (benchmarks/engine_archive.py), or of weft.
#
#     bash benchmarks/engine_packages.sh ENGINE ARCHIVES COMMAND…
#
# ARCHIVES as in benchmarks/engines.sh, which reads this file; "-": the packages are installed. Each is unpacked once, into
# /tmp/ENGINE-site, and of caches.tar.xz beside the first archive the engine's folder into /tmp.

# archives_of ENGINE: a line each
archives_of() { tr , '\n' <<< "$archives" | grep -E "(^|/)$1[^/]*$"; }

# unpack ENGINE: of several scripts one does
unpack() {
    local site=/tmp/$1-site packages archive caches
    mapfile -t packages < <(archives_of "$1")
    caches=$(dirname "${archives%%,*}")/caches.tar.xz
    exec 9> /tmp/engine-sites.lock && flock 9
    if [ "$(cat "$site/unpacked" 2> /dev/null)" != "${packages[*]}" ]; then
        rm -rf "$site" && mkdir -p "$site"
        for archive in "${packages[@]}"; do tar -xJf "$archive" -C "$site" || return 1; done
        echo "${packages[*]}" > "$site/unpacked"
        python -m compileall -q -j 32 --invalidation-mode unchecked-hash "$site" > /dev/null 2>&1
    fi
    if [ -e "$caches" ] && [ ! -d "/tmp/$1-cache" ]; then tar -xJf "$caches" -C / "tmp/$1-cache" 2> /dev/null; fi
    exec 9>&-
}

# with_packages ENGINE COMMAND…: in place of this shell, with the engine's packages and caches, no network and no NVLink multicast
with_packages() {
    local engine=$1 cache=/tmp/$1-cache path=$PWD variables=() driver cuda
    shift
    [ "$engine" = weft ] || [ "$archives" = - ] || path=$PWD:/tmp/$engine-site
    case $engine in
    vllm)
        variables=(VLLM_NO_USAGE_STATS=1 "VLLM_CACHE_ROOT=$cache" VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0
            VLLM_DEEP_GEMM_WARMUP=skip "TRITON_CACHE_DIR=$cache/triton" "TRTLLM_DG_CACHE_DIR=$cache/tensorrt_llm")
        # FlashInfer's all-reduces over pointers, where multicast is off, each buffer in an allocation of its own. Of its
        # modules those that are built ahead alone run: others would be compiled for minutes. vLLM looks for nvcc in the path.
        # FlashInfer's fp8_blockscale_gemm_90 calls libcuda.so.1 without being linked with it.
        [ "$archives" = - ] || variables+=(LD_PRELOAD=libcuda.so.1 VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm
            TORCH_SYMMMEM_IMPLICIT_POOL=0 FLASHINFER_DISABLE_JIT=1 FLASHINFER_CUDA_ARCH_LIST=9.0a "FLASHINFER_WORKSPACE_BASE=$cache"
            "PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin")
        ;;
    sglang)
        # Its kernels are linked with libcuda.so, which a driver alone does not bring by that name, and FlashInfer's with
        # libcudart.so and cuBLAS's headers, which a compiler without the whole toolkit lacks: torch's packages have them.
        driver=$(ldconfig -p | awk '/libcuda.so.1/ { print $NF; exit }')
        cuda=$(python -c "from importlib.util import find_spec as of; print(of('torch').origin[:-18])")/nvidia/cu13
        mkdir -p "$cache/lib" && ln -sfn "$cuda/lib/libcudart.so.13" "$cache/lib/libcudart.so"
        [ -z "$driver" ] || ln -sfn "$driver" "$cache/lib/libcuda.so"
        # DeepGEMM's kernels are compiled when they are first called, in place of all sizes in ten minutes; the memory of two
        # GPUs differs while other engines start.
        variables=("LIBRARY_PATH=$cache/lib:${LIBRARY_PATH:-}" "CPLUS_INCLUDE_PATH=${CPLUS_INCLUDE_PATH:+$CPLUS_INCLUDE_PATH:}$cuda/include"
            SGLANG_JIT_DEEPGEMM_PRECOMPILE=0
            SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0 "SGLANG_CACHE_DIR=$cache/sglang" "SGLANG_DG_CACHE_DIR=$cache/deep_gemm"
            "TVM_FFI_CACHE_DIR=$cache/tvm-ffi" "FLASHINFER_WORKSPACE_BASE=$cache" "TRITON_CACHE_DIR=$cache/triton"
            "TORCHINDUCTOR_CACHE_DIR=$cache/inductor")
        ;;
    esac
    exec env "PYTHONPATH=$path:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TQDM_DISABLE=1 NCCL_NVLS_ENABLE=0 \
        NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 "${variables[@]}" "$@"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -u
    engine=$1 archives=$2
    shift 2
    [ "$engine" = weft ] || [ "$archives" = - ] || unpack "$engine" || exit 1
    with_packages "$engine" "$@"
fi
