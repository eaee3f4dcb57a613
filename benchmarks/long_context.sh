#!/bin/sh
# Attention over a cache that is spread over ranks, on GPUs: sh benchmarks/long_context.sh FOLDER [STEP…]
#
# FOLDER is one of benchmarks/results, such as h200-x1-long. Steps, check and one by default:
#   check   two ranks, which may share one GPU: the ops' cases, repeated calls, graphs with growing lengths; caches in fp8
#   one     times at W=1: the op is then the local attention and the join, without an exchange
#   two     times at W=2, on two GPUs, beside torch and NCCL
#   engine  first tokens of prompts over a spread cache, and decode steps at 32k, 128k and 1M tokens, at W=2, on two GPUs
#   tune    rows of weft's tables; commit them before the other steps
# In the environment: WORLD_SIZE=4 for the last three on four GPUs; QUICK=1 for fewer rounds.
set -eu
cd "$(dirname "$0")/.."
world=${WORLD_SIZE:-2}
folder=${1:?FOLDER is missing, such as h200-x1-long}
out=benchmarks/results/$folder
shift
[ $# -gt 0 ] || set -- check one

op=sharded-decode-attention
shapes="$op@qwen3-30b-a3b,12-kv-heads $op@8,32,4,128,32768 $op@32,32,4,128,32768"
for step in "$@"; do
    case $step in
    check)
        ops="sharded_decode_attention;merge_attention;paged_attention;paged_prefill_attention;decode_attention;decode_metadata"
        python -m tests.gpu.suite --world-size 2 --share-gpus --ops "$ops" \
            --only "attention;back-to-back;graph;large"
        python -m pytest -q --share-gpus tests/ops/attention/test_sharded_decode_attention.py -k replayed
        ;;
    one)
        python -m weft bench ${QUICK:+--quick} $shapes --world-size 1 --out "$out" --providers weft,sdpa+nccl
        ;;
    two)
        python -m weft bench ${QUICK:+--quick} $shapes --world-size "$world" --out "$out" \
            --providers weft,sdpa+nccl,flex+nccl
        ;;
    engine)
        python -m benchmarks.lab.spread_prompts --world-size "$world" --out "benchmarks/lab/$folder-prompts.json"
        python -m weft bench ${QUICK:+--quick} model@decode:1x32768,1x131072,1x1048576 --model qwen3-8b --world-size "$world" \
            --out "$out" --providers weft.auto,weft.context_parallel --random-cache
        ;;
    tune)
        python -m weft tune $shapes --world-size "$world"
        ;;
    *)
        echo "$0: step $step is not one of check, one, two, engine, tune" >&2
        exit 2
        ;;
    esac
done
