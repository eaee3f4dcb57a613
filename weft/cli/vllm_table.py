"""Table of vLLM's flags: spellings of weft's, flags that become words, and ones that weft lacks.

All flags of vLLM 0.26's `serve` are here or have weft's names (tests/cli/vllm_flags.txt), and some of earlier versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

COMMANDS = "generate", "serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag of vLLM.

    names   its spellings
    field   option of a command whose meaning is equal: its flag has these spellings too; None: there is none
    spelled  value of the option for a value of vLLM's
    words   command-line words of weft for its value, "" for one without; None: no words stand for this value
    values  the only values that have words; (): all, or none
    negated  words for its form with `--no-`; None: no words stand for it
    valued  a value follows it
    many    further values may follow, each with an equals sign
    commands  that take it
    note    on its meaning; with neither a field nor words for a value, the rest of the message that refuses it
    """

    names: tuple[str, ...]
    field: str | None = None
    spelled: Callable[[str], str] = str
    words: Callable[[str], list[str] | None] | None = None
    values: tuple[str, ...] = ()
    negated: tuple[str, ...] | None = None
    valued: bool = True
    many: bool = False
    commands: tuple[str, ...] = COMMANDS
    note: str = ""


def _digits(value: str) -> str:
    """A number in digits: 16k is 16000, 1.5k is 1500, 16K is 16384; other text as it is."""
    if (parts := re.fullmatch(r"(\d+)(?:\.(\d+))?([kmgtKMGT])", value)) is None:
        return value
    whole, decimals, suffix = parts.groups(default="")
    power = "kmgt".index(suffix.lower()) + 1
    if suffix.isupper():
        return value if decimals else str(int(whole) << 10 * power)
    return str(int(whole + decimals) * 1000**power // 10 ** len(decimals))


def _same(field: str, *names: str, spelled: Callable[[str], str] = str, note: str = "") -> Flag:
    return Flag(names=names, field=field, spelled=spelled, note=note)


def _nothing(
    *names: str,
    note: str,
    valued: bool = False,
    values: Sequence[str] = (),
    negated: tuple[str, ...] | None = None,
) -> Flag:
    """A flag that asks for what weft does anyway; with `values` by one of these."""
    return Flag(
        names=names,
        words=lambda value: [] if not values or value in values else None,
        values=tuple(values),
        negated=negated,
        valued=valued or bool(values),
        note=note,
    )


def _becomes(*names: str, words: Sequence[str], negated: tuple[str, ...]) -> Flag:
    return Flag(names=names, words=lambda value: [*words], negated=negated, valued=False)


def _by_value(*names: str, words: dict[str, list[str]], note: str) -> Flag:
    return Flag(names=names, words=words.get, values=tuple(words), note=note)


def _lacking(table: str) -> Iterator[Flag]:
    """Flags that weft lacks. The form of a switch with `--no-` asks for what weft does."""
    for row in table.strip().splitlines():
        names, note = row.split(" | ")
        for valued in (True, False):
            if of_kind := tuple(name.rstrip("=") for name in names.split() if name.endswith("=") == valued):
                yield Flag(names=of_kind, negated=None if valued else (), valued=valued, note=note)


TEXT_ONLY = "none: weft serves text"
A_SERVER_EACH = "none: start a server per group of GPUs, and a proxy before them"
THE_PLAN = "none: the plan of a step chooses (weft doctor, -vv)"
STATES = "none: states of gated delta nets stay in fp32"
# A row: names of flags, with = where a value follows, and what comes near.
LACKING = f"""
--dcp-comm-backend= --dcp-kv-cache-interleave-size= --cp-kv-cache-interleave-size= | --context-parallel comes near: it \
spreads the KV cache by pages
--tokenizer= | none: put tokenizer.json into the checkpoint's directory
--chat-template= | none: put chat_template.jinja into the checkpoint's directory
--trust-request-chat-template | none: a request gives no template
--default-chat-template-kwargs= | none: send chat_template_kwargs with each request
--skip-tokenizer-init --tokens-only | none: requests may have token ids, and get them by return_token_ids
--enable-tokenizer-info-endpoint | none: there are /tokenize and /detokenize
--enable-prompt-embeds | none: a prompt is text or token ids
--enable-return-routed-experts | none: answers have text, token ids and logprobs
--hf-token= | none: `hf download` takes it
--tokenizer-revision= --code-revision= --hf-config-path= | MODEL@REVISION comes near
--model-class-overrides= | none: docs/models.md lists what weft runs
--model-loader-extra-config= --safetensors-load-strategy= --safetensors-prefetch-num-threads= \
--safetensors-prefetch-block-size= --max-parallel-loading-workers= | none: each rank reads its slices
--pt-load-map-location= | none: weft reads safetensors
--revision= | MODEL@REVISION comes near
--download-dir= --ignore-patterns= | none: weft downloads nothing, and reads the cache of `hf download`
--hf-overrides= --rope-scaling= --rope-theta= | none: edit config.json in a copy
--override-generation-config= | none: edit generation_config.json, or send fields with a request
--allow-deprecated-quantization | none: docs/quantization.md lists the formats
--quantization-config= | --quantization comes near
--kv-cache-dtype-skip-layers= | none: --kv-cache-dtype is of all layers
--override-attention-dtype= | none: attention has the dtype of --dtype
--pooler-config= | none: 1_Pooling/config.json of the checkpoint says it, or pooling of a request
--logits-processors= | none: logit_bias, bad_words and allowed_token_ids of a request come near
--io-processor-plugin= --scheduler-cls= --worker-cls= --worker-extension-cls= | none: weft runs no classes of other packages
--additional-config= | none: it is for platforms that weft does not run on
--use-fp64-gumbel | none: sampling is in fp32
--diffusion-config= -dc= | none: docs/models.md lists what weft runs
--no-enable-chunked-prefill | none: raise --chunk-tokens to the longest prompt
--long-prefill-token-threshold= | --chunk-tokens comes near
--max-num-scheduled-tokens= | --max-num-batched-tokens comes near
--prefill-schedule-interval= | --chunk-tokens comes near
--watermark= | none: a prompt is begun where running requests keep a page each to grow
--num-gpu-blocks-override= | --gpu-memory-utilization comes near
--kv-cache-memory-bytes= | --memory-fraction comes near
--kv-offloading-size= --kv-offloading-backend= | none: no cache goes to the host
--offload-backend= --offload-num-in-group= --offload-prefetch-step= --offload-params= --cpu-offload-params= | none: \
weights stay on the GPUs; --quantization makes them smaller
--calculate-kv-scales | none: scales of an fp8 cache are the checkpoint's, else 1
--kv-sharing-fast-prefill | none: a prompt passes all layers
--disable-hybrid-kv-cache-manager | none: old pages are freed where all layers have windows
--prefix-match-unit= | --page-size comes near: prompts share whole pages
--mamba-cache-mode= | --state-snapshot-tokens and --no-prefix-caching come near
--enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds= | {STATES}
--disable-sliding-window | none: --max-seq-len below the window comes near
--max-num-partial-prefills= --max-long-partial-prefills= | --chunk-tokens comes near
--speculative-model= --num-speculative-tokens= --spec-method= --spec-model= --spec-tokens= | --speculative-config comes \
near
--preemption-mode= | none: a preempted request is computed again
--guided-decoding-backend= --structured-outputs-config= | none: llguidance compiles grammars
--reasoning-config= | --reasoning-parser comes near, and thinking_token_budget of a request
--compilation-config= -cc= --optimization-level= -O= | none: Triton compiles what a model needs; --no-warm-up captures \
late
--cuda-graph-sizes= --cudagraph-capture-sizes= | none: sizes follow --max-batch
--max-cudagraph-capture-size= | --max-batch comes near: sizes follow it
--disable-custom-all-reduce | --mode reference comes near: torch and NCCL
--attention-backend= --attention-config= -ac= --mamba-backend= --gdn-prefill-backend= --all2all-backend= --kernel-config= \
--ir-op-priority= --enable-bf16x3-router-gemm | {THE_PLAN}
--enable-flashinfer-autotune | --tune comes near
--uvicorn-log-level= --max-log-len= | -v, -vv and -q come near
--limit-mm-per-prompt= --mm-processor-kwargs= --media-io-kwargs= --allowed-local-media-path= --allowed-media-domains= \
--mm-processor-cache-type= --mm-shm-cache-max-object-size-mb= --mm-encoder-tp-mode= --mm-encoder-attn-backend= \
--mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path= --mm-encoder-fp8-scale-save-path= \
--mm-encoder-fp8-scale-save-margin= --mm-tensor-ipc= --mm-ipc-gpu-memory-gb= --video-pruning-rate= --ec-transfer-config= \
--default-mm-loras= --enable-mm-embeds --mm-encoder-only --interleave-mm-strings --skip-mm-profiling \
--disable-chunked-mm-input --enable-tower-connector-lora | {TEXT_ONLY}
--lora-target-modules= --specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras | \
none: docs/lora.md says which adapters are read
--ssl-keyfile= --ssl-certfile= --ssl-ca-certs= --ssl-cert-reqs= --ssl-ciphers= --enable-ssl-refresh | none: put a proxy \
with TLS before the server
--root-path= --allowed-origins= --allowed-methods= --allowed-headers= --middleware= --allow-credentials | none: a proxy \
before the server sets them
--h11-max-incomplete-event-size= | --max-body-bytes comes near
--h11-max-header-count= | none: a proxy before the server limits headers
--enable-offline-docs | none: the server has no pages of docs
--grpc | none: the server talks HTTP
--uds= | --host and --port come near
--log-config-file= | -v and -vv come near
--enable-log-requests --enable-log-outputs --enable-log-deltas | none: requests are not logged; /metrics counts them
--log-error-stack | none: the log has the stack of the server's own errors
--fingerprint-value= | none: answers have no system_fingerprint
--enable-server-load-tracking | /metrics comes near (Prometheus)
--enable-request-id-headers | none: an answer has its id
--enable-prompt-tokens-details | none: /metrics counts cached tokens
--enable-force-include-usage | none: send stream_options.include_usage
--return-tokens-as-token-ids | none: send return_token_ids
--tool-parser-plugin= --reasoning-parser-plugin= | --tool-call-parser and --reasoning-parser come near
--tool-server= | none: clients run tools
--enable-flash-late-interaction | none: there is no path that scores pairs of texts
--enable-sleep-mode --weight-transfer-config= | none: end the server, and start it again
--enable-cumem-allocator | none: weft keeps memory until the server ends
--data-parallel-rank= -dpn= --data-parallel-start-rank= -dpr= --data-parallel-address= -dpa= --data-parallel-rpc-port= \
-dpp= --data-parallel-backend= -dpb= --data-parallel-supervisor-port= --dp-supervisor-probe-interval-s= \
--dp-supervisor-probe-timeout-s= --dp-supervisor-probe-failure-threshold= --data-parallel-hybrid-lb -dph \
--data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm --disable-nccl-for-dp-synchronization \
--headless --aggregate-engine-logging | {A_SERVER_EACH}
--nnodes= -n= --node-rank= -r= --master-addr= --master-port= | torchrun comes near (docs/nodes-launch.md)
--ray-workers-use-nsight | none: weft starts no Ray
--device-ids= | none: set CUDA_VISIBLE_DEVICES for the server
--numa-bind --numa-bind-nodes= --numa-bind-cpus= | none: numactl before the command comes near
--distributed-timeout-seconds= --cpu-distributed-timeout-seconds= | none: a rank that ends is noticed by its process's end
--fail-on-environ-validation | none: weft checks no environment variables
--enable-eplb --enable-elastic-ep --eplb-config= --expert-placement-strategy= | none: --expert-layout comes near
--enable-ep-weight-filter | none: each rank reads its experts alone
--enable-dbo --ubatch-size= --dbo-decode-token-threshold= --dbo-prefill-token-threshold= | none: kernels of a step talk \
and compute at once; see --mode
--kv-transfer-config= --kv-events-config= | none: prompts are read where they are answered
--otlp-traces-endpoint= --collect-detailed-traces= --show-hidden-metrics-for-version= --kv-cache-metrics-sample= \
--kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics --enable-per-request-metrics | /metrics comes near \
(Prometheus)
--enable-logging-iteration-details --jit-monitor-verbose --jit-monitor-mode= | -v and -vv come near
--enable-layerwise-nvtx-tracing --profiler-config= | weft.trace comes near (docs/trace.md)
--config= | none: write the flags out
"""
FLAGS = (
    _same("max_batch", "--max-num-seqs"),
    _same(
        "chunk_tokens",
        "--max-num-batched-tokens",
        spelled=_digits,
        note="prompt tokens of a step; vLLM counts decoded ones too; 8k and 8K are numbers",
    ),
    _same("max_seq_len", "--max-model-len", spelled=_digits, note="16k and 16K are numbers, auto is none"),
    _same("world_size", "--tensor-parallel-size", "-tp"),
    _same("pipeline_parallel", "--pipeline-parallel-size", "-pp"),
    _same("page_size", "--block-size"),
    _same(
        "gpu_memory_utilization",
        "--gpu-memory-utilization",
        note="a share of the whole GPU; --memory-fraction is of what is free once the weights are there",
    ),
    _same(
        "dtype",
        "--dtype",
        spelled=lambda value: {"half": "float16", "float": "float32"}.get(value, value),
        note="half is float16, float is float32",
    ),
    _same(
        "quantization", "--quantization", note="also -q before one of weft's formats; elsewhere -q is weft's --quiet"
    ),
    _same("speculative_config", "--speculative-config"),
    _same("seed", "--seed"),
    _same("served_model_name", "--served-model-name", note="one name"),
    _same("tool_call_parser", "--tool-call-parser", note="without it, by the chat template"),
    _same("reasoning_parser", "--reasoning-parser", note="without it, by the chat template"),
    _same("host", "--host"),
    _same("port", "--port"),
    _same("api_key", "--api-key", note="one key"),
    _same("keep_alive", "--timeout-keep-alive"),
    Flag(
        names=("--model",), words=lambda value: [value], note="the argument MODEL of `weft serve`", commands=("serve",)
    ),
    Flag(names=("-sc",), words=lambda value: ["--speculative-config", value], note="--speculative-config"),
    Flag(
        names=("--kv-cache-dtype",),
        words=lambda value: ["--kv-cache-dtype", "fp8" if value == "fp8_e4m3" else value],
        note="fp8_e4m3 is weft's fp8",
    ),
    _becomes("--enforce-eager", words=["--no-cuda-graph"], negated=()),
    _becomes(
        "--enable-expert-parallel",
        "-ep",
        words=["--expert-layout", "whole"],
        negated=("--expert-layout", "slices"),
    ),
    _by_value(
        "--load-format",
        words={"auto": [], "safetensors": [], "dummy": ["--dummy-weights"]},
        note="weft reads safetensors; dummy is --dummy-weights, with a name such as qwen3-32b as MODEL",
    ),
    _by_value(
        "--decode-context-parallel-size",
        "-dcp",
        words={"1": []},
        note="--context-parallel comes near: it spreads the KV cache over all ranks",
    ),
    _by_value(
        "--prefill-context-parallel-size",
        "-pcp",
        words={"1": []},
        note="--world-size comes near: all ranks read a prompt",
    ),
    _by_value("--data-parallel-size", "-dp", "--data-parallel-size-local", "-dpl", words={"1": []}, note=A_SERVER_EACH),
    _by_value(
        "--swap-space",
        words={"0": []},
        note="none: a preempted request is computed again, and no cache goes to the host",
    ),
    _by_value(
        "--cpu-offload-gb",
        "--offload-group-size",
        words={"0": []},
        note="none: weights stay on the GPUs; --quantization makes them smaller",
    ),
    _by_value(
        "--generation-config",
        words={"auto": []},
        note="none: generation_config.json of the checkpoint applies; edit it, or send the fields with each request",
    ),
    _nothing(
        "--enable-auto-tool-choice", note="tools are parsed where a request has some, unless --tool-call-parser is none"
    ),
    _nothing("--trust-remote-code", note="weft runs no code of a checkpoint", negated=()),
    _nothing("--enable-chunked-prefill", note="prompts are always read in chunks"),
    _nothing("--enable-reasoning", note="reasoning is parsed by the chat template, or by --reasoning-parser"),
    _nothing("--language-model-only", note="weft serves text", negated=()),
    _nothing("--disable-fastapi-docs", note="there are none"),
    _nothing("--max-seq-len-to-capture", valued=True, note="graphs are of all lengths"),
    _nothing("--prefix-caching-hash-algo", values=("sha256", "sha256_cbor"), note="none: it is SHA-256"),
    _nothing("--async-scheduling", note="the host always runs a step ahead"),
    _nothing(
        "--disable-log-requests",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
        note="requests are not logged; /metrics counts them",
    ),
    _nothing("--disable-access-log-for-endpoints", valued=True, note="requests are not logged"),
    _nothing("--exclude-tools-when-tool-choice-none", note="tool_choice none leaves the tools out"),
    _nothing("--disable-cascade-attn", note="no attention reads a shared prefix apart"),
    _nothing("--scheduler-reserve-full-isl", note="a prompt is begun once the KV cache has room for all of it"),
    _nothing("--use-tqdm-on-load", note="a terminal shows progress; -q comes near"),
    _nothing("--tokenizer-mode", values=("auto",), note="tokenizer.json of the checkpoint is used"),
    _nothing("--config-format", values=("auto", "hf"), note="config.json of the checkpoint is used"),
    _nothing(
        "--distributed-executor-backend",
        values=("mp",),
        note="none: a process per GPU on this machine, and torchrun between machines (docs/nodes-launch.md)",
    ),
    _nothing("--scheduling-policy", values=("fcfs",), note="none: requests are admitted in order"),
    _nothing("--max-logprobs", values=("20",), note="none: up to 20"),
    _nothing(
        "--logprobs-mode", values=("raw_logprobs",), note="none: they are the model's, before penalties and temperature"
    ),
    _nothing("--response-role", values=("assistant",), note="none: it is assistant"),
    _nothing("--runner", "--task", values=("auto", "generate", "pooling", "embed"), note="all paths are served"),
    _nothing("--convert", values=("auto", "none", "embed"), note="none: /v1/embeddings gives vectors, and no classes"),
    _nothing("--fingerprint-mode", values=("none",), note="none: answers have no system_fingerprint"),
    _nothing("--performance-mode", values=("balanced",), note="none: `weft plan` chooses options for a load"),
    _nothing("--shutdown-timeout", values=("0",), note="none: a signal ends running answers"),
    _nothing("--stream-interval", values=("1",), note="none: text goes out when it is there"),
    _nothing("--api-server-count", "-asc", values=("1",), note="none: one process answers HTTP"),
    _nothing("--renderer-num-workers", values=("1",), note="none: one process renders chat templates"),
    _nothing("--mm-processor-cache-gb", values=("0",), note=TEXT_ONLY),
    _nothing("--mamba-cache-dtype", values=("auto",), note=STATES),
    _nothing("--mamba-ssm-cache-dtype", values=("auto", "float32"), note=STATES),
    _nothing("--moe-backend", "--linear-backend", values=("auto",), note=THE_PLAN),
    _nothing("--chat-template-content-format", values=("auto", "string"), note="none: a template gets text"),
    _nothing("--model-impl", values=("auto",), note="none: docs/models.md lists what weft runs"),
    _nothing("--enable-lora", note="--lora NAME=DIR gives an adapter", negated=()),
    Flag(
        names=("--lora-modules",),
        words=lambda value: None if value.startswith("{") else ["--lora", value],
        many=True,
        commands=("serve",),
        note="--lora NAME=DIR, once for each adapter",
    ),
    _nothing(
        "--max-loras",
        "--max-lora-rank",
        "--max-cpu-loras",
        valued=True,
        note="all adapters of --lora stay on the GPUs, ranks up to 64",
    ),
    _nothing("--fully-sharded-loras", note="adapters are cut over the ranks as their matrices are", negated=()),
    _nothing("--lora-dtype", values=("auto",), note="none: adapters have the dtype of the computation"),
    *_lacking(LACKING),
)
