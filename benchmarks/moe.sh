#!/bin/sh
# Tables of the mixture of experts on two GPUs, from a clean tree: sh benchmarks/moe.sh FOLDER [STEP…]
#
# In the environment: WORLD_SIZE=4 for four; QUICK=1 for fewer rounds.
# FOLDER is one of benchmarks/results, such as h200-x2-moe. Steps, all of them by default but tune:
#   exchange   moe_dispatch, moe_combine, and the second GEMM with the all-reduce and norm behind it, beside NCCL
#   overlap    both GEMMs of the experts with the communication around them, beside torch and NCCL and the GEMM alone
#   local      route, moe_schedule, both behind the router's GEMM, the grouped GEMMs and moe_sum beside torch and cuBLAS's dense GEMMs
#   layer      the whole layer of Qwen3-30B-A3B, in all modes, beside torch's grouped GEMM and NCCL
#   model      steps of the whole model
#   tune       rows of weft's tables for the ops above; commit them before the other steps
# Then python -m benchmarks.performance writes the pages.
set -eu
cd "$(dirname "$0")/.."
world=${WORLD_SIZE:-2}
out=benchmarks/results/${1:?FOLDER is missing, such as h200-x2-moe}
shift
[ $# -gt 0 ] || set -- exchange overlap local layer model

qwen=qwen3-30b-a3b
sent=$qwen:1,8,32,128,1024,4096,$qwen/zipf:128,4096,$qwen/recorded:128,4096,deepseek-v3:8,128,4096,deepseek-v3/zipf:128,mixtral-8x7b:128,4096,kraken-a2a
seen=$qwen:1,4,8,32,128,1024,4096,8192,$qwen/zipf:32,4096,olmoe-1b-7b/recorded:32,4096,qwen3-235b-a22b:4096,mixtral-8x7b:32,4096,deepseek-v3:128,4096
decoded=$qwen:1,8,32,128,256,$qwen/zipf:32,$qwen/recorded:32
many=$qwen:128,512,2048,4096,$qwen/zipf:2048,$qwen/recorded:2048,olmoe-1b-7b/recorded:2048,qwen3-235b-a22b:2048,mixtral-8x7b:2048
few=$qwen:1,32,128,4096,8192

bench() {
    python -m weft bench "$@" ${QUICK:+--quick} --world-size "$world" --out "$out"
}
for step in "$@"; do
    case $step in
    exchange)
        bench "moe-dispatch+fp8@$sent" "moe-dispatch@$sent" "moe-combine@$sent" "moe-ar-rms-norm@$decoded"
        ;;
    overlap)
        bench "ag-moe@$many" "moe-rs@$many"
        ;;
    local)
        # The last three are slices of all experts, half of the features each, as decoding may hold them.
        bench "route@$few" "moe-schedule@$few,$qwen/zipf:4096" "moe-route@$few" "moe-sum@$few" \
            "grouped-gemm-silu@$seen" "grouped-gemm@$seen" \
            grouped-gemm-silu@1,8,128,128,2048,384 grouped-gemm-silu@8,8,128,128,2048,384 \
            grouped-gemm-silu@32,8,128,128,2048,384
        ;;
    layer)
        bench mlp@decode:1x1024,8x1024,32x1024,128x1024 mlp@prefill:32x128 --model $qwen --check
        ;;
    model)
        bench model@decode:1x1024,8x1024,32x1024,128x1024,256x1024 model@prefill:32x128,1x128 \
            --model $qwen --breakdown
        ;;
    tune)
        python -m weft tune "grouped-gemm-silu@$seen" "grouped-gemm@$seen" "moe-dispatch@$sent" "moe-combine@$sent" \
            "moe-dispatch+fp8@$sent" "ag-moe@$many" "moe-rs@$many" --world-size "$world"
        ;;
    *)
        echo "$0: step $step is not one of exchange, overlap, local, layer, model, tune" >&2
        exit 2
        ;;
    esac
done
