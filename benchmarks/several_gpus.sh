#!/bin/sh
# All that several GPUs of a machine prove and measure, from a clean tree: sh benchmarks/several_gpus.sh WORLD_SIZE [STEP…]
#
# WORLD_SIZE is 2, 4 or 8; tables go to benchmarks/results/GPU-xWORLD_SIZE and folders beside it. In the environment: GPU=h100 for
# those of H100s, h200 by default; QUICK=1 for fewer rounds; LIMIT=200 for the seconds after which regret, plans and the rows of
# Transformers begin nothing more. Each step ends by itself, so that a machine that is lent for minutes takes a few of them; regret
# and plans go on where their files end. In this order, all by default but tune and vllm:
#   check        tests of runtime, ops, models, engine, traces and examples; doctor; generate
#   machine      one all-reduce, one GEMM and one step, to tell how far machines differ: for every run that measures something
#   suite        the suite of ops: every case, graphs, 2,000 calls of each with delays
#   collectives  beside NCCL and torch's symmetric memory, the models' own sizes too, alone and in a row, eager too
#   gemms        AG-GEMM, GEMM-RS, GEMM-AR and GEMMs of few rows beside cuBLAS and NCCL, by designs of tiles too
#   layers       of Qwen3-32B beside eager torch and torch.compile, and by the reference recipe
#   models       steps of Qwen3-32B, 8B and 0.6B, and whole generations, beside the same
#   train        forward and backward of a layer of Qwen3-32B
#   doors        PyTorch's and Transformers' tensor parallelism with and without weft; torchtitan's where TITAN has its packages
#   moe          benchmarks/moe.sh
#   long         benchmarks/long_context.sh
#   nodes        every pair of ranks as a node, over NCCL's sockets: the suite over nodes, and the links
#   bits         the same bits in every configuration of Qwen3-0.6B and 8B, what that costs, and GEMMs in slices by design
#   start        a server's start, cold and warm, and that of weft.launch
#   adapters     an engine with adapters, and 2,000 requests with tools, cancels and grammars
#   engines      weft's engine and server; vllm: vLLM's, in an environment that has it (benchmarks/engines.sh brings one)
#   regret       today's choices over the best designs, of all ops, on one rank and on all; no fit of costs reads these files
#   plans        steps as weft plan predicts them, on one rank and on all
#   tune         rows of weft's tables; commit them before the other steps
# Then python -m benchmarks.performance writes the pages.
set -eu
cd "$(dirname "$0")/.."
world=${1:?WORLD_SIZE is missing, such as 4}
shift
case $world in 2 | 4 | 8) ;; *) echo "$0: WORLD_SIZE $world is not 2, 4 or 8" >&2 && exit 2 ;; esac
[ $# -gt 0 ] || set -- check machine suite collectives gemms layers models train doors moe long nodes bits start adapters engines \
    regret plans
machine=${GPU:-h200}-x$world
out=benchmarks/results/$machine
runs=benchmarks/lab/$machine-engines
doors=benchmarks/lab/$machine-doors

rows=64,128,256,512,1024,2048,4096,8192,16384
steps=model@decode:1x128,1x1024,8x1024,32x1024,128x128,128x1024
prompts=model@prefill:1x128,1x1024,32x128
# Baselines of layers and models. +symm: torch's symmetric memory and, for few rows, autotuned GEMMs, which takes minutes;
# +async_tp: torch's overlapped GEMMs, for prompts.
torch=torch.eager,torch.compile,torch.compile+symm,torch.compile+async_tp
bench() {
    python -m weft bench "$@" ${QUICK:+--quick} --world-size "$world"
}
for step in "$@"; do
    case $step in
    check)
        python -m pytest -q --ahead -m gpu tests/runtime tests/language tests/ops tests/simulator tests/trace tests/test_examples.py
        python -m pytest -q --ahead -m gpu tests/models tests/engine tests/bench
        python -m weft doctor
        python -m weft generate --prompt 12+34= --world-size "$world"
        ;;
    machine)
        bench all-reduce@64KiB,16MiB gemm-ar@qwen3-32b:128,4096 --out "$out-machine"
        bench model@decode:1x128 --model qwen3-8b --mode auto --providers weft,torch.eager --out "$out-machine"
        ;;
    suite)
        python -m tests.gpu.suite --world-size "$world" --load \
            --json "benchmarks/results/check/gpu-suite-$machine.json"
        ;;
    collectives)
        bench all-reduce@sizes all-reduce@10KiB,320KiB,1280KiB all-gather reduce-scatter all-to-all \
            all-reduce-rms-norm@qwen3-32b:1,32,128 all-reduce-rms-norm@7,5120 --eager --out "$out"
        ;;
    gemms)
        bench "ag-gemm@qwen3-32b:$rows" "gemm-rs@qwen3-32b:$rows" "gemm-ar@qwen3-32b:1,16,$rows" \
            gemm@qwen3-32b:1,8,16,32,64,128 --eager --out "$out"
        bench ag-gemm@qwen3-32b:4096,8192 gemm-rs@qwen3-32b:512,4096,8192 --providers weft.auto,tiles --out "$out-tiles"
        ;;
    layers)
        bench mlp attn --model qwen3-32b --check --providers weft,$torch --out "$out"
        ;;
    models)
        for model in qwen3-32b qwen3-8b qwen3-0.6b; do
            bench "$steps" "$prompts" --model "$model" --check --breakdown --mode auto \
                --providers weft,$torch --out "$out-$model"
        done
        bench generate --model qwen3-32b --mode auto --providers weft,torch.eager,torch.compile,torch.compile+symm --out "$out"
        ;;
    train)
        bench train@qwen3-32b:1x4096,1x8192 --out "$out"
        ;;
    moe)
        WORLD_SIZE=$world sh benchmarks/moe.sh "$machine-moe"
        ;;
    long)
        WORLD_SIZE=$world sh benchmarks/long_context.sh "$machine-long" two engine
        ;;
    nodes)
        python -m tests.gpu.suite --world-size "$world" --node-size $((world / 2)) \
            --json "benchmarks/results/check/gpu-suite-$machine-over-nodes.json"
        bench --nodes --node-size $((world / 2)) --out "$out-nodes"
        ;;
    doors)
        mkdir -p "$doors"
        failed=
        python -m benchmarks.doors.torch_tp --world-size "$world" --json "$doors/torch.json" || failed="$failed torch_tp"
        python -m benchmarks.doors.transformers_llama --world-size "$world" ${LIMIT:+--seconds "$LIMIT"} \
            --json "$doors/transformers.json" || failed="$failed transformers_llama"
        [ -z "${TITAN:-}" ] || PYTHONPATH=$TITAN python -m benchmarks.doors.torchtitan_llama --world-size "$world" \
            --json "$doors/titan.json" || failed="$failed torchtitan_llama"
        [ -z "$failed" ] || { echo "$0: failed:$failed" >&2 && exit 1; }
        ;;
    bits)
        python -m pytest -q --ahead -m gpu tests/ops/gemm/test_sliced.py tests/ops/moe/test_moe_ops.py
        python -m weft bench invariance --model qwen3-0.6b --dummy-weights --world-size "1,$world"
        python -m weft bench invariance --model qwen3-8b --dummy-weights --world-size "1,$world" --requests 64
        for model in qwen3-8b qwen3-32b; do
            python -m weft bench invariance --model "$model" --dummy-weights --world-size "$world" --quick --cost
        done
        python -m benchmarks.lab.sliced --variants --world-size "1,$world" --out "benchmarks/lab/$machine-sliced.json"
        ;;
    start)
        mkdir -p "benchmarks/lab/$machine-start-up"
        for model in qwen3-0.6b qwen3-32b; do
            python -m benchmarks.start_up --model "$model" --world-size "$world" --caches cold,warm \
                --json "benchmarks/lab/$machine-start-up/$model.json"
        done
        python -m benchmarks.start_up --launch --world-size "$world" --json "benchmarks/lab/$machine-start-up/launch.json"
        ;;
    adapters)
        python -m benchmarks.lab.adapters --world-size "$world" --json "benchmarks/lab/$machine-adapters.json"
        python -m scripts.soak --world-size "$world" --requests 2000
        ;;
    regret)
        for ranks in 1 "$world"; do
            python -m weft bench --regret --world-size "$ranks" ${LIMIT:+--seconds "$LIMIT"} \
                --json "benchmarks/lab/${GPU:-h200}-regret-unseen/w$ranks.json"
        done
        ;;
    plans)
        for ranks in 1 "$world"; do
            python -m benchmarks.planned_steps --world-size "$ranks" ${LIMIT:+--seconds "$LIMIT"} \
                --json "benchmarks/lab/${GPU:-h200}-planned-steps.json"
        done
        ;;
    engines | vllm)
        engine=weft
        [ "$step" = engines ] || engine=vllm
        mkdir -p "$runs"
        for model in qwen3-32b qwen3-30b-a3b qwen3-8b qwen3-0.6b; do
            python -m benchmarks.engines run $engine --model "$model" --world-size "$world" --json "$runs/$engine-$model.json"
        done
        python -m benchmarks.serving --model qwen3-8b --world-size "$world" --servers $engine \
            --out "benchmarks/lab/$machine-serving"
        ;;
    tune)
        python -m weft tune all-reduce all-gather reduce-scatter all-to-all "ag-gemm@qwen3-32b:$rows" "gemm-rs@qwen3-32b:$rows" \
            "gemm-ar@qwen3-32b:1,16,$rows" gemm@qwen3-32b:1,8,16,32,64,128 --world-size "$world"
        WORLD_SIZE=$world sh benchmarks/moe.sh "$machine-moe" tune
        WORLD_SIZE=$world sh benchmarks/long_context.sh "$machine-long" tune
        ;;
    *)
        echo "$0: step $step is not one of check, machine, suite, collectives, gemms, layers, models, train, doors, moe, long," \
            "nodes, bits, start, adapters, engines, vllm, regret, plans, tune" >&2
        exit 2
        ;;
    esac
done
