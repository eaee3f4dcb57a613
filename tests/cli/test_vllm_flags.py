"""Flags of vLLM: equal ones are spellings, some become words of weft, and the rest are refused with what comes near.

vllm_flags.txt has the flags that the parser of vLLM 0.26.0's `serve` takes: a name, "value" for one with values, "boolean" for
one with a form with `--no-`, else "switch", and its short names.
"""

import re
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

from tests.documents import ROOT
from weft.cli import app, engine_flags, generate, serve, vllm_flags
from weft.cli.vllm_flags import FLAGS, QUANTIZATIONS, rewritten
from weft.console import WORLD_SIZE
from weft.engine.config import EngineConfig
from weft.engine.sizes import cache_budget
from weft.models.quantization import MADE

ALL_OF_VLLM = [line.split() for line in (ROOT / "tests" / "cli" / "vllm_flags.txt").read_text().splitlines()]
OPTIONS = {one.name for kind in (serve.ServeFlags, generate.GenerateFlags) for one in fields(kind)}
# Flags and values as they stand in public launch scripts of `vllm serve`, and what is left of them.
SCRIPTS = [
    (
        "Qwen/Qwen2.5-3B-Instruct --dtype auto --max-model-len 4096 --gpu-memory-utilization 0.85 --enable-auto-tool-choice",
        "Qwen/Qwen2.5-3B-Instruct --dtype auto --max-model-len 4096 --gpu-memory-utilization 0.85",
    ),
    (
        "--model meta-llama/Llama-3.1-8B-Instruct --max-num-seqs 256 --max-num-batched-tokens 4096",
        "meta-llama/Llama-3.1-8B-Instruct --max-num-seqs 256 --max-num-batched-tokens 4096",
    ),
    (
        "M --served-model-name S --tensor-parallel-size 8 --trust-remote-code --dtype bfloat16 --kv-cache-dtype fp8 "
        "--enable-expert-parallel --no-enable-prefix-caching --max-num-seqs 32 --host 0.0.0.0 --port 8000",
        "M --served-model-name S --tensor-parallel-size 8 --dtype bfloat16 --kv-cache-dtype fp8 "
        "--expert-layout whole --no-enable-prefix-caching --max-num-seqs 32 --host 0.0.0.0 --port 8000",
    ),
    (
        "M --host 0.0.0.0 --port 8000 --gpu-memory-utilization 0.9 --tensor-parallel-size=4 --max-num-seqs 512 "
        "--disable-log-requests",
        "M --host 0.0.0.0 --port 8000 --gpu-memory-utilization 0.9 --tensor-parallel-size=4 --max-num-seqs 512",
    ),
    (
        "M --gpu-memory-utilization 0.9 --max_model_len 8192 --swap-space 0 --enforce-eager --kv-cache-dtype=fp8_e4m3",
        "M --gpu-memory-utilization 0.9 --max-model-len 8192 --no-cuda-graph --kv-cache-dtype fp8",
    ),
    ("M --seed 42 --block-size 16 -pp 2 --load-format dummy", "M --seed 42 --block-size 16 -pp 2 --dummy-weights"),
    ("M --enable-lora --max-loras 4 --lora-modules sql=a --lora-modules b=c", "M --lora sql=a --lora b=c"),
    ("M --lora-modules sql=a b=c --max-cpu-loras 2", "M --lora sql=a --lora b=c"),
    ("M -q fp8 -ep", "M --quantization fp8 --expert-layout whole"),
    ("M -q --port 1", "M -q --port 1"),
    ("M --max-model-len 1.5k --max-num-batched-tokens=8K", "M --max-model-len 1500 --max-num-batched-tokens=8192"),
    ("M --dtype half --max-model-len 1.5K --port 16k", "M --dtype float16 --max-model-len 1.5K --port 16k"),
    (
        "M --no-enable-expert-parallel --no-enforce-eager --no-enable-log-requests --mm-processor-cache-gb 0 -dp 1 -sc {}",
        "M --expert-layout slices --speculative-config {}",
    ),
    ("M --language-model-only --disable-fastapi-docs --prefix-caching-hash-algo sha256 --port 1", "M --port 1"),
    ("M --prompt=--swap-space -- --swap-space 4", "M --prompt=--swap-space -- --swap-space 4"),
]
REFUSED = {
    "--swap-space 16": "--swap-space 16 is a flag of vLLM that weft has not: a preempted request",
    "--hf-overrides {}": "weft has not: edit config.json in a copy",
    "--limit-mm-per-prompt {}": "weft has not: weft serves text",
    "--generation-config vllm": "weft has not: generation_config.json of the checkpoint applies",
    "--distributed-executor-backend ray": "weft has not: a process per GPU on this machine, and torchrun between",
    "--data-parallel-size=2": "--data-parallel-size 2 is a flag of vLLM that weft has not: start a server",
    "--tokenizer x": "weft has not: put tokenizer.json into the checkpoint's directory",
    "--chat-template x.jinja": "--chat-template x.jinja is a flag of vLLM that weft has not: put chat_template.jinja into",
    "--default-chat-template-kwargs={}": "weft has not: send chat_template_kwargs with each request",
    "--uds /tmp/x": "--uds /tmp/x is a flag of vLLM that weft has not: --host and --port come near",
    "--enable-log-requests": "weft has not: requests are not logged; /metrics counts them",
    "--revision main": "weft has not: MODEL@REVISION comes near",
    "--mamba-cache-dtype bfloat16": "weft has not: states of gated delta nets stay in fp32",
    "--lora-dtype float16": "weft has not: adapters have the dtype of the computation",
    "--kv-cache-metrics": "weft has not: /metrics comes near",
    "--no-async-scheduling": "--no-async-scheduling is a flag of vLLM that weft has not: the host always runs",
    "--compilation_config.mode 3": "--compilation-config.mode 3 is a flag of vLLM that weft has not: Triton compiles",
    "--speculative-config.method ngram": "weft has not: pass --speculative-config as JSON",
    "-O3": "-O 3 is a flag of vLLM that weft has not: Triton compiles",
}


def options_of(command):
    """Options of a command, by each of their spellings."""
    params = typer.main.get_command(app).commands[command].params
    return {name: one for one in params for name in (*one.opts, *one.secondary_opts) if name.startswith("-")}


@pytest.mark.parametrize(("script", "left"), SCRIPTS)
def test_flags_of_launch_scripts_are_taken_as_weft_has_them(script, left):
    assert rewritten(script.split()) == left.split()
    if "--prompt" not in script:
        assert {word.partition("=")[0] for word in left.split() if word.startswith("-")} <= {*options_of("serve"), "-q"}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_flag_that_weft_has_not_is_refused_with_what_comes_near(flags):
    for command in ("serve", "generate"):
        result = CliRunner().invoke(app, [command, *flags.split()])
        assert result.exit_code == 2 and result.stderr.startswith("weft: ") and result.stderr.count("\n") == 1
        assert REFUSED[flags] in result.stderr


def test_each_flag_stands_once_and_spells_an_option_that_is_there():
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len({*names})
    for flag in FLAGS:
        assert flag.field is None or flag.field in OPTIONS, flag
        assert flag.field is None or flag.words is None
    assert {*vllm_flags.spellings("world_size")} < {*WORLD_SIZE}
    assert {*QUANTIZATIONS} == {*MADE}
    for command in ("serve", "generate"):
        rewrites = {name for flag in FLAGS if flag.field is None and command in flag.commands for name in flag.names}
        assert rewrites & {*options_of(command)} <= {"--kv-cache-dtype"}


def test_every_flag_of_vllm_s_server_is_taken_or_refused_by_its_name():
    """So none reaches the parser of weft's options unknown, which would name options that look alike."""
    known, by_name = options_of("serve"), {name: flag for flag in FLAGS for name in flag.names}
    assert len(ALL_OF_VLLM) == 274
    for first, kind, *short in ALL_OF_VLLM:
        spelled = [[name, "VALUE"] if kind == "value" else [name] for name in (first, *short) if name != "-q"]
        spelled += [[f"--no-{first[2:]}"]] if kind == "boolean" else []
        for words in spelled:
            try:
                left = rewritten(words)
            except ValueError as error:
                given, why = str(error).split(" is a flag of vLLM that weft has not: ")
                assert given == " ".join(words) and why
                continue
            assert {word for word in left if word.startswith("-")} <= {*known}, words
            if left == words:
                assert known[words[0]].is_flag == (kind != "value"), words
        if first in by_name:
            assert by_name[first].valued == (kind == "value"), first


def test_every_flag_that_the_messages_name_is_weft_s():
    known = {*options_of("serve"), *options_of("generate")}
    for flag in FLAGS:
        for named in re.findall(r"(?<![\w-])(?:--[a-z-]+|-[a-z]+)", flag.note):
            assert named in {*known, "-v", "-vv", "-q"}, (flag.names, named)
        if flag.words is not None and not flag.valued:
            assert {word for word in flag.words("") if word.startswith("-")} <= known


def test_two_values_of_a_flag_under_two_names_are_refused():
    for first, second in (("--max-batch", "--max-num-seqs"), ("--chunk-tokens", "--max-num-batched-tokens")):
        result = CliRunner().invoke(app, ["generate", first, "2", second, "3", "--device", "sim"])
        assert result.stderr == f"weft: {first} (also {second}) is given as 2 and 3; give one value\n"


def test_the_share_of_a_whole_gpu_counts_what_is_taken_already():
    free, whole = 100 << 30, 140 << 30
    assert cache_budget(EngineConfig(), free, whole, 10 << 30) == int((90 << 30) * 0.8)
    share = EngineConfig(gpu_memory_utilization=0.9)
    # 40 GiB are taken, 10 are reserved, 14 stay free: the cache gets the rest of 140.
    assert cache_budget(share, free, whole, 10 << 30) == pytest.approx((140 - 40 - 10 - 14) << 30, abs=1)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=1.5 is not in \(0, 1\]"):
        EngineConfig(gpu_memory_utilization=1.5)


def test_options_of_the_engine_reach_it():
    flags = engine_flags.EngineFlags(
        chunk_tokens=512, gpu_memory_utilization=0.5, cuda_graph=False, memory_fraction=0.7
    )
    config = flags.engine_config()
    assert (config.chunk_tokens, config.gpu_memory_utilization, config.cuda_graph) == (512, 0.5, False)


def test_the_page_lists_the_table():
    assert vllm_flags.table() in (ROOT / "docs" / "vllm-flags.md").read_text()
