#!/bin/bash
# Time kernels and trainers of others beside weft on some GPUs of a machine: bash benchmarks/peers.sh OUT FOLDER [STEP…]
#
# OUT     gets a JSON file or a folder of them for each step, and its log
# FOLDER  holds titan.tar.xz, flashinfer.tar.xz and deepgemm.tar.xz, made by benchmarks/peers_archives.sh and each unpacked once
#
# In the environment: WORLD_SIZE (2); CUDA_VISIBLE_DEVICES for other GPUs than the first; SECONDS_OF_A_STEP (120) ends a step. A step
# that fails leaves the others. Steps, all by default:
#   titan       layers of torchtitan's Llama 3 8B, its tensor parallelism without and with weft
#   flashinfer  FlashInfer's all-reduce with norm, and its AG-GEMM in Triton
#   deepgemm    DeepGEMM's fp8 GEMMs on one GPU: those of all experts, and dense ones
#   megamoe     DeepGEMM's MegaMoE, a whole mixture of experts in fp8 over the GPUs; compiled for all shapes at the same time first
set -u
cd "$(dirname "$0")/.." || exit 1
out=${1:?OUT is missing} folder=${2:?FOLDER is missing}
shift 2
[ $# -gt 0 ] || set -- titan flashinfer deepgemm megamoe
for step in "$@"; do
    case $step in
    titan | flashinfer | deepgemm | megamoe) ;;
    *) echo "$0: step $step is not one of titan, flashinfer, deepgemm, megamoe" >&2 && exit 2 ;;
    esac
done
world=${WORLD_SIZE:-2} site=${TMPDIR:-/tmp}/weft-peers
mkdir -p "$out" "$site"
# A mapping with multicast would need the fabric's; nothing here uses it.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
# FlashInfer and DeepGEMM take an allocation's start for their tensor's, which torch's pool of symmetric memory breaks.
export TORCH_SYMMMEM_IMPLICIT_POOL=0
begin=$SECONDS
say() { echo "[$((SECONDS - begin)) s] $*"; }

# packages NAME: unpack its archive where that was not done
packages() {
    exec 9> "$site/$1.lock" && flock 9 # of several scripts one unpacks
    if [ ! -e "$site/$1/unpacked" ]; then
        mkdir -p "$site/$1" && tar -xJf "$folder/$1.tar.xz" -C "$site/$1" && touch "$site/$1/unpacked" || return 1
    fi
    exec 9>&-
}

# timed NAME PACKAGES MODULE ARGUMENTS…: a run of a module, its log, and the end of that where it fails
timed() {
    local name=$1 path=$2 start=$SECONDS code
    shift 2
    packages "$path" || { say "$name: $folder/$path.tar.xz is missing or broken" && return 1; }
    PYTHONPATH=$PWD:$site/$path:${PYTHONPATH:-} PYTHONUNBUFFERED=1 DG_JIT_CACHE_DIR=$site/deepgemm-cache \
        timeout -k 5 "${SECONDS_OF_A_STEP:-120}" python -m "$@" > "$out/$name.log" 2>&1
    code=$?
    if [ $code -ne 0 ]; then
        say "$name failed with $code after $((SECONDS - start)) s, the end of its log:"
        tail -30 "$out/$name.log" | cut -c1-300
    else
        say "$name took $((SECONDS - start)) s"
        tail -25 "$out/$name.log" | cut -c1-220
    fi
    return $code
}

failed=
for step in "$@"; do
    case $step in
    titan)
        timed titan titan benchmarks.doors.torchtitan_llama --world-size "$world" --json "$out/titan.json" || failed="$failed titan"
        ;;
    flashinfer)
        timed flashinfer flashinfer weft bench all-reduce-rms-norm@qwen3-32b:1,8,32,128,512,2048 ag-gemm@qwen3-32b:1024,4096,8192 \
            --providers weft.auto,flashinfer,nccl+compile,torch.one_shot+compile,cublas+nccl,torch.fused,cublas --quick \
            --world-size "$world" --out "$out/flashinfer" || failed="$failed flashinfer"
        ;;
    deepgemm)
        timed deepgemm-grouped deepgemm benchmarks.fp8_grouped "$out/fp8-grouped.json" --no-sweep --seconds 45 --tokens 128,4096 \
            || failed="$failed deepgemm-grouped"
        timed deepgemm-dense deepgemm benchmarks.fp8_gemm "$out/fp8-gemm.json" --no-sweep --seconds 45 --rows 16,128,4096 \
            || failed="$failed deepgemm-dense"
        ;;
    megamoe)
        for shape in qwen3-30b-a3b:128 qwen3-30b-a3b:4096 deepseek-v3:128 deepseek-v3:4096; do
            SECONDS_OF_A_STEP=75 timed "megamoe-compile-${shape//:/-}" deepgemm benchmarks.mega_moe "$shape" --once \
                --world-size "$world" &
        done
        wait
        timed megamoe deepgemm benchmarks.mega_moe --world-size "$world" --json "$out/megamoe.json" || failed="$failed megamoe"
        ;;
    esac
done
say "done${failed:+; failed:$failed}"
[ -z "$failed" ]
