"""An engine with invariant=True: the same bits in every configuration and on every number of virtual ranks."""

import json
from dataclasses import replace

import pytest
import torch

import weft
from weft.bench.invariance import run
from weft.bench.invariance.answers import compare
from weft.bench.invariance.configurations import Configuration
from weft.engine import Engine, EngineConfig, sampling
from weft.models import DecoderConfig
from weft.ops.attention.fixed_runs import FixedRuns
from weft.ops.vocab.log_sums import join_log_sums, log_sums
from weft.parallel import invariant_attention
from weft.plan import memo

CONFIG = DecoderConfig.from_dict(
    {
        "model_type": "qwen3", "vocab_size": 60, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 50.0,
        "max_position_embeddings": 96, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }
)  # fmt: skip
FIRST = Configuration(batch=3, chunk=96)
REST = (
    Configuration(batch=1, chunk=16, share=0.4),
    Configuration(batch=2, chunk=24, prefix=True, drafts=True),
    Configuration(batch=3, chunk=64, crowded=True),
    Configuration(batch=3, chunk=40, finished=True),
)


def asked_of(*configurations, requests=3, model=CONFIG):
    engine = EngineConfig(invariant=True, page_size=16, max_seq_len=50)
    sizes = {"requests": requests, "longest": 40, "new_tokens": 4}
    return run.Asked(model=model, engine=engine, configurations=configurations, **sizes)


def on_ranks(world_size, asked, seed=0):
    results = weft.simulate(run.on_rank, world_size, args=(asked,), seed=seed)
    for one in results[1:]:
        assert one.answers == results[0].answers
    return results[0]


@pytest.fixture(scope="module")
def reference():
    return on_ranks(1, asked_of(FIRST)).answers


@pytest.mark.parametrize("configurations", [pytest.param((FIRST, *REST), marks=pytest.mark.sweep), (FIRST, REST[1])])
def test_no_configuration_changes_a_bit(configurations, reference):
    result = on_ranks(1, asked_of(*configurations))
    assert result.answers == reference
    for outcome in result.outcomes:
        assert outcome.compared >= 4 and outcome.differing == 0, outcome


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(4, marks=pytest.mark.sweep), pytest.param(8, marks=pytest.mark.sweep)]
)
def test_no_number_of_ranks_changes_a_bit(world_size, reference):
    result = on_ranks(world_size, asked_of(replace(FIRST, chunk=24)), seed=world_size)
    assert compare(reference, result.answers) == (result.outcomes[0].compared, 0, None)
    assert result.outcomes[0].compared > 50


# --- planted violations -------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_split_of_keys_that_the_batch_decides_is_seen(reference, monkeypatch):
    def by_batch(head_dim, dtype, caps, pairs, tokens):
        return FixedRuns(block_n=16, run=16 if pairs > 4 else 32)

    for module in ("decoding", "paged_prefill_attention"):
        monkeypatch.setattr(f"weft.ops.attention.{module}.fixed_runs_for", by_batch)
    memo.forget()
    result = on_ranks(1, asked_of(FIRST, replace(FIRST, batch=1, chunk=16)))
    memo.forget()
    assert result.outcomes[1].differing > 0


@pytest.mark.sweep
def test_an_order_of_sums_that_a_chunk_decides_is_seen(reference, monkeypatch):
    def by_chunk(head_dim, dtype, caps, pairs, tokens):
        return FixedRuns(block_n=16, run=16 if tokens == 1 else 32)

    monkeypatch.setattr("weft.ops.attention.paged_prefill_attention.fixed_runs_for", by_chunk)
    memo.forget()
    result = on_ranks(1, asked_of(FIRST, REST[3]))
    memo.forget()
    assert result.outcomes[1].differing > 0


@pytest.mark.sweep
def test_a_prefix_page_of_other_bits_is_seen(reference, monkeypatch):
    """Pages of prompts that are read alone are written with their last bits changed."""
    attend = invariant_attention.ops.qk_norm_rope

    def other(qkv, *given, **options):
        q = attend(qkv, *given, **options)
        if qkv.shape[-2] == 24:  # a chunk of the second configuration
            keys = given[6]
            keys.copy_((keys.view(torch.int16) ^ 1).view(keys.dtype))
        return q

    monkeypatch.setattr(invariant_attention.ops, "qk_norm_rope", other)
    result = on_ranks(1, asked_of(FIRST, REST[1]))
    assert result.outcomes[1].differing > 0


def test_a_log_sum_exp_by_ranks_is_seen(reference, monkeypatch):
    def by_ranks(logits, slices):
        nothing = torch.tensor([-3.0e38, 0.0]).expand(len(logits), slices - 1, 2)
        return torch.cat((log_sums(logits, 1), nothing), 1)

    monkeypatch.setattr(sampling, "log_sums", by_ranks)
    monkeypatch.setattr(sampling, "join_log_sums", join_log_sums)
    result = on_ranks(1, asked_of(FIRST))
    compared, differing, first = compare(reference, result.answers)
    assert differing > 0 and "log-probability" in str(first)


def test_another_sum_for_rows_of_drafts_is_seen(reference, monkeypatch):
    def by_rows(logits, slices):
        """Of more rows than FIRST has sequences, as drafts have."""
        if len(logits) <= FIRST.batch:
            return log_sums(logits, slices)
        # In another order the bits of a sum may be the same, by the instructions of the processor.
        return log_sums(logits, slices) * torch.tensor([1.0, 1.0 + 2**-12])

    monkeypatch.setattr(sampling, "log_sums", by_rows)
    result = on_ranks(1, asked_of(FIRST, replace(FIRST, drafts=True)))
    assert result.outcomes[1].differing > 0


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "replicated"}, "mode='replicated' with invariant=True, which is mode='invariant'; leave out one"),
        ({"fused": False}, "fused=False with invariant=True: torch's operations"),
        ({"context_parallel": True}, "context_parallel=True with invariant=True"),
        ({"pipeline_parallel": 2}, "pipeline_parallel=2 with invariant=True"),
        (
            {"speculative": {"method": "mtp", "num_speculative_tokens": 2}},
            "speculative method 'mtp' with invariant=True: drafts are those of method='ngram' alone",
        ),
    ],
)
def test_options_with_sums_of_another_order_are_refused(options, message):
    with pytest.raises(ValueError) as refused:
        EngineConfig(invariant=True, **options)
    assert message in str(refused.value)


def test_the_mode_and_the_option_are_one():
    assert EngineConfig(invariant=True).mode == "invariant" and EngineConfig(mode="invariant").invariant


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"torch_dtype": "float32"}, "dtype=torch.float32: it is for bfloat16 and float16"),
        ({"quantization": "mxfp4"}, "weights in mxfp4"),
        ({"quantization": "fp8_per_channel"}, "weights in fp8"),
    ],
)
def test_models_with_sums_of_another_order_are_refused(content, message):
    config = CONFIG.quantized(content["quantization"]) if "quantization" in content else CONFIG
    dtype = torch.float32 if "torch_dtype" in content else None

    def main(team):
        Engine(config, team, invariant=True, dtype=dtype)

    with pytest.raises(ValueError, match=message):
        weft.simulate(main, 1)


def test_a_file_of_bits_is_read_back(tmp_path, reference):
    from weft.bench.invariance.command import read, write

    write(tmp_path / "bits.json", [], reference, {}, asked_of(FIRST))
    assert read(tmp_path / "bits.json") == reference
    (tmp_path / "bits.json").write_text(json.dumps({"schema": 0}))
    with pytest.raises(ValueError, match="is no file of weft bench invariance --json: schema 0"):
        read(tmp_path / "bits.json")
