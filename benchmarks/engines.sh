#!/bin/bash
# Time vLLM and weft on the same models, one machine, random weights: first token, ms a token (benchmarks/engines.py).
#
#     bash benchmarks/engines.sh OUT ARCHIVE MODEL:QUANTIZATION:GPUS:CASES:CACHE_BYTES …
#     bash benchmarks/engines.sh results vllm.tar.xz qwen3-32b:fp8:2:1x128,8x128,32x128,128x128,1x8192:8000000000
#
# ARCHIVE       packages of vLLM that are not installed, unpacked once; "-": they are
# QUANTIZATION  fp8, or bf16
# CACHE_BYTES   of vLLM's KV cache on a GPU: its engines start at the same time, and share the memory
#
# All of vLLM's engines start together, wait for each other, and measure in turn; then all of weft's. OUT gets a JSON file and a
# log for each. An engine that fails is tried once more: vLLM without torch.compile and with spawned
# processes, weft by itself.
set -u
out=$1 archive=$2
shift 2
site=/tmp/vllm-site
mkdir -p "$out"
begin=$SECONDS
say() { echo "[$((SECONDS - begin)) s] $*"; }

if [ "$archive" != - ] && [ ! -d $site/vllm ]; then
    mkdir -p $site && tar -xJf "$archive" -C $site || exit 1
    python -m compileall -q -j 16 --invalidation-mode unchecked-hash $site > /dev/null 2>&1
    say "unpacked"
fi

has_rows() { [ -s "$1" ] && grep -q first_ms "$1"; }

# measure ENGINE MODEL QUANTIZATION GPUS CASES OPTIONS ROOM ENGINES
measure() {
    local name=$1-$2-$3 quantized=() path=$PWD
    [ "$3" = bf16 ] || quantized=(--quantization "$3")
    [ "$1" = vllm ] && path=$PWD:$site
    PYTHONPATH=$path:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CACHE_ROOT=/tmp/vllm-cache \
        VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0 VLLM_DEEP_GEMM_WARMUP=skip TQDM_DISABLE=1 \
        timeout -k 5 ${SECONDS_OF_A_RUN:-220} python -m benchmarks.engines run "$1" --model "$2" "${quantized[@]}" --world-size "$4" \
        --cases "$5" --options "$6" --repeats 2 --seconds 2.5 --room "$7" --engines "$8" --json "$out/$name.json" \
        >> "$out/$name.log" 2>&1
    local code=$?
    grep -a "ms a token\|ready after" "$out/$name.log" || true
    if ! has_rows "$out/$name.json"; then
        say "$name failed with $code, the end of its log:"
        grep -av "^ *$" "$out/$name.log" | grep -a "Error\|error\|assert" | tail -12 | cut -c1-300
        tail -30 "$out/$name.log" | cut -c1-300
    fi
}

eager='"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32, 128]}'

beside() {
    local engine=$1 room job options
    shift
    room=$(mktemp -d)
    for job in "$@"; do
        IFS=: read -r model quantization gpus cases cache <<< "$job"
        options='{"memory_fraction": 0.2}'
        [ "$engine" = vllm ] && options="{\"gpu_memory_utilization\": 0.2, \"kv_cache_memory_bytes\": $cache}"
        measure "$engine" "$model" "$quantization" "$gpus" "$cases" "$options" "$room" $# &
    done
    wait
    for job in "$@"; do
        IFS=: read -r model quantization gpus cases cache <<< "$job"
        has_rows "$out/$engine-$model-$quantization.json" && continue
        options='{}'
        [ "$engine" = vllm ] && options="{\"gpu_memory_utilization\": 0.2, \"kv_cache_memory_bytes\": $cache, $eager}"
        say "$engine $model $quantization once more"
        VLLM_WORKER_MULTIPROC_METHOD=spawn SECONDS_OF_A_RUN=100 measure "$engine" "$model" "$quantization" "$gpus" "$cases" "$options" "$(mktemp -d)" 1
    done
    say "$engine is done"
}

beside vllm "$@"
grep -ahoE "Using [A-Za-z0-9_ -]*(ackend|Fp8|kernel|attention|attn).{0,120}|custom allreduce.{0,80}|torch.compile took.{0,40}|Graph capturing finished.{0,60}|init engine.{0,80}" \
    "$out"/vllm-*.log | sort | uniq -c | sort -rn | head -25 | cut -c1-220
beside weft "$@"
for job in "$@"; do
    IFS=: read -r model quantization gpus cases cache <<< "$job"
    python -m benchmarks.engines table "$out/weft-$model-$quantization.json" "$out/vllm-$model-$quantization.json"
done
