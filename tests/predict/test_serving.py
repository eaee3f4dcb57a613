"""Choice of how to serve a model: candidates, their predictions, and the file that engines follow."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.engine import followed
from weft.engine.config import EngineConfig
from weft.models import DecoderConfig, builtin
from weft.models.families import PUBLISHED
from weft.predict import load, plan_file
from weft.predict.cluster import Cluster
from weft.predict.serving import Asked, candidates, outlook, ranked

PLAIN = {"schema": 1, "concurrency": 8, "prompt_tokens": 512, "answer_tokens": 128}


def asked(model="qwen3-8b", gpus="2xH200", **content):
    base = {
        name: value for name, value in PLAIN.items() if not (name == "concurrency" and "arrivals_per_second" in content)
    }
    made = load.of({**base, **content})
    config = DecoderConfig.named(model)
    engine = EngineConfig(max_seq_len=min(made.longest, config.max_position_embeddings), max_batch=256)
    return Asked(config=config, cluster=Cluster.of(gpus), load=made, engine=engine)


def test_candidates_of_a_dense_model_and_of_experts():
    dense = list(map(str, candidates(asked())))
    assert dense == [
        "2 x tensor-parallel 1", "tensor-parallel 1, 2 stages", "tensor-parallel 2",
        "tensor-parallel 2, cache spread by pages",
    ]  # fmt: skip
    experts = list(map(str, candidates(asked("qwen3-30b-a3b"))))
    assert "tensor-parallel 2, slices of experts" in experts
    drafted = asked(drafts={"acceptance": 0.7, "most": 2})
    assert [one.drafts for one in candidates(drafted)][:3] == [0, 1, 2]


def test_a_model_that_does_not_fit_one_gpu_gets_several():
    best = ranked(asked("llama-3.1-70b" if "llama-3.1-70b" in PUBLISHED else "qwen3-32b", "4xH100"))[0]
    assert best.candidate.ranks > 1
    alone = [one for one in ranked(asked("qwen3-32b", "1xH100"))]
    assert alone[0].refused == "" or "weights take" in alone[0].refused


def test_a_model_that_fits_nowhere_is_refused_with_its_sizes():
    every = ranked(asked("deepseek-v3" if "deepseek-v3" in PUBLISHED else "qwen3-235b-a22b", "1xH100"))
    assert "weights take" in every[0].refused
    assert "of 85.0" in every[0].refused


def test_low_latency_takes_all_gpus_and_throughput_of_a_small_model_takes_servers():
    fast = ranked(asked("qwen3-8b", arrivals_per_second=1))[0]
    assert str(fast.candidate) == "tensor-parallel 2"
    many = ranked(asked("qwen3-0.6b", concurrency=256))[0]
    assert many.candidate.replicas == 2


def test_targets_decide_before_speed():
    loose = asked("qwen3-32b", concurrency=64)
    first = ranked(loose)[0].token_seconds
    tight = asked("qwen3-32b", concurrency=64, targets={"token_seconds": first / 2})
    assert not ranked(tight)[0].meets(tight.load)
    assert ranked(loose)[0].meets(loose.load)


def test_more_arrivals_mean_more_sequences_and_at_last_overload():
    batches = [ranked(asked(arrivals_per_second=rate))[0] for rate in (1, 10, 40, 4000)]
    assert [one.batch for one in batches] == sorted(one.batch for one in batches)
    assert [one.overloaded for one in batches] == [False, False, False, True]
    assert batches[0].tokens_per_second == pytest.approx(128)
    assert batches[-1].tokens_per_second < 4000 * 128


def test_shared_prefixes_make_first_tokens_earlier():
    one, other = (ranked(asked(shared_prefix=share))[0] for share in (0.0, 0.9))
    assert other.first_token_seconds < one.first_token_seconds / 1.5


def test_drafts_are_taken_where_they_are_accepted():
    likely = ranked(asked(concurrency=1, drafts={"acceptance": 0.9, "most": 4}))[0]
    assert likely.candidate.drafts > 1
    never = ranked(asked(concurrency=1, drafts={"acceptance": 0.0, "most": 4}))[0]
    assert never.candidate.drafts == 0


@pytest.mark.parametrize("model", PUBLISHED)
def test_every_published_model_gets_a_plan(model, tmp_path):
    made = asked(model, "8xB200", prompt_tokens=64, answer_tokens=32)
    every = ranked(made)
    content = plan_file.content_of(made, every, model, {})
    if not every[0].refused:
        followed.write(tmp_path / "plan.json", content)
        assert followed.read(tmp_path / "plan.json").world_size == every[0].candidate.ranks
        assert list(plan_file.lines(made, every, model))


def test_gpus_that_no_server_takes_are_named():
    question = asked("qwen3-32b", "3xH100")
    [servers] = (one for one in plan_file.decisions(question, ranked(question)) if one.what == "servers")
    assert servers.reason.endswith("; 1 of 3 GPUs stay idle")


def test_outlooks_are_sums_of_their_steps():
    made = asked(concurrency=16)
    one = outlook(made, next(one for one in candidates(made) if one.layout.world_size == 2))
    per_step = one.decode_seconds + one.batch / made.load.answer.mean * one.prompt_seconds
    assert one.token_seconds == pytest.approx(per_step)
    assert one.tokens_per_second == pytest.approx(16 / one.token_seconds)


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture
def load_file(tmp_path):
    file = tmp_path / "load.json"
    file.write_text(json.dumps({**PLAIN, "targets": {"token_seconds": 0.05}}))
    return file


def test_the_command_prints_decisions_with_times_and_reasons_and_writes_the_plan(load_file, tmp_path):
    out = tmp_path / "plan.json"
    result = run("qwen3-30b-a3b", "--gpus", "2xH200", "--load", str(load_file), "--out", str(out))
    assert result.exit_code == 0, result.output
    for part in (
        "predicted: ",
        "± ",
        "target:    50 ms for a token: met",
        "memory: ",
        "experts: ",
        "KV cache: ",
        "pages: ",
    ):
        assert part in result.stdout
    document = json.loads(out.read_text())
    assert {one["what"] for one in document["decisions"]} >= {
        "servers",
        "tensor-parallel ranks",
        "experts",
        "batch slots",
    }
    assert all(one["reason"] for one in document["decisions"])
    assert [part["recipe"] for part in document["recipes"]][0] == "fused_norm"
    as_json = json.loads(run("qwen3-30b-a3b", "--gpus", "2xH200", "--load", str(load_file), "--json").stdout)
    assert as_json["server"] == document["server"]


def test_a_missed_target_is_exit_1(load_file):
    load_file.write_text(json.dumps({**PLAIN, "targets": {"token_seconds": 1e-5}}))
    result = run("qwen3-8b", "--gpus", "1xH200", "--load", str(load_file))
    assert result.exit_code == 1
    assert "missed by every candidate" in result.stdout


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("qwen3-8b", "--gpus", "4xT4"), "--gpus '4xT4' is not COUNTxGPU, such as 4xH200; known GPUs are A100"),
        (("qwen3-8b", "--gpus", "H200"), "is not COUNTxGPU"),
        (("qwen3-9b", "--gpus", "1xH200"), "qwen3-9b"),
        (("qwen3-8b", "--gpus", "1xH200", "--page-size", "48"), "48"),
    ],
)
def test_what_is_refused(flags, reason, load_file):
    result = run(*flags, "--load", str(load_file))
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())


def test_a_load_longer_than_the_model_is_refused(load_file):
    load_file.write_text(json.dumps({**PLAIN, "prompt_tokens": 1 << 20}))
    result = run("qwen3-8b", "--gpus", "1xH200", "--load", str(load_file))
    assert result.exit_code == 2
    assert "positions; shorten them" in " ".join(result.stderr.split())


def test_options_that_are_given_stay(load_file, tmp_path):
    out = tmp_path / "plan.json"
    flags = ("--quantization", "fp8", "--kv-cache-dtype", "fp8", "--max-batch", "4", "--out", str(out))
    assert run("qwen3-8b", "--gpus", "1xH200", "--load", str(load_file), *flags).exit_code == 0
    options = json.loads(out.read_text())["server"]["engine"]
    assert (options["quantization"], options["kv_cache_dtype"], options["max_batch"]) == ("fp8", "fp8", 4)
    assert dataclasses.fields(EngineConfig)


def test_a_plan_of_a_checkpoint_is_followed_by_generate(tmp_path):
    """On virtual ranks; an option that differs is one line."""
    if torch.cuda.device_count():
        pytest.skip("for machines without a GPU")
    loaded, out = tmp_path / "load.json", tmp_path / "plan.json"
    targets = {"token_seconds": 1}
    loaded.write_text(
        json.dumps({**PLAIN, "prompt_tokens": 9, "answer_tokens": 6, "concurrency": 2, "targets": targets})
    )
    result = run(str(builtin.PATH), "--gpus", "2xH200", "--load", str(loaded), "--out", str(out), "--max-batch", "2")
    assert result.exit_code == 0, result.output
    flags = ["generate", "--device", "sim", "--plan", str(out), "--prompt", "20+22=", "--max-tokens", "3"]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert "20+22=42" in result.stdout
    result = CliRunner().invoke(app, [*flags, "--max-batch", "5"])
    assert result.exit_code == 2
    assert "max_batch=5 differs from max_batch=" in " ".join(result.stderr.split())
    result = CliRunner().invoke(app, [*flags, "--world-size", "3"])
    assert result.exit_code == 2
    assert "world_size=3 differs from world_size=" in " ".join(result.stderr.split())


def test_an_engine_on_virtual_ranks_searches_nothing(tmp_path):
    if torch.cuda.device_count():
        pytest.skip("for machines without a GPU")
    with weft.LLM(world_size=1, device="sim", tune=True, tune_cache=tmp_path, max_seq_len=24) as llm:
        [answer] = llm.generate("20+22=", weft.SamplingParams(max_tokens=3))
    assert answer.text == "42"
    assert list(tmp_path.iterdir()) == []
    for wrong, reason in (
        ({"tune": 0.5}, "tune=0.5"),
        ({"tune": "yes"}, "tune='yes'"),
        ({"tune_cache": 3}, "tune_cache=3"),
    ):
        with pytest.raises(ValueError, match=reason):
            EngineConfig(**wrong)
    with pytest.raises(ValueError, match="tune with pipeline_parallel=2: a search is for one stage"):
        EngineConfig(tune=True, pipeline_parallel=2)
