#!/bin/bash
# Time vLLM, SGLang and weft on the same models, one machine, random weights: first token, ms a token (benchmarks/engines.py).
#
#     bash benchmarks/engines.sh OUT ARCHIVES MODEL:QUANTIZATION:GPUS:CASES:CACHE_BYTES[:DRAFTS:ACCEPTANCE] … [plugin:MODEL:GPUS:CACHE_BYTES]
#     bash benchmarks/engines.sh results vllm.tar.xz,sglang.tar.xz qwen3-32b:fp8:2:1x128,8x128,32x128,128x128,1x8192:8000000000
#
# ARCHIVES      vllm.tar.xz, vllm-flashinfer.tar.xz, sglang.tar.xz with commas between (benchmarks/engine_archive.py): packages
#               that are not installed, unpacked once into a folder for each engine; an engine without an archive is left out.
#               "-": all are installed. Without FlashInfer vLLM fuses no all-reduces with norms
# QUANTIZATION  fp8, or bf16: as the model is published, gpt-oss with experts in MXFP4
# CACHE_BYTES   of an engine's KV cache on a GPU: engines start at the same time, and share the memory. vLLM keeps states of
#               gated delta nets there, one for each draft too: on one of two GPUs 300 MB a sequence of Qwen3.6-27B with three
# DRAFTS        tokens that the model's MTP head drafts, not in SGLang; ACCEPTANCE: tokens of a step on average, drawn. The variable
#               DRAFT_HEAD (fp8) says what weft's drafts are chosen by
# plugin:…      vLLM without and with weft's plugin (benchmarks/doors/vllm_plugin.py)
#
# The engines of the variable ENGINES ("vllm sglang weft") come one after the other, as it orders them. AT_ONCE (all) of an
# engine's models start together, wait for each other until four minutes after their start, and measure in turn; then its next
# ones. OUT gets a JSON file, written after each row, and a log for each. Engines that fail in the first half of TOTAL_SECONDS (600)
# are tried once more: vLLM without torch.compile and with spawned processes, SGLang with the all-reduce of its package and no
# graphs of prompts. vLLM and SGLang are imported once before, and left out if that fails. SECONDS_OF_A_RUN (300) ends one
# engine. CUDA_VISIBLE_DEVICES gives a part of the GPUs: scripts on other GPUs can run at the same time with the same archives
# and another OUT. On one GPU the models' DeepGEMM kernels are compiled by all cores while the engines start
# (engine_kernels.py), and no engine measures before they are. For one H200, two models at once:
#
#     AT_ONCE=2 ENGINES="weft vllm sglang" bash benchmarks/engines.sh OUT vllm.tar.xz,vllm-flashinfer.tar.xz,sglang.tar.xz \
#         qwen3-8b:bf16:1:1x128,8x128,32x128,128x128,1x8192,16x8192:20000000000 qwen3-30b-a3b:fp8:1:1x128,32x128:14000000000
#
# Start two of an engine's models at once, not more. Four of vLLM's on two H200s and 64 cores, caches cold: unpacked after 12 s, imported
# after 25; models inspected for 20 to 45 s each (a process that imports vLLM, again for an MTP head), weights after 40 to 60,
# torch.compile 55 to 79 s, the profiling run 11 to 20 s (110 s for gated delta nets beside three others), graphs 22 to 35 s, in which
# nvcc compiles DeepGEMM's kernels; ready after 156 s and more. Three on 32 cores: after 169, 246 and 316 s.
# On one H200 and 16 cores two of vLLM's: 46 s with all caches, 79 s with DeepGEMM's kernels alone, cold 114 s, and 255 s with gated
# delta nets; three of SGLang's at once, cold: 117 to 141 s, of which graphs of prompts are 64 to 87. A row of blocks of fp8
# with another number of tokens compiles four kernels of DeepGEMM when it is first called, some 15 s each. OUT gets caches.tar.xz of
# all that was compiled, which lies beside the archives the next time: then a start is a matter of weights and graphs.
set -u
out=$1 archives=$2
shift 2
mkdir -p "$out"
begin=$SECONDS
sessions=$(mktemp)
# Workers outlive an engine that was stopped, and hold its memory.
end_all() { for session in $(cat "$sessions"); do kill -KILL -- "-$session" 2> /dev/null; done; }
trap end_all EXIT
trap 'exit 143' TERM INT
say() { echo "[$((SECONDS - begin)) s] $*"; }

engines=" ${ENGINES:-vllm sglang weft} "
# without ENGINE WHY
without() { say "$1 is left out: $2" && engines=${engines/ $1 / }; }
measured() { [[ $engines == *" $1 "* ]]; }

. "$(dirname "$0")/engine_packages.sh"
if [ "$archives" != - ]; then
    for engine in vllm sglang; do
        measured $engine || continue
        [ -n "$(archives_of $engine)" ] || { without $engine "no archive of it is given" && continue; }
        unpack $engine || exit 1
        say "$engine is unpacked"
    done
fi

has_rows() { [ -s "$1" ] && grep -q first_ms "$1"; }

# python_of ENGINE NAME ARGUMENTS…: a run of a module, its log, and the end of that where it fails
python_of() {
    local engine=$1 name=$2 code
    shift 2
    rm -f "$out/$name.json" # of a run before, which would stand for this one
    with_packages "$engine" setsid timeout -k 5 "${SECONDS_OF_A_RUN:-300}" python -m "$@" --json "$out/$name.json" \
        >> "$out/$name.log" 2>&1 &
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

# of vLLM and SGLang where they failed
declare -A plain=(
    [vllm]='"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32, 128]}, '
    [sglang]='"disable_prefill_cuda_graph": true, "enforce_disable_flashinfer_allreduce_fusion": true, '
    [weft]=""
)

# name_of ENGINE JOB
name_of() {
    IFS=: read -r model quantization gpus cases cache drafts acceptance <<< "$2"
    echo "$1-$model-$quantization${drafts:+-$drafts-drafts}"
}

# measure ENGINE JOB ROOM ENGINES MORE: MORE stands in the engine's options, before the options of a shared GPU
measure() {
    local engine=$1 room=$3 engines=$4 more=$5 options quantized=() drafting=()
    IFS=: read -r model quantization gpus cases cache drafts acceptance <<< "$2"
    options="\"kv_cache_memory_bytes\": $cache"
    [ "$engine" = vllm ] && options="\"gpu_memory_utilization\": 0.2, $options"
    [ "$quantization" = bf16 ] || quantized=(--quantization "$quantization")
    [ -z "$drafts" ] || drafting=(--drafts "$drafts" --acceptance "$acceptance")
    [ -z "$drafts" ] || [ "$engine" != weft ] || drafting+=(--draft-head "${DRAFT_HEAD:-model}")
    python_of "$engine" "$(name_of "$engine" "$2")" benchmarks.engines run "$engine" --model "$model" "${quantized[@]}" \
        "${drafting[@]}" --world-size "$gpus" --cases "$cases" --options "{$more$options}" --repeats 3 --seconds 2 \
        --room "$room" --engines "$engines"
    touch "$room/$(name_of "$engine" "$2").here" # of one that was killed too: others wait for it
}

# plugin JOB ON-OR-OFF ROOM ENGINES
plugin() {
    IFS=: read -r _ model gpus cache <<< "$1"
    python_of vllm "plugin-$2-$model" benchmarks.doors.vllm_plugin run --plugin "$2" --model "$model" --world-size "$gpus" \
        --options "{\"gpu_memory_utilization\": 0.2, \"kv_cache_memory_bytes\": $cache}" --room "$3" --engines "$4"
    touch "$3/plugin-$2-$model.here"
}

# kernels ENGINE ROOM MODEL…: DeepGEMM's, compiled while the engines start
kernels() {
    local engine=$1 room=$2
    shift 2
    with_packages "$engine" setsid timeout -k 5 "${SECONDS_OF_A_RUN:-300}" python -m benchmarks.engine_kernels "$engine" "$@" \
        >> "$out/kernels-$engine.log" 2>&1 &
    echo $! >> "$sessions"
    wait $!
    say "$(tail -1 "$out/kernels-$engine.log" | cut -c1-200)"
    touch "$room/kernels.here"
}

# all_of ENGINE JOB…: of the jobs those that the engine has: the plugin is vLLM's, and drafts are not SGLang's
all_of() {
    local engine=$1 job jobs=()
    shift
    for job in "$@"; do
        case $engine:$job in [!v]*:plugin:* | sglang:*:*:*:*:*:*:*) ;; *) jobs+=("$job") ;; esac
    done
    for ((at = 0; at < ${#jobs[@]}; at += ${AT_ONCE:-${#jobs[@]}})); do
        beside "$engine" "${jobs[@]:at:${AT_ONCE:-${#jobs[@]}}}"
    done
    say "$engine is done"
}

# beside ENGINE JOB…: the jobs that start together
beside() {
    local engine=$1 room number=0 job failed blocks=()
    shift
    room=$(mktemp -d)
    for job in "$@"; do
        case $job in plugin:*) number=$((number + 2)) ;; *) number=$((number + 1)) ;; esac
    done
    for job in "$@"; do
        case $engine:$job in weft:* | *:plugin:*) ;; *:fp8:1:*) blocks+=("${job%%:*}") ;; esac
    done
    if [ ${#blocks[@]} -gt 0 ]; then
        number=$((number + 1))
        kernels "$engine" "$room" "${blocks[@]}" &
    fi
    for job in "$@"; do
        case $job in
        plugin:*) plugin "$job" off "$room" $number & plugin "$job" on "$room" $number & ;;
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
            VLLM_WORKER_MULTIPROC_METHOD=spawn SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=0 \
                SECONDS_OF_A_RUN=$((${TOTAL_SECONDS:-600} / 2)) \
                measure "$engine" "$job" "$room" ${#failed[@]} "${plain[$engine]}" &
        done
        wait
    fi
    end_all
}

imports_of() {
    case $1 in
    vllm)
        echo "import vllm.v1.worker.gpu_worker, vllm.v1.worker.gpu_model_runner, vllm.v1.engine.core"
        echo "import vllm.model_executor.models.qwen3_5"
        echo "from vllm import LLM"
        ;;
    sglang)
        echo "import deep_gemm, sgl_kernel.flash_attn, sglang.srt.managers.scheduler, sglang.srt.models.qwen3_moe"
        echo "from sglang.srt.entrypoints.engine import Engine"
        ;;
    esac
}

for engine in vllm sglang; do
    measured $engine || continue
    (with_packages $engine timeout 100 python -c "$(imports_of $engine)") > "$out/import-$engine.log" 2>&1 &
    echo "$engine $!"
done > "$out/imports"
while read -r engine import; do
    wait "$import" && say "$engine is imported" ||
        { without $engine "its import failed" && tail -30 "$out/import-$engine.log" | cut -c1-300; }
done < "$out/imports"
for engine in $engines; do
    all_of $engine "$@"
    [ $engine = weft ] || [ "$archives" = - ] ||
        tar -c -I "xz -T0 -1" -f "$out/caches.tar.xz" -C / $(cd / && ls -d tmp/vllm-cache tmp/sglang-cache 2> /dev/null)
done
grep -ahoE "Enabled custom fusions.{0,80}|Initialized FlashInfer.{0,80}|Selected [A-Za-z0-9]*Kernel for [A-Za-z0-9]*|Using [A-Za-z0-9_ -]*(ackend|Fp8|kernel|attention|attn).{0,120}|custom allreduce.{0,80}|torch.compile took.{0,40}|Graph capturing finished.{0,60}|init engine.{0,80}" \
    "$out"/{vllm,plugin}-*.log 2> /dev/null | sort | uniq -c | sort -rn | head -25 | cut -c1-220
grep -ahoE "(attention_backend|moe_runner_backend|fp8_gemm_runner_backend|flashinfer_allreduce_fusion_backend)='?[a-z0-9_]+|All Reduce config.{0,120}|KV Cache is allocated.{0,80}|Capture .{0,20}graph end.{0,80}|Load weight end.{0,60}" \
    "$out"/sglang-*.log 2> /dev/null | sort | uniq -c | sort -rn | head -25 | cut -c1-220
measured weft || exit 0
for job in "$@"; do
    case $job in
    plugin:*)
        IFS=: read -r _ model gpus cache <<< "$job"
        measured vllm && python -m benchmarks.doors.vllm_plugin table "$out/plugin-off-$model.json" "$out/plugin-on-$model.json"
        ;;
    *)
        files=()
        for engine in weft vllm sglang; do
            has_rows "$out/$(name_of $engine "$job").json" && files+=("$out/$(name_of $engine "$job").json")
        done
        [ ${#files[@]} -gt 0 ] && python -m benchmarks.engines table "${files[@]}"
        ;;
    esac
done
