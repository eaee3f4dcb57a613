"""Adapters compute what the merged weights W + scale * B @ A compute in transformers, in batches that mix them."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import weft
from tests.against_transformers import (
    FAMILIES,
    TOLERANCE,
    prompt,
    reference_greedy,
    reference_logits,
    relative_rms,
)
from weft.engine import Engine, SamplingParams
from weft.errors import CheckpointError
from weft.models import Decoder
from weft.models.adapters import read_adapter, scale_of

ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
MLP = "gate_proj", "up_proj", "down_proj"


def make_adapter(directory, model, targets, rank, seed, **config):
    """Directory of an adapter as peft saves it, and a copy of the model with merged weights."""
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}
    content = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
        "bias": "none",
        **config,
    }
    scale = content["lora_alpha"] / (math.sqrt(rank) if content.get("use_rslora") else rank)
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear):
            rows, columns = module.weight.shape
            a, b = (torch.randn(shape, generator=generator) * 0.2 for shape in ((rank, columns), (rows, rank)))
            tensors |= {f"base_model.model.{name}.lora_{kind}.weight": x for kind, x in (("A", a), ("B", b * 0.5))}
            module.weight.data += scale * 0.5 * b @ a
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(content))
    save_file(tensors, directory / "adapter_model.safetensors")
    return merged


@pytest.fixture
def adapters(make_checkpoint, tmp_path):
    """adapters(name, **changes) -> (checkpoint, {name of adapter: directory}, {name: merged model, None: the base})."""

    def make(name, *, attention=ATTENTION, mlp=MLP, **changes):
        directory, model = make_checkpoint(**FAMILIES[name] | changes)
        merged = {
            None: model,
            "all": make_adapter(tmp_path / "all", model, [*attention, *mlp], 5, 1),
            "few": make_adapter(tmp_path / "few", model, [attention[0], mlp[-1]], 20, 2, use_rslora=True),
        }
        return directory, {one: tmp_path / one for one in ("all", "few")}, merged

    return make


def of_rows(team, directory, lora, names, tokens, mode):
    """Logits of a batch whose row i has the adapter names[i], at once and by decoding."""
    model = Decoder.from_pretrained(directory, team, mode=mode, fused=False)
    model.load_adapters(lora)
    numbers = torch.tensor([-1 if name is None else model.adapters.index(name) for name in names], dtype=torch.int32)
    batch, length = tokens.shape
    cache, pages = model.new_cache(1 + batch, 64), 1 + torch.arange(batch, dtype=torch.int32)[:, None]
    step = model.prefill_step([(0, length - 1)] * batch, pages)
    step = replace(step, adapters=numbers.repeat_interleave(length - 1))
    first = model.lm_head.gather(model(tokens[:, :-1].flatten(), step, cache)).view(batch, length - 1, -1)
    step = replace(model.decode_step(torch.full((batch,), length - 1), pages), adapters=numbers)
    last = model.lm_head.gather(model(tokens[:, -1], step, cache)).view(batch, 1, -1)
    return torch.cat((first, last), 1)


@pytest.mark.parametrize(
    ("name", "world_size", "mode", "changes"),
    [
        ("llama-3", 1, "auto", {}),
        ("llama-3", 2, "sequence_parallel", {}),
        ("llama-3", 4, "replicated", {}),
        ("qwen3-yarn", 3, "auto", {"num_attention_heads": 6, "kv_heads": 3}),
        ("phi3", 2, "auto", {"attention": ("qkv_proj", "o_proj"), "mlp": ("gate_up_proj", "down_proj")}),
        ("glm4", 2, "auto", {"mlp": ("gate_up_proj", "down_proj")}),
        ("gemma2", 2, "auto", {}),
        ("granite", 2, "auto", {}),
        ("olmo2", 2, "auto", {}),
        ("hunyuan", 2, "auto", {}),
        ("arcee", 2, "auto", {"mlp": ("up_proj", "down_proj")}),
        ("qwen3-moe-mixed", 2, "auto", {"mlp": ("o_proj",)}),  # attention beside experts
    ],
)
def test_rows_with_adapters_are_those_of_merged_weights(adapters, plain_ops, name, world_size, mode, changes):
    directory, lora, merged = adapters(name, **changes)
    names, tokens = ["all", None, "few", "all"], prompt(4, 7)
    expected = torch.cat([reference_logits(merged[one], row[None]) for one, row in zip(names, tokens, strict=True)])
    assert relative_rms(expected[0], reference_logits(merged[None], tokens[:1])[0]) > 0.1, "the adapter changes nothing"
    for logits in weft.simulate(of_rows, world_size, args=(directory, lora, names, tokens, mode)):
        for index, one in enumerate(names):
            assert relative_rms(logits[index], expected[index]) <= TOLERANCE, one


def answers(team, directory, lora, names, options):
    engine = Engine(directory, team, lora=lora, max_batch=3, page_size=16, chunk_tokens=5, max_seq_len=64, **options)
    prompts = prompt(1, 20).tolist() * len(names)
    params = [SamplingParams(max_tokens=10, ignore_eos=True, lora=name) for name in names]
    pieces = list(engine.answer(prompts, params))
    found = [[piece.token_id for piece in pieces if piece.prompt == index] for index in range(len(names))]
    again = [one.token_ids for one in engine.generate(prompts[0], max_tokens=10, ignore_eos=True, lora=names[0])]
    return found, again, engine.stats.hit_tokens


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"fused": False}),
        (1, {"fused": False, "speculative": {"method": "ngram", "num_speculative_tokens": 2}}),
        (2, {"fused": False, "pipeline_parallel": 2}),
        (2, {"fused": False, "context_parallel": True}),
    ],
)
def test_an_engine_mixes_adapters_and_shares_pages_only_among_requests_of_one(adapters, plain_ops, world_size, options):
    directory, lora, merged = adapters("llama-3")
    names = ["all", None, "few", "all", None]
    expected = {one: reference_greedy(model, prompt(1, 20), 10)[0].tolist() for one, model in merged.items()}
    assert len({*map(tuple, expected.values())}) == 3
    for found, again, hits in weft.simulate(answers, world_size, args=(directory, lora, names, options)):
        assert found == [expected[name] for name in names]
        # A page of a spread cache has more tokens than the prompt.
        assert again == [expected["all"]] and hits == (0 if "context_parallel" in options else 16)


def test_mlps_have_adapters_beside_delta_nets(adapters, plain_ops):
    directory, lora, merged = adapters("qwen3.5", attention=("gate_proj",), mlp=("up_proj", "down_proj"))
    tokens, names = prompt(1, 5), ("all", None)

    def main(team):
        engine = Engine(directory, team, lora=lora, max_batch=2, page_size=16, max_seq_len=16, fused=False)
        return [
            engine.generate(tokens[0].tolist(), max_tokens=3, ignore_eos=True, lora=name)[0].token_ids for name in names
        ]

    wanted = [reference_greedy(merged[name], tokens, 3)[0].tolist() for name in names]
    assert weft.simulate(main, 1) == [wanted] and wanted[0] != wanted[1]


def fused_logits(team, directory, lora, tokens, dtype):
    model = Decoder.from_pretrained(directory, team, dtype=dtype)
    model.load_adapters(lora)
    batch, length = tokens.shape
    cache, pages = model.new_cache(1 + batch, 16), 1 + torch.arange(batch, dtype=torch.int32)[:, None]
    numbers = torch.arange(batch, dtype=torch.int32) - 1
    step = replace(model.prefill_step([(0, length)] * batch, pages, 16), adapters=numbers.repeat_interleave(length))
    return model.lm_head.gather(model(tokens.flatten(), step, cache)).view(batch, length, -1)


@pytest.mark.parametrize(
    "name", ["llama-3", "granite", "glm4", "qwen3-moe"]
)  # granite's scale of residuals is of whole sums
def test_weft_kernels_compute_the_same(adapters, name):
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    mlp = {"glm4": ("gate_up_proj", "down_proj"), "qwen3-moe": ("o_proj",)}.get(name, MLP)
    directory, lora, merged = adapters(name, mlp=mlp, **small)
    tokens = prompt(3, 3)
    expected = torch.cat(
        [reference_logits(model, row[None]) for model, row in zip(merged.values(), tokens, strict=True)]
    )
    for logits in weft.simulate(fused_logits, 2, args=(directory, lora, tokens, torch.float32)):
        for found, one in zip(logits, expected, strict=True):
            assert relative_rms(found, one) <= TOLERANCE


def test_a_plan_says_that_adapters_are_added_after_each_gemm(adapters, plain_ops):
    directory, lora, _ = adapters("llama-3")

    def main(team):
        model = Decoder.from_pretrained(directory, team)
        before = str(model.plan(1))
        model.load_adapters(lora)
        return before, str(model.plan(1)), str(model.plan(4096))

    for before, *after in weft.simulate(main, 2):
        assert "adapters" not in before
        assert all("replicated with adapters" in plan and "nothing is fused with one" in plan for plan in after)


CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}


def test_the_scale_of_an_adapter(tmp_path):
    # As peft 0.18 writes it.
    whole = {
        "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
        "base_model_name_or_path": "x", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
        "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
        "loftq_config": {}, "lora_alpha": 32, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
        "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.18.0",
        "qalora_group_size": 16, "r": 16, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj"],
        "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False,
        "use_qalora": False, "use_rslora": False,
    }  # fmt: skip
    assert scale_of(tmp_path, whole) == 2.0
    assert scale_of(tmp_path, CONFIG | {"use_rslora": True}) == 16 / math.sqrt(8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora=True changes what the adapter computes, and weft does not run it"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported; weft runs 'LORA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"r": 0}, "r=None"),
        ({"lora_alpha": "x"}, "no rank and no number"),
        ({"a_new_option": 3}, "a_new_option=3 changes what the adapter computes"),
    ],
)
def test_what_would_change_an_adapter_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        scale_of(tmp_path, CONFIG | changes)


def loaded(team, directory, lora, options):
    Engine(directory, team, lora=lora, max_batch=1, page_size=16, max_seq_len=64, **options)


@pytest.mark.parametrize(
    ("name", "targets", "rank", "options", "message"),
    [
        ("llama-3", ["lm_head"], 4, {}, "the adapter changes lm_head, and weft adds adapters to q_proj"),
        ("llama-3", ["q_proj"], 65, {}, "the adapter has rank 65; weft takes 1 to 64"),
        ("llama-3", ["q_proj"], 4, {"mode": "reference"}, "mode='reference': it runs no adapters"),
        ("qwen3-moe", ["gate_proj"], 4, {}, "the adapter has rank 0"),
    ],
)
def test_an_adapter_that_weft_cannot_run_is_refused(make_checkpoint, tmp_path, name, targets, rank, options, message):
    directory, model = make_checkpoint(**FAMILIES[name])
    make_adapter(tmp_path / "one", model, targets, rank, 0)
    with pytest.raises(ValueError, match=message):
        weft.simulate(loaded, 1, args=(directory, {"one": tmp_path / "one"}, options))


def test_an_adapter_of_another_model_and_a_missing_file_are_named(make_checkpoint, tmp_path):
    directory, _ = make_checkpoint(**FAMILIES["llama-3"])
    _, wider = make_checkpoint(**FAMILIES["llama-3"], hidden_size=64)
    make_adapter(tmp_path / "one", wider, ["q_proj"], 4, 0)
    with pytest.raises(CheckpointError, match=r"adapter of model\.layers\.0\.self_attn\.q_proj: A has shape \(4, 64\)"):
        weft.simulate(loaded, 1, args=(directory, {"one": tmp_path / "one"}, {}))
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json; pass a directory that peft has saved"):
        weft.simulate(loaded, 1, args=(directory, {"one": tmp_path}, {}))


@pytest.mark.parametrize(
    ("changes", "factor", "message"),
    [
        ({"r": 8}, 1.0, r"lora_A of model\.layers\.0\.self_attn\.q_proj has 4 rows, but adapter_config\.json says r=8"),
        ({}, math.inf, r"the adapter of model\.layers\.0\.self_attn\.q_proj has NaN or infinities"),
    ],
)
def test_an_adapter_that_contradicts_itself_or_is_damaged_is_refused(tmp_path, changes, factor, message):
    directory = tmp_path / "one"
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | {"r": 4} | changes))
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{stem}A.weight": torch.ones(4, 8), f"{stem}B.weight": torch.ones(8, 4) * factor}
    save_file(tensors, directory / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_adapter("one", directory)


def test_a_request_names_an_adapter_that_is_there(adapters):
    directory, lora, _ = adapters("llama-3")

    def main(team):
        engine = Engine(directory, team, lora=lora, max_batch=1, page_size=16, max_seq_len=64)
        engine.submit([1, 2], SamplingParams(lora="other"))

    with pytest.raises(ValueError, match="lora='other' is not an adapter here; the adapters are all, few"):
        weft.simulate(main, 1)
