"""Flags of `vllm serve`: spellings of weft's flags, rewritten ones, and ones that weft lacks.

FLAGS is the one table: EngineFlags and ServeFlags take spellings from it, a command line is rewritten by it, and messages and
the list of docs/vllm-flags.md (`python -m weft.cli.vllm_flags`) are its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.arguments import shortened

COMMANDS = "generate", "serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag of vLLM.

    names   its spellings
    field   option of a command whose meaning is equal: its flag has these spellings too; None: there is none
    words   command-line words of weft for its value, "" for one without; None: no words stand for this value
    valued  a value follows it
    commands  that take it
    note    on its meaning; with neither a field nor words for a value, the rest of the message that refuses it
    """

    names: tuple[str, ...]
    field: str | None = None
    words: Callable[[str], list[str] | None] | None = None
    valued: bool = True
    commands: tuple[str, ...] = COMMANDS
    note: str = ""


def _same(field: str, *names: str, note: str = "") -> Flag:
    return Flag(names=names, field=field, note=note)


def _nothing(*names: str, note: str, valued: bool = False, values: Sequence[str] = ()) -> Flag:
    """A flag that asks for what weft does anyway; with `values` by one of these."""
    return Flag(
        names=names, words=lambda value: [] if not values or value in values else None, valued=valued, note=note
    )


def _becomes(flag: str, *words: str, note: str = "") -> Flag:
    return Flag(names=(flag,), words=lambda value: [*words], valued=False, note=note)


def _by_value(flag: str, table: dict[str, list[str]], note: str) -> Flag:
    return Flag(names=(flag,), words=table.get, note=note)


def _lacking(*names: str, near: str, valued: bool = True) -> Flag:
    return Flag(names=names, valued=valued, note=near)


TEXT_ONLY = "none: weft serves text"
FLAGS = (
    _same("max_batch", "--max-num-seqs"),
    _same("chunk_tokens", "--max-num-batched-tokens", note="prompt tokens of a step; vLLM counts decoded ones too"),
    _same("max_seq_len", "--max-model-len"),
    _same("world_size", "--tensor-parallel-size", "-tp"),
    _same("pipeline_parallel", "--pipeline-parallel-size", "-pp"),
    _same("page_size", "--block-size"),
    _same(
        "gpu_memory_utilization",
        "--gpu-memory-utilization",
        note="a share of the whole GPU; --memory-fraction is of what is free once the weights are there",
    ),
    _same("dtype", "--dtype"),
    _same("quantization", "--quantization"),
    _same("speculative_config", "--speculative-config"),
    _same("seed", "--seed"),
    _same("served_model_name", "--served-model-name"),
    _same("tool_call_parser", "--tool-call-parser", note="without it, by the chat template"),
    _same("reasoning_parser", "--reasoning-parser", note="without it, by the chat template"),
    _same("host", "--host"),
    _same("port", "--port"),
    _same("api_key", "--api-key"),
    _same("keep_alive", "--timeout-keep-alive"),
    Flag(
        names=("--model",), words=lambda value: [value], note="the argument MODEL of `weft serve`", commands=("serve",)
    ),
    Flag(
        names=("--kv-cache-dtype",),
        words=lambda value: ["--kv-cache-dtype", "fp8" if value == "fp8_e4m3" else value],
        note="fp8_e4m3 is weft's fp8",
    ),
    _becomes("--enforce-eager", "--no-cuda-graph"),
    _becomes("--enable-expert-parallel", "--expert-layout", "whole"),
    _by_value(
        "--load-format",
        {"auto": [], "safetensors": [], "dummy": ["--dummy-weights"]},
        "weft reads safetensors; dummy is --dummy-weights, with a name such as qwen3-32b as MODEL",
    ),
    _by_value(
        "--decode-context-parallel-size",
        {"1": []},
        "--context-parallel comes near: it spreads the KV cache over all ranks",
    ),
    _by_value("--data-parallel-size", {"1": []}, "none: start a server per group of GPUs, and a proxy before them"),
    _by_value("--swap-space", {"0": []}, "none: a preempted request is computed again, and no cache goes to the host"),
    _by_value("--cpu-offload-gb", {"0": []}, "none: weights stay on the GPUs; --quantization makes them smaller"),
    _by_value(
        "--generation-config",
        {"auto": []},
        "none: generation_config.json of the checkpoint applies; edit it, or send the fields with each request",
    ),
    _nothing("--enable-auto-tool-choice", note="tools are parsed where a request has some"),
    _nothing("--trust-remote-code", note="weft runs no code of a checkpoint"),
    _nothing("--enable-chunked-prefill", note="prompts are always read in chunks"),
    _nothing("--enable-reasoning", note="reasoning is parsed by the chat template, or by --reasoning-parser"),
    _nothing("--language-model-only", note="weft serves text"),
    _nothing("--disable-fastapi-docs", note="there are none"),
    _nothing("--max-seq-len-to-capture", valued=True, note="graphs are of all lengths"),
    _nothing("--prefix-caching-hash-algo", valued=True, values=("sha256", "sha256_cbor"), note="none: it is SHA-256"),
    _nothing("--async-scheduling", note="the host always runs a step ahead"),
    _nothing(
        "--disable-log-requests",
        "--no-enable-log-requests",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
        note="requests are not logged; /metrics counts them",
    ),
    _nothing("--tokenizer-mode", valued=True, values=("auto",), note="tokenizer.json of the checkpoint is used"),
    _nothing("--config-format", valued=True, values=("auto", "hf"), note="config.json of the checkpoint is used"),
    _nothing(
        "--distributed-executor-backend",
        valued=True,
        values=("mp",),
        note="none: a process per GPU on this machine, and torchrun between machines (docs/nodes-launch.md)",
    ),
    _nothing("--scheduling-policy", valued=True, values=("fcfs",), note="none: requests are admitted in order"),
    _nothing("--max-logprobs", valued=True, values=("20",), note="none: up to 20"),
    _nothing("--response-role", valued=True, values=("assistant",), note="none: it is assistant"),
    _nothing(
        "--runner", "--task", valued=True, values=("auto", "generate", "pooling", "embed"), note="all paths are served"
    ),
    _nothing("--enable-lora", note="--lora NAME=DIR gives an adapter"),
    Flag(
        names=("--lora-modules",),
        words=lambda value: None if value.startswith("{") else ["--lora", value],
        commands=("serve",),
        note="--lora NAME=DIR, once for each adapter",
    ),
    _nothing(
        "--max-loras", "--max-lora-rank", valued=True, note="all adapters of --lora stay on the GPUs, ranks up to 64"
    ),
    _lacking("--tokenizer", near="none: put tokenizer.json into the checkpoint's directory"),
    _lacking("--chat-template", near="none: put chat_template.jinja into the checkpoint's directory"),
    _lacking("--chat-template-content-format", near="none: a template gets text"),
    _lacking("--default-chat-template-kwargs", near="none: send chat_template_kwargs with each request"),
    _lacking(
        "--skip-tokenizer-init",
        valued=False,
        near="none: requests may have token ids, and get them by return_token_ids",
    ),
    _lacking("--hf-token", near="none: `hf download` takes it"),
    _lacking("--tokenizer-revision", "--code-revision", "--hf-config-path", near="MODEL@REVISION comes near"),
    _lacking("--model-impl", near="none: docs/models.md lists what weft runs"),
    _lacking("--model-loader-extra-config", "--safetensors-load-strategy", near="none: each rank reads its slices"),
    _lacking("--revision", near="MODEL@REVISION comes near"),
    _lacking("--download-dir", near="none: weft downloads nothing, and reads the cache of `hf download`"),
    _lacking("--hf-overrides", "--rope-scaling", "--rope-theta", near="none: edit config.json in a copy"),
    _lacking("--override-generation-config", near="none: edit generation_config.json, or send fields with a request"),
    _lacking("--no-enable-chunked-prefill", valued=False, near="none: raise --chunk-tokens to the longest prompt"),
    _lacking("--long-prefill-token-threshold", near="--chunk-tokens comes near"),
    _lacking("--num-gpu-blocks-override", near="--gpu-memory-utilization comes near"),
    _lacking("--kv-cache-memory-bytes", near="--memory-fraction comes near"),
    _lacking("--kv-offloading-size", "--kv-offloading-backend", near="none: no cache goes to the host"),
    _lacking("--calculate-kv-scales", valued=False, near="none: scales of an fp8 cache are the checkpoint's, else 1"),
    _lacking("--disable-sliding-window", valued=False, near="none: --max-seq-len below the window comes near"),
    _lacking("--max-num-partial-prefills", "--max-long-partial-prefills", near="--chunk-tokens comes near"),
    _lacking("--speculative-model", "--num-speculative-tokens", near="--speculative-config comes near"),
    _lacking("--stream-interval", near="none: text goes out when it is there"),
    _lacking("--preemption-mode", near="none: a preempted request is computed again"),
    _lacking("--guided-decoding-backend", "--structured-outputs-config", near="none: llguidance compiles grammars"),
    _lacking("--compilation-config", "-O", near="none: Triton compiles what a model needs; --no-warm-up captures late"),
    _lacking("--cuda-graph-sizes", "--cudagraph-capture-sizes", near="none: sizes follow --max-batch"),
    _lacking("--disable-custom-all-reduce", valued=False, near="--mode reference comes near: torch and NCCL"),
    _lacking("--attention-backend", near="none: the plan of a step chooses (weft doctor, -vv)"),
    _lacking("--uvicorn-log-level", "--max-log-len", near="-v, -vv and -q come near"),
    _lacking("--limit-mm-per-prompt", "--mm-processor-kwargs", "--media-io-kwargs", near=TEXT_ONLY),
    _lacking("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", near="none: put a proxy with TLS before the server"),
    _lacking(
        "--root-path",
        "--allowed-origins",
        "--allowed-methods",
        "--allowed-headers",
        "--middleware",
        near="none: a proxy before the server sets them",
    ),  # fmt: skip
    _lacking("--allow-credentials", valued=False, near="none: a proxy before the server sets them"),
    _lacking("--uds", near="--host and --port come near"),
    _lacking("--log-config-file", near="-v and -vv come near"),
    _lacking("--enable-log-requests", valued=False, near="none: requests are not logged; /metrics counts them"),
    _lacking("--enable-server-load-tracking", valued=False, near="/metrics comes near (Prometheus)"),
    _lacking("--enable-request-id-headers", valued=False, near="none: an answer has its id"),
    _lacking("--enable-prompt-tokens-details", valued=False, near="none: /metrics counts cached tokens"),
    _lacking("--enable-force-include-usage", valued=False, near="none: send stream_options.include_usage"),
    _lacking("--return-tokens-as-token-ids", valued=False, near="none: send return_token_ids"),
    _lacking(
        "--tool-parser-plugin", "--reasoning-parser-plugin", near="--tool-call-parser and --reasoning-parser come near"
    ),
    _lacking("--tool-server", near="none: clients run tools"),
    _lacking("--enable-sleep-mode", valued=False, near="none: end the server, and start it again"),
    _lacking("--data-parallel-rank", "--data-parallel-address", near="none: start a server per group of GPUs"),
    _lacking(
        "--nnodes", "--node-rank", "--master-addr", "--master-port", near="torchrun comes near (docs/nodes-launch.md)"
    ),
    _lacking("--all2all-backend", "--moe-backend", near="none: the plan of a step chooses (weft doctor, -vv)"),
    _lacking("--enable-eplb", "--enable-dbo", valued=False, near="none: --expert-layout comes near"),
    _lacking("--api-server-count", "-asc", near="none: one process answers HTTP"),
    _lacking("--kv-transfer-config", "--kv-events-config", near="none: prompts are read where they are answered"),
    _lacking("--otlp-traces-endpoint", near="/metrics comes near (Prometheus)"),
    _lacking("--config", near="none: write the flags out"),
)
_BY_NAME = {name: flag for flag in FLAGS for name in flag.names}


def spellings(field: str) -> tuple[str, ...]:
    """vLLM's names of the flag of an option."""
    return tuple(name for flag in FLAGS if flag.field == field for name in flag.names)


def rewritten(words: Sequence[str], command: str = "serve") -> list[str]:
    """Words of a command's line with weft's in place of vLLM's. ValueError for a flag that weft has not.

    vLLM takes `_` for `-` in names, so these are taken too.
    """
    words, result = list(words), []
    while words:
        word = words.pop(0)
        if word == "--":
            return [*result, word, *words]
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        flag = _BY_NAME.get(name)
        if flag is None or flag.field is not None or command not in flag.commands:
            result.append(name + equals + value)
            continue
        if flag.valued and not equals and words:
            value = words.pop(0)
        stand_for = None if flag.words is None else flag.words(value)
        if stand_for is None:
            given = f"{name} {shortened(value)}" if value else name
            raise ValueError(f"{given} is a flag of vLLM that weft has not: {flag.note.removeprefix('none: ')}")
        result += stand_for
    return result


def table() -> str:
    """List of the flags for the page, in Markdown."""
    lines = ["| vLLM | weft | |", "|---|---|---|"]
    for flag in FLAGS:
        names = ", ".join(f"`{name}`" for name in flag.names)
        if flag.field is not None:
            ours, rest = "the same", flag.note
        elif flag.words is None:
            ours, rest = "refused", flag.note
        else:
            ours, rest = "taken", flag.note
        lines.append(f"| {names} | {ours} | {rest} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
