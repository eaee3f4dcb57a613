"""Engines beside each other: what is timed, how engines that start together take turns, and the pages from their files."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import engine_page, engines, fp8_page
from benchmarks.pages import DOCS, with_tables
from tests.limits import PROCESS


@pytest.fixture
def clock(monkeypatch):
    """A list whose only entry is the time of `engines`, in seconds."""
    now = [0.0]
    monkeypatch.setattr(engines, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.mark.parametrize("longest, calls, counted", [(60.0, 14, 5), (0.01, 10, 3)], ids=["in time", "late"])
def test_a_row_counts_calls_after_the_first(clock, longest, calls, counted):
    """Two pairs of calls come first and are not counted; three count however long they take."""
    lengths = []

    def generate(ids, new):
        clock[0] += 0.02
        lengths.append((len(ids), len(ids[0]), new))

    row = engines.measured(generate, 2, 4, 5, longest, 100)
    assert lengths == [(2, 4, new) for _ in range(calls // 2) for new in (1, 65)]
    assert [len(times) for times in row["seconds"]] == [counted, counted]
    assert row["tokens_a_second"] > 0


@pytest.mark.parametrize(
    "slow, pairs", [({1: 15, 4: 15, 7: 15}, 6), ({1: 5, 3: 10, 5: 20, 7: 40, 9: 80}, 4)], ids=["steady", "never steady"]
)
def test_a_row_counts_no_call_in_which_kernels_are_compiled(clock, slow, pairs):
    """Some calls take seconds, as for kernels of sizes that the schedule meets later; at most a minute is waited."""
    calls = []

    def generate(ids, new):
        calls.append(new)
        clock[0] += slow.get(len(calls), 0.1)

    row = engines.measured(generate, 1, 4, 3, 60.0, 100)
    assert len(calls) == 2 * (pairs + 3)
    assert (max(map(max, row["seconds"])) < 0.2) == (pairs == 6)


def test_engines_that_start_together_measure_in_turn(tmp_path):
    """No engine measures before all are ready or have failed, and no two do at once."""
    events = []

    def one(name, start):
        time.sleep(start)
        events.append("ready")
        with engines.alone(tmp_path / "room", 2, name, time.perf_counter()):
            events.append(f"begin {name}")
            time.sleep(0.05)
            events.append(f"end {name}")

    threads = [threading.Thread(target=one, args=(name, start)) for name, start in (("a", 0.0), ("b", 0.3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events[:2] == ["ready", "ready"]
    assert events[2:] in [[f"{what} {name}" for name in order for what in ("begin", "end")] for order in ("ab", "ba")]


@pytest.mark.parametrize(("killed", "since"), [(True, 0.0), (False, engines.PATIENCE)])
def test_a_ready_engine_has_time_left_where_another_was_killed_or_hangs(tmp_path, killed, since):
    """A second arrival of one engine, at its end, does not stand for another's."""
    engines.arrive(tmp_path, "a")
    if killed:
        engines.arrive(tmp_path, "b")
    with engines.alone(tmp_path, 2, "a", time.perf_counter() - since):
        assert len(list(tmp_path.glob("*.here"))) == 1 + killed


def test_configs_of_fp8_keep_routers_and_wrap_text_models():
    fp8 = engines.config_of("qwen3-30b-a3b", "fp8")["quantization_config"]
    assert fp8["weight_block_size"] == [128, 128]
    assert fp8["modules_to_not_convert"][:2] == ["lm_head", "model.layers.0.mlp.gate"]
    text = engines.config_of("qwen3.6-27b")
    assert text["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert text["text_config"]["hidden_size"] == text["vision_config"]["out_hidden_size"] == 5120


def started(monkeypatch, model, **more):
    """Arguments by which SGLang is started for a model, and the calls of generate()."""
    made, calls = {}, []

    class Engine:
        def __init__(self, **arguments):
            made.update(arguments)

        def generate(self, **request):
            calls.append(request)

    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=Engine))
    setting = {
        "world_size": 2,
        "quantization": None,
        "batches": [8, 1, 8],
        "drafts": 0,
        "acceptance": 1.0,
        "draft_head": "model",
        "adaptive": False,
        "options": {},
    }
    engines.sglang_engine(engines.Setting(model=model, **{**setting, **more}))([[3, 4], [5, 6]], 65)
    return made, calls


def test_sglang_is_given_ids_and_a_cache_of_the_same_bytes(monkeypatch):
    """2e9 bytes of 64 layers with 4 of 8 KV heads of 128 in bf16 a GPU, at 131,072 bytes a token."""
    made, calls = started(
        monkeypatch, "qwen3-32b", quantization="fp8", options={"kv_cache_memory_bytes": 2_000_000_000}
    )
    assert made["max_total_tokens"] == 2_000_000_000 // 131_072
    assert "kv_cache_memory_bytes" not in made and made["tp_size"] == 2 and made["disable_radix_cache"]
    assert made["cuda_graph_bs_decode"] == [1, 8] and made["max_running_requests"] == 8
    assert json.loads((Path(made["model_path"]) / "config.json").read_text())["quantization_config"] == {
        **engines.BLOCK_FP8, "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    [request] = calls
    assert request["input_ids"] == [[3, 4], [5, 6]]
    assert request["sampling_params"] == {"max_new_tokens": 65, "temperature": 0.0, "ignore_eos": True}


def test_wefts_cache_is_of_the_same_bytes(monkeypatch):
    made = {}
    monkeypatch.setattr(engines.weft, "LLM", lambda config, **arguments: made.update(arguments))
    options = {"kv_cache_memory_bytes": 2_000_000_000}
    setting = engines.Setting(
        model="qwen3-32b", world_size=2, quantization="fp8", batches=[8], drafts=0, acceptance=1.0, draft_head="model",
        adaptive=False, options=options,
    )  # fmt: skip
    engines.weft_engine(setting)
    assert made["pages"] == 2_000_000_000 // 131_072 // made["page_size"] + 1
    assert "kv_cache_memory_bytes" not in made and options == {"kv_cache_memory_bytes": 2_000_000_000}


# In place of python: writes down what is started, and the file of an engine's rows.
PYTHON = """#!/bin/bash
[ "$1" = -c ] && exit 0
case "$2 $3" in
*engine_kernels*) echo "kernels ${*:3}" >> "$STARTED" ;;
*engines\\ run) echo "$4 $6" >> "$STARTED" ;;
esac
while [ $# -gt 1 ]; do
    [ "$1" = --json ] && echo '"first_ms"' > "$2"
    shift
done
"""


def test_engines_start_in_order_and_at_most_two_at_once(tmp_path):
    """Kernels are compiled before two models in fp8 of vLLM, and not for weft, bf16, or a model on two GPUs."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    models = ["qwen3-8b:fp8:1", "qwen3-32b:fp8:1", "qwen3-0.6b:bf16:1", "qwen3-30b-a3b:fp8:2"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", Path(engines.__file__).parent / "engines.sh", tmp_path / "out", "-", *[f"{one}:1x128:1" for one in models]],
        env={"ENGINES": "weft vllm", "AT_ONCE": "2", "STARTED": str(tmp_path / "started"), "PATH": path},
        check=True, capture_output=True, timeout=PROCESS,
    )  # fmt: skip
    lines = (tmp_path / "started").read_text().splitlines()
    assert [set(lines[:2]), set(lines[2:4])] == [
        {"weft qwen3-8b", "weft qwen3-32b"}, {"weft qwen3-0.6b", "weft qwen3-30b-a3b"},
    ]  # fmt: skip
    assert [set(lines[4:7]), set(lines[7:])] == [
        {"kernels vllm qwen3-8b qwen3-32b", "vllm qwen3-8b", "vllm qwen3-32b"}, {"vllm qwen3-0.6b", "vllm qwen3-30b-a3b"},
    ]  # fmt: skip


def test_sglang_fuses_all_reduces_of_mixtures_without_multicast(monkeypatch):
    name = "flashinfer_allreduce_fusion_backend"
    assert started(monkeypatch, "qwen3-30b-a3b")[0][name] == "trtllm"
    assert name not in started(monkeypatch, "qwen3-30b-a3b", world_size=1)[0]
    assert name not in started(monkeypatch, "qwen3-8b")[0]


@pytest.mark.parametrize("model, drafts", [("qwen3-8b", 3), ("qwen3.6-27b", 0)])
def test_sglang_refuses_what_it_cannot_measure_here(monkeypatch, model, drafts):
    with pytest.raises(SystemExit, match="measure weft and vllm"):
        started(monkeypatch, model, drafts=drafts)


def test_the_table_has_a_column_for_each_engine(tmp_path):
    files = []
    for engine, per_token in (("weft", 2.0), ("vllm", 3.0), ("sglang", 2.5)):
        files.append(tmp_path / f"{engine}.json")
        files[-1].write_text(json.dumps(report(engine, per_token)))
    lines = engines.table(files).splitlines()
    assert lines[2] == "| prompts x tokens | weft | vllm 1 | sglang 1 |"
    assert lines[4] == "| 8x128 | 10.0 / 2.00 | 10.0 / 3.00 (1.00 x, 1.50 x) | 10.0 / 2.50 (1.00 x, 1.25 x) |"


def report(engine, per_token, **more):
    row = {"prompts": 8, "tokens": 128, "first_ms": 10.0, "per_token_ms": per_token}
    return {
        "engine": engine, "version": "1", "model": "m", "world_size": 2, "device": "GPU", "ready_seconds": 3.0,
        "revision": "abcdef01 (weft/ 0)", "rows": [row], **more,
    }  # fmt: skip


def test_the_page_pairs_runs_of_one_setting(tmp_path):
    runs = (
        report("weft", 2.0),
        report("vllm", 3.0),
        report("weft", 1.0, drafts=3, acceptance=2.5),
        report("sglang", 2.5),
    )
    for number, run in enumerate(runs):
        (tmp_path / f"{number}.json").write_text(json.dumps(run))
    page = engine_page.tables([tmp_path])
    assert page.count("## m, bf16") == 1
    assert page.count("##") == 1
    assert (
        "| 8x128 | 10.0 | 2.00 | 3,768 | 10.0 | 3.00 | 2,574 | 1.00 | 1.50 | 10.0 | 2.50 | 3,059 | 1.00 | 1.25 |"
        in page
    )
    assert "Geometric means of the rows that both have: vLLM 1.00 and 1.50; SGLang 1.00 and 1.25." in page


def test_the_page_has_rows_that_weft_lacks(tmp_path):
    other = report("vllm", 3.0)
    other["rows"] = [*other["rows"], {**other["rows"][0], "prompts": 16}]
    for run in (report("weft", 2.0), other):
        (tmp_path / f"{run['engine']}.json").write_text(json.dumps(run))
    page = engine_page.tables([tmp_path])
    assert "\n| 16x128 | – | – | – | 10.0 | 3.00 | 5,149 | – | – |\n" in page
    assert "Geometric means of the rows that both have: vLLM 1.00 and 1.50." in page


@pytest.mark.parametrize("version, marked", [(None, True), ("0.6.14", False)])
def test_the_page_says_of_vllm_that_it_ran_without_flashinfer(tmp_path, version, marked):
    for run in (report("weft", 2.0), report("vllm", 3.0, flashinfer=version)):
        (tmp_path / f"{run['engine']}.json").write_text(json.dumps(run))
    note = "\nvLLM without FlashInfer, so without fused all-reduces.\n"
    assert (note in engine_page.tables([tmp_path])) == marked


def test_pages_have_the_tables_that_the_commands_write():
    engines_of = {"engines": engine_page.tables(engine_page.LAB / name for name in engine_page.FOLDERS)}
    for page, tables in (("fp8-gemms.md", fp8_page.tables()), ("beside-vllm.md", engines_of)):
        text = (DOCS / page).read_text()
        assert with_tables(text, tables) == text, page
