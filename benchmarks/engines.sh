#!/bin/bash
# Time vLLM and weft on the same models, one machine, random weights: first token, ms a token (benchmarks/engines.py).
#
#     bash benchmarks/engines.sh OUT ARCHIVE MODEL:QUANTIZATION:GPUS:CASES:CACHE_BYTES[:DRAFTS:ACCEPTANCE] … [plugin:MODEL:GPUS:CACHE_BYTES]
#     bash benchmarks/engines.sh results vllm.tar.xz qwen3-32b:fp8:2:1x128,8x128,32x128,128x128,1x8192:8000000000
#
# ARCHIVE       packages of vLLM that are not installed (benchmarks/vllm_archive.py), unpacked once; "-": they are
# QUANTIZATION  fp8, or bf16
# CACHE_BYTES   of vLLM's KV cache on a GPU: its engines start at the same time, and share the memory
# DRAFTS        tokens that the model's MTP head drafts; ACCEPTANCE: tokens of a step on average, drawn
# plugin:…      vLLM without and with weft's plugin (benchmarks/doors/vllm_plugin.py)
#
# All of vLLM's engines start together, wait a minute for each other, and measure in turn; then all of weft's. OUT gets a JSON file
# and a log for each. Engines that fail in the first half of TOTAL_SECONDS (600) are tried once more: vLLM without torch.compile
# and with spawned processes. vLLM is imported once before, and left out if that fails; the variable ENGINES ("vllm", "weft") leaves
# the other engine out. SECONDS_OF_A_RUN (300) ends one engine.
#
# Start two of vLLM's engines at once, not more. Four of them on two H200s and 64 cores, caches cold: unpacked after 12 s, imported
# after 25; models inspected for 20 to 45 s each (a process that imports vLLM, again for an MTP head), weights after 40 to 60,
# torch.compile 55 to 79 s, the profiling run 11 to 20 s (110 s for gated delta nets beside three others), graphs 22 to 35 s, in which
# nvcc compiles DeepGEMM's kernels; ready after 156 s and more. OUT gets caches.tar.xz of all that was compiled, which lies beside
# ARCHIVE the next time: then a start is a matter of weights and graphs.
set -u
out=$1 archive=$2
shift 2
site=/tmp/vllm-site caches=/tmp/vllm-cache
mkdir -p "$out"
begin=$SECONDS
sessions=$(mktemp)
# Workers outlive an engine that was stopped, and hold its memory.
end_all() { for session in $(cat "$sessions"); do kill -KILL -- "-$session" 2> /dev/null; done; }
trap end_all EXIT
trap 'exit 143' TERM INT
say() { echo "[$((SECONDS - begin)) s] $*"; }

if [ "$archive" != - ]; then
    exec 9> $site.lock && flock 9 # of several scripts one unpacks
    if [ ! -e $site/unpacked ]; then
        mkdir -p $site && tar -xJf "$archive" -C $site && touch $site/unpacked || exit 1
        python -m compileall -q -j 32 --invalidation-mode unchecked-hash $site > /dev/null 2>&1
        say "unpacked"
    fi
    exec 9>&-
    if [ -e "$(dirname "$archive")/caches.tar.xz" ] && [ ! -d $caches ]; then
        tar -xJf "$(dirname "$archive")/caches.tar.xz" -C / && say "caches unpacked"
    fi
fi

has_rows() { [ -s "$1" ] && grep -q first_ms "$1"; }

# python_of ENGINE NAME ARGUMENTS…: a run of a module, its log, and the end of that where it fails
python_of() {
    local engine=$1 name=$2 path=$PWD kernels=() code
    shift 2
    [ "$engine" = vllm ] && path=$PWD:$site kernels=(TRITON_CACHE_DIR=$caches/triton)
    PYTHONPATH=$path:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CACHE_ROOT=$caches \
        VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0 VLLM_DEEP_GEMM_WARMUP=skip TQDM_DISABLE=1 \
        env "${kernels[@]}" setsid timeout -k 5 "${SECONDS_OF_A_RUN:-300}" python -m "$@" --json "$out/$name.json" >> "$out/$name.log" 2>&1 &
    echo $! >> "$sessions"
    wait $!
    code=$?
    grep -a "ms a token\|ready after" "$out/$name.log" || true
    if ! has_rows "$out/$name.json"; then
        say "$name failed with $code, the end of its log:"
        grep -a "Error\|error\|assert" "$out/$name.log" | tail -12 | cut -c1-300
        tail -30 "$out/$name.log" | cut -c1-300
    fi
}

eager='"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32, 128]}'

# name_of ENGINE JOB
name_of() {
    IFS=: read -r model quantization gpus cases cache drafts acceptance <<< "$2"
    echo "$1-$model-$quantization${drafts:+-$drafts-drafts}"
}

# measure ENGINE JOB ROOM ENGINES MORE: MORE stands in the engine's options, before the options of a shared GPU
measure() {
    local engine=$1 room=$3 engines=$4 more=$5 options='"memory_fraction": 0.2' quantized=() drafting=()
    IFS=: read -r model quantization gpus cases cache drafts acceptance <<< "$2"
    [ "$engine" = vllm ] && options="\"gpu_memory_utilization\": 0.2, \"kv_cache_memory_bytes\": $cache"
    [ "$quantization" = bf16 ] || quantized=(--quantization "$quantization")
    [ -z "$drafts" ] || drafting=(--drafts "$drafts" --acceptance "$acceptance")
    python_of "$engine" "$(name_of "$engine" "$2")" benchmarks.engines run "$engine" --model "$model" "${quantized[@]}" \
        "${drafting[@]}" --world-size "$gpus" --cases "$cases" --options "{$more$options}" --repeats 3 --seconds 2 \
        --room "$room" --engines "$engines"
}

# plugin JOB ON-OR-OFF ROOM ENGINES
plugin() {
    IFS=: read -r _ model gpus cache <<< "$1"
    python_of vllm "plugin-$2-$model" benchmarks.doors.vllm_plugin run --plugin "$2" --model "$model" --world-size "$gpus" \
        --options "{\"gpu_memory_utilization\": 0.2, \"kv_cache_memory_bytes\": $cache}" --room "$3" --engines "$4"
}

# beside ENGINE JOB…
beside() {
    local engine=$1 room number=0 job failed
    shift
    room=$(mktemp -d)
    for job in "$@"; do
        case $job in plugin:*) [ "$engine" = vllm ] && number=$((number + 2)) ;; *) number=$((number + 1)) ;; esac
    done
    for job in "$@"; do
        case $job in
        plugin:*) [ "$engine" = vllm ] && { plugin "$job" off "$room" $number & plugin "$job" on "$room" $number & } ;;
        *) measure "$engine" "$job" "$room" $number "" & ;;
        esac
    done
    wait
    failed=()
    for job in "$@"; do
        case $job in plugin:*) continue ;; esac
        has_rows "$out/$(name_of "$engine" "$job").json" || failed+=("$job")
    done
    if [ ${#failed[@]} -gt 0 ] && [ $((SECONDS - begin)) -lt $((${TOTAL_SECONDS:-600} / 2)) ]; then
        end_all
        say "once more: ${failed[*]}"
        room=$(mktemp -d)
        for job in "${failed[@]}"; do
            VLLM_WORKER_MULTIPROC_METHOD=spawn SECONDS_OF_A_RUN=$((${TOTAL_SECONDS:-600} / 2)) \
                measure "$engine" "$job" "$room" ${#failed[@]} "$([ "$engine" = vllm ] && echo "$eager, ")" &
        done
        wait
    fi
    end_all
    say "$engine is done"
}

engines=${ENGINES:-vllm weft}
if [[ $engines == *vllm* ]]; then
    imports='import vllm.v1.worker.gpu_worker, vllm.v1.worker.gpu_model_runner, vllm.v1.engine.core, vllm.model_executor.models.qwen3_5'
    if PYTHONPATH=$PWD:$site:${PYTHONPATH:-} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 timeout 100 python -c \
        "$imports; from vllm import LLM; print('vLLM is imported')" > "$out/import.log" 2>&1; then
        say "vLLM is imported"
    else
        say "vLLM is left out: its import failed" && tail -30 "$out/import.log" | cut -c1-300
        engines=${engines/vllm/}
    fi
fi

if [[ $engines == *vllm* ]]; then
    beside vllm "$@"
    [ "$archive" = - ] || tar -cJf "$out/caches.tar.xz" -C / ${caches#/}
fi
grep -ahoE "Using [A-Za-z0-9_ -]*(ackend|Fp8|kernel|attention|attn).{0,120}|custom allreduce.{0,80}|torch.compile took.{0,40}|Graph capturing finished.{0,60}|init engine.{0,80}" \
    "$out"/{vllm,plugin}-*.log 2> /dev/null | sort | uniq -c | sort -rn | head -25 | cut -c1-220
[[ $engines == *weft* ]] && beside weft "$@"
[[ $engines == *vllm* && $engines == *weft* ]] || exit 0
for job in "$@"; do
    case $job in
    plugin:*)
        IFS=: read -r _ model gpus cache <<< "$job"
        python -m benchmarks.doors.vllm_plugin table "$out/plugin-off-$model.json" "$out/plugin-on-$model.json"
        ;;
    *) python -m benchmarks.engines table "$out/$(name_of weft "$job").json" "$out/$(name_of vllm "$job").json" ;;
    esac
done
