"""`weft generate` as a person meets it: a sum over virtual ranks, and one line for each thing they can get wrong."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from tests.limits import PROCESS
from weft import LLM, SamplingParams
from weft.cli import app, generate
from weft.engine import engine as engine_module
from weft.models.builtin import PATH as BUILTIN
from weft.models.families import PUBLISHED


def weft(*arguments):
    return CliRunner().invoke(app, ["generate", "--device", "sim", *map(str, arguments)])


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the built-in model that a test may spoil."""
    return shutil.copytree(BUILTIN, tmp_path / "model")


@pytest.mark.parametrize("mode", ["torch", "ag_rs"])
def test_adds_in_every_mode(mode):
    result = weft("--mode", mode, "--world-size", 2)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == "123+456=579"
    assert result.stderr.startswith("first token after")
    assert f"mode {mode}, 2 ranks, simulated" in result.stderr


def test_several_prompts_keep_their_order():
    result = weft("--prompt", "20+22=", "--prompt", "123+456=", "--world-size", 2, "--mode", "torch")
    assert result.stdout.split() == ["20+22=42", "123+456=579"]


def test_flags_reach_the_engine():
    alone = ("--world-size", 1, "--mode", "torch")
    assert weft("--max-tokens", 2, *alone).stdout.strip() == "123+456=57"
    assert weft("--stop", "9", *alone).stdout.strip() == "123+456=57"
    ended, further = (weft(*alone, "--max-tokens", 8, *flags) for flags in ((), ("--ignore-eos",)))
    assert len(further.stdout) > len(ended.stdout) and further.stdout.startswith("123+456=579")


def test_prompts_of_a_file_are_answered_as_json(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("20+22=\n\n1+1=\n", encoding="utf-8")
    lines = [json.loads(line) for line in weft("--prompts-file", file, "--json", "--world-size", 1).stdout.splitlines()]
    assert [(line["prompt"], line["text"], line["index"]) for line in lines] == [("20+22=", "42", 0), ("1+1=", "2", 0)]
    assert all(line["finish_reason"] == "eos" and line["token_ids"] for line in lines)
    given = CliRunner().invoke(
        app, ["generate", "--device", "sim", "--world-size", "1", "--prompts-file", "-", "--json"], input="20+22=\n"
    )
    assert json.loads(given.stdout) == lines[0]


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_an_answer_that_ends_by_an_error_is_printed_before_it(more):
    flags = "--regex", "1[12]", "--bad-words", "11", "--bad-words", "12", "--world-size", 2
    result = weft("--prompt", "20+22=", *flags, *more)
    message = "no token is left for place 1 of the answer: bad_words and structured_outputs (regex) exclude all"
    assert result.exit_code == 2 and f"an answer has ended by an error: {message}" in result.stderr.splitlines()[-1]
    if more:
        line = json.loads(result.stdout)
        assert (line["text"], line["finish_reason"]) == ("1", "error") and line["error"].startswith(message)
    else:
        assert result.stdout.strip() == "20+22=1"


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        (b"\n\n", [], "holds no prompt"),
        (b"\xff", [], "cannot be read"),
        (None, [], "cannot be read"),
        (b"1+1=", ["--prompt", "2+2="], "takes the place of --prompt"),
    ],
)
def test_a_file_without_prompts_is_one_line(tmp_path, content, flags, says):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    result = weft("--prompts-file", file, *flags)
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1


def test_prompts_without_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "MOST_PROMPT_BYTES", 20)
    (tmp_path / "long").write_text("1+1=\n" * 4 + "é")
    (tmp_path / "fits").write_text("1+1=\n" * 4)
    for file in ("/dev/zero", tmp_path / "long"):
        result = weft("--prompts-file", file)
        assert (result.exit_code, result.stderr) == (
            2, f"weft: --prompts-file {file} holds more than 20 bytes; split it\n"
        )  # fmt: skip
    given = CliRunner().invoke(app, ["generate", "--device", "sim", "--prompts-file", "-"], input="1+1=\n" * 5)
    assert given.exit_code == 2 and given.stderr == "weft: --prompts-file - holds more than 20 bytes; split it\n"
    assert weft("--prompts-file", tmp_path / "fits", "--world-size", 1, "--json").exit_code == 0


@pytest.mark.parametrize("schema", ["{", "", "x", '{"a": 1,}', "[" * 100_000])
def test_a_schema_that_is_no_json_names_the_flag_and_the_column(schema):
    result = weft("--json-schema", schema, "--world-size", 1)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and len(result.stderr) < 1000
    assert result.stderr.startswith("weft: --json-schema '") and "is not a JSON schema: " in result.stderr
    assert "column" in result.stderr or "recursion" in result.stderr


@pytest.mark.parametrize("name", ["", " "])
def test_a_served_name_is_some_text(name):
    result = CliRunner().invoke(app, ["serve", "--served-model-name", name])
    assert (result.exit_code, result.stderr) == (
        2, f"weft: --served-model-name {name!r} names nothing; pass some text, or leave it out\n"
    )  # fmt: skip


def test_the_built_in_model_chats(checkpoint):
    result = weft("--chat", "--prompt", "20+22=", "--world-size", 1)
    assert result.stdout == "20+22=\n42\n", result.stderr
    settings = checkpoint / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": None}))
    says = "no chat template in tokenizer_config.json and no chat_template.jinja; give it text, not a chat"
    one_line(weft("--model", checkpoint, "--chat", "--world-size", 1), says)


def test_a_chat_puts_prompts_into_the_template(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content }}=")
    result = weft("--model", checkpoint, "--chat", "--prompt", "1+1", "--prompt", "20+22", "--world-size", 1)
    assert result.stdout == "1+1\n2\n20+22\n42\n", result.stderr


def test_the_heap_s_size_is_a_flag():
    assert weft("--world-size", 2, "--heap-bytes", 3 << 20).stdout.strip() == "123+456=579"
    result = weft("--world-size", 2, "--mode", "ag_rs", "--heap-bytes", 1 << 14)
    assert result.exit_code == 2 and "bytes wanted of a symmetric heap of 16,384" in result.stderr


def test_the_plan_is_shown():
    result = weft("--world-size", 2, "--max-tokens", 1, "--top-p", 0.5, "--tune", "--memory-fraction", 0.9)
    assert "--top-p has no effect at temperature 0; pass --temperature" in result.stderr
    for flag in ("--tune", "--memory-fraction"):
        assert f"weft: {flag} has no effect without GPUs" in result.stderr
    by = "replicated, fused, all-reduce with the next norm, deferred RMS scale"
    assert f"prompts of 8 tokens: {by}: 8 tokens, never split: " in result.stderr
    assert "no decode steps\nKV cache split over the ranks by heads: " in result.stderr
    # Three prompts and two seats: a bucket of two. The third is read later.
    prompts = ("--prompt", "20+22=", "--prompt", "123+456=", "--prompt", "1+1=")
    result = weft("--world-size", 2, "--max-batch", 2, "--page-size", 16, *prompts)
    assert f"prompts of 18 tokens, up to 14 at once: {by}: 14 tokens, never split: " in result.stderr
    assert f"decode: {by}: 2 tokens, never split: " in result.stderr


def test_dtypes_have_the_names_of_torch_and_of_weft_bench(monkeypatch):
    made = []
    monkeypatch.setattr(engine_module, "Decoder", lambda *given, dtype, **named: made.append(dtype) or 1 / 0)
    for name in ("fp32", "float32", "bf16", "bfloat16"):
        with pytest.raises(ZeroDivisionError):
            raise weft("--world-size", 1, "--dtype", name).exception
    assert made == [torch.float32] * 2 + [torch.bfloat16] * 2


def test_random_weights_of_a_published_model_answer_in_token_ids(monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tiny = {**PUBLISHED["qwen3-0.6b"], **sizes, "num_key_value_heads": 1, "vocab_size": 1000}
    monkeypatch.setitem(PUBLISHED, "qwen3-tiny", tiny)
    flags = ("--dummy-weights", "--model", "qwen3-tiny", "--prompt-tokens", 5, "--max-tokens", 3, "--world-size", 1)
    result = weft(*flags, "--max-seq-len", 32, "--page-size", 16)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.split()) == 3 and all(0 <= int(token) < 1000 for token in result.stdout.split())
    assert "prompts of 5 tokens" in result.stderr


def test_token_ids_are_answered_in_token_ids_without_a_tokenizer(checkpoint):
    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode("123+456=").ids
    (checkpoint / "tokenizer.json").unlink()
    prompt = ("--prompt-token-ids", ",".join(map(str, ids)))
    alone = ("--world-size", 1, "--mode", "torch")
    with_it, without = (weft(*where, *prompt, *alone) for where in ((), ("--model", checkpoint)))
    assert with_it.stdout == without.stdout, without.output
    tokens = list(map(int, without.stdout.split()))
    assert Tokenizer.from_file(str(BUILTIN / "tokenizer.json")).decode(tokens).startswith("579")
    both = weft("--model", checkpoint, *prompt, *prompt, *alone)
    assert both.stdout == without.stdout * 2
    # Text is refused before the weights are read.
    (checkpoint / "model.safetensors").write_bytes(b"")
    for flags in ((), ("--prompt", "1+1="), ("--chat",), (*prompt, "--stop", "9")):
        result = weft("--model", checkpoint, *flags)
        one_line(
            result, "no tokenizer.json in it, so it has no text; pass --prompt-token-ids 1,2,3 without --stop, or save"
        )


def test_a_folder_that_is_no_checkpoint_is_not_asked_for_its_tokenizer(tmp_path):
    one_line(weft("--model", tmp_path), f"{tmp_path}: no config.json in it, so it is not a Hugging Face checkpoint")


def test_runs_as_a_module():
    command = [
        sys.executable,
        "-m",
        "weft",
        "generate",
        "--device",
        "sim",
        "--world-size",
        "1",
        "--prompt",
        "1+1=",
        "--mode",
        "torch",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS)
    assert (done.returncode, done.stdout.strip()) == (0, "1+1=2"), done.stderr


def edit_config(checkpoint, **changes):
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def of_no_family(checkpoint):
    edit_config(checkpoint, model_type="gpt2", architectures=["GPT2LMHeadModel"])


def truncated(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def no_config(checkpoint):
    (checkpoint / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(of_no_family, "gpt2"), (truncated, "model.safetensors"), (no_config, "config.json")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_checkpoint_that_cannot_be_loaded(checkpoint, spoil, says):
    spoil(checkpoint)
    one_line(weft("--model", checkpoint, "--world-size", 2), says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "/nowhere"], "/nowhere: no such directory"),
        (
            ["--mode", "fast"],
            "choose one of reference, sequence_parallel, replicated, auto, invariant, torch, ag_rs, gemm_ar",
        ),
        (["--device", "tpu"], "choose one of auto, cuda, sim"),
        (["--dtype", "int8"], "choose one of auto, bf16, fp16, fp32, bfloat16, float16, float32"),
        (["--world-size", "7"], "7"),
        (["--world-size", "0"], "0"),
        (["--prompt", "1+" * 5000], "tokens"),
        (["--prompt", ""], "empty"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--regex", "1", "--choice", "2"], "structured_outputs has regex and choice; pass one of"),
        (["--max-batch", "0"], "max_batch=0"),
        (["--page-size", "20"], "page_size=20"),
        (["--page-size", "0"], "page_size=0 is not one of 16, 32, 64, 128, 256"),
        (["--max-seq-len", "1000"], "max_seq_len=1000 is not in 2 .. max_position_embeddings=64"),
        (["--dummy-weights"], "--model NAME, such as qwen3-32b"),
        (["--dummy-weights", "--model", "llama"], "choose one of qwen3-0.6b, "),
        (["--dummy-weights", "--model", "qwen3-32b"], "or run the built-in model, without --model and --dummy-weights"),
        (
            ["--prompt", "hello"],
            "prompts[0]='hello' has 'h', 'e', 'l', 'o', which this model does not read; it reads + 0 1 ",
        ),
        (["--chat", "--prompt", "hi"], "the rendered conversation='hi' has 'h', 'i', which this model does not read"),
        (["--bad-words", "x"], "bad_words='x' has 'x', which this model does not read"),
        (["--dummy-weights", "--model", "qwen3-32b", "--chat"], "instead of --prompt and --chat"),
        (["--model", ""], "model='' names no directory"),
        (["--prompt-tokens", "3"], "goes with --dummy-weights"),
        (["--expert-layout", "3x"], "--expert-layout '3x' is not whole, slices or EPxTP, such as 2x4"),
        (["--warm-up-late"], "--warm-up-late has no effect without --warm-up; leave it out, or change that"),
        (["--no-cuda-graph", "--warm-up"], "--warm-up has no effect with --no-cuda-graph"),
        (
            ["--no-prefix-caching", "--state-snapshot-tokens", "4096"],
            "--state-snapshot-tokens has no effect with --no-prefix",
        ),
        (
            ["--memory-fraction", "0.5", "--gpu-memory-utilization", "0.9"],
            "--memory-fraction has no effect with --gpu-mem",
        ),
        (["--prompt-token-ids", ""], "--prompt-token-ids '' is not a list of token ids, as in 1,2,3"),
        (["--prompt-token-ids", "1,x"], "--prompt-token-ids '1,x' is not a list of token ids"),
        (["--prompt-token-ids", "1,-2"], "is not a list of token ids"),
        (["--prompt-token-ids", "9" * 5000], "is not a list of token ids"),
        (["--prompt-token-ids", "1,999"], "prompts[0][1]=999 is a token id outside 0 .. "),
        (["--prompt-token-ids", "1", "--prompt", "2"], "takes the place of --prompt, --chat and --prompt-tokens"),
        (["--prompt-token-ids", "1", "--chat"], "takes the place of --prompt"),
        (["--prompt-token-ids", "1", "--prompt-tokens", "2"], "takes the place of --prompt"),
    ],
    ids=lambda value: "-".join(value)[:30].strip("-") if isinstance(value, list) else None,
)
def test_bad_input(arguments, says):
    ranks = [] if "--world-size" in arguments else ["--world-size", "2"]
    one_line(weft(*arguments, *ranks), says)


def test_a_large_checkpoint_does_not_become_a_simulation(checkpoint, monkeypatch):
    edit_config(checkpoint, hidden_size=4096, intermediate_size=8192, vocab_size=1000)
    says = " billion parameters, and simulated ranks take at most 0.2 (2 with --mode reference); "
    one_line(
        weft("--model", checkpoint), f"{says}run it on a machine with GPUs, or run the built-in model, without --model"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = CliRunner().invoke(app, ["generate", "--model", str(checkpoint), "--world-size", "4"])
    one_line(result, f"{says}--world-size 4 needs 4 GPUs and this machine has 2")


@pytest.mark.parametrize("command", [["generate"], ["bench", "gemm"], ["tune", "gemm"]], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("sim", "--device sim runs all of them in one process"),
        *((d, "this machine has 0 GPUs") for d in ("auto", "cuda")),
    ],
)
def test_torchrun_starts_no_virtual_ranks(command, device, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, [*command, "--device", device])
    one_line(result, f"torchrun started 2 ranks, and {why}; run the command without torchrun, with --device sim")


@pytest.mark.parametrize("command", [["bench", "all-reduce"], ["tune", "all-reduce"]])
def test_torchrun_s_ranks_are_the_world(command, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    result = CliRunner().invoke(app, [*command, "--world-size", "4"])
    one_line(result, "--world-size 4: torchrun started 2 ranks; leave it out, or run the command without torchrun")


def one_line(result, says):
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert says in result.stderr


def test_traceback_shows_where_it_came_from():
    result = weft("--model", "/nowhere", "--traceback")
    assert isinstance(result.exception, ValueError)


def test_several_greedy_answers_are_alike_on_the_command_line_and_in_python():
    """As from `weft serve`: tests/serve/test_api.py asks it for two."""
    result = weft("--world-size", 1, "--prompt", "1+2=", "--n", 3, "--json", "--mode", "reference")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == [(0, "3"), (1, "3"), (2, "3")], result.output
    with LLM(world_size=1, device="sim", mode="reference") as llm:
        answers = llm.generate("1+2=", SamplingParams(n=3, temperature=0))
    assert [answer.text for answer in answers] == ["3", "3", "3"]
