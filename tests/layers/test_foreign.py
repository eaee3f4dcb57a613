"""weft's layers in models of Transformers, against the untouched models."""

import copy
import inspect
import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import weft
from weft import ops
from weft.layers import replace
from weft.parallel import step_plan

transformers = pytest.importorskip("transformers")
from transformers.utils import logging as theirs  # noqa: E402

MODES = ("reference", "sequence_parallel", "replicated", "auto")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 5},
    "Qwen3Moe": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}


def model_of(kind, **more):
    theirs.set_verbosity_error()
    config = getattr(transformers, f"{kind}Config")(**(SIZES | MODELS[kind] | more))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * (0.3 if weight.dim() > 1 else 0.1) + (weight.dim() == 1))
    return model


def prompts():
    """Three prompts of one to seven tokens, padded on the left, and the mask."""
    ids = torch.randint(2, 64, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) >= torch.tensor([[0], [3], [6]])).long()
    return ids * mask, mask


def answers(model, new=6):
    """(logits of the prompts' tokens, greedy tokens)"""
    ids, mask = prompts()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
    return logits[mask.bool()], model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)


def assert_same(found, expected):
    (logits, tokens), (wanted, same) = found, expected
    assert (logits - wanted).square().mean().sqrt() <= 1e-5 * wanted.square().mean().sqrt()
    assert torch.equal(tokens, same)


CASES = [(kind, mode, world_size) for kind in MODELS for mode in MODES for world_size in (2, 4)]
FEW = {
    ("Qwen3", "sequence_parallel", 2),
    ("Qwen3", "reference", 2),
    ("Mistral", "auto", 2),
    ("Qwen2", "replicated", 4),
    ("Qwen3Moe", "replicated", 2),
}


@pytest.mark.parametrize(
    ("kind", "mode", "world_size"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.sweep) for case in CASES],
)
def test_a_replaced_model_answers_as_the_untouched_one(kind, mode, world_size, monkeypatch):
    monkeypatch.setattr(
        "weft.layers.foreign.splits_tokens", lambda tokens, *sizes: tokens >= 8
    )  # "auto" splits prompts
    model = model_of(kind)

    def main(team):
        mine = copy.deepcopy(model)
        replace(mine, team, mode=mode)
        return answers(mine, new=3)

    expected = answers(model, new=3)
    for found in weft.simulate(main, world_size):
        assert_same(found, expected)


@pytest.mark.sweep
def test_a_replaced_model_is_one_graph_of_torch_compile(monkeypatch):
    """A prompt, split over the ranks, and a step over a static cache."""
    monkeypatch.setattr("weft.layers.foreign.splits_tokens", lambda tokens, *sizes: tokens >= 8)
    model, ids = model_of("Llama", num_hidden_layers=1), torch.randint(2, 64, (2, 6))

    def main(team):
        mine, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
        replace(mine, team)
        compiled = torch.compile(mine.forward, dynamic=False, backend=counter)
        cache = "cache" if "cache" in inspect.signature(type(mine).forward).parameters else "past_key_values"
        with torch.no_grad():
            prompts = [forward(ids, use_cache=False).logits for forward in (mine, compiled)]
            steps = []
            for forward in (mine, compiled):
                held = transformers.StaticCache(config=mine.config, max_cache_len=8)
                mine(ids, **{cache: held})
                steps.append(forward(ids[:, :1], **{cache: held}).logits)
        torch.testing.assert_close(*prompts)
        torch.testing.assert_close(*steps)
        return counter.frame_count

    assert weft.simulate(main, 2) == [2, 2]


@pytest.mark.parametrize("mode", ["sequence_parallel", pytest.param("replicated", marks=pytest.mark.sweep)])
def test_a_replaced_model_trains_with_checkpoints(mode):
    """Gradients of weights that were left whole, summed over the ranks, are the untouched model's; so is a split weight's."""
    model, (ids, _) = model_of("Qwen3"), prompts()
    ids[ids == 0] = 5
    model.train().activation_checkpointing_enable()

    def main(team):
        mine = copy.deepcopy(model)
        replace(mine, team, mode=mode)
        (mine(ids, labels=ids).loss / team.size).backward()
        norm, embedding = mine.model.layers[0].input_layernorm.weight.grad, mine.model.embed_tokens.weight.grad
        return ops.all_reduce(norm, team), ops.all_reduce(embedding, team), mine.model.layers[1].mlp.layer

    found = weft.simulate(main, 2)
    model(ids, labels=ids).loss.backward()
    layers, down = model.model.layers, model.model.layers[1].mlp.down_proj.weight.grad
    for rank, (norm, embedding, mlp) in enumerate(found):
        torch.testing.assert_close(norm, layers[0].input_layernorm.weight.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(embedding, model.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(mlp.down_proj.weight.grad, down.chunk(2, dim=1)[rank], rtol=1e-4, atol=1e-6)


def test_what_is_left_alone_is_named(caplog):
    """An attention that computes something else stays whole; the report and one line of the log say so."""
    model, ids = model_of("Qwen3"), prompts()[0]
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.5
    caplog.set_level(logging.INFO, "weft")

    def main(team):
        mine = copy.deepcopy(model)
        with pytest.raises(ValueError, match=r"mode='auto': 0 of 2 attentions fit.*scaling=0.5"):
            replace(mine, team)
        found = replace(mine, team, mode="replicated")
        assert found.layers == {"model.layers.*.mlp": "TPMLP"}
        assert "scaling=0.5" in found.left["model.layers.*.self_attn"]
        assert found.left["lm_head"] == "no layer for colwise_gather_output"
        assert found.left["model.layers.*.input_layernorm"] == "not in its tp_plan"
        assert not any("mlp" in name or "q_proj" in name for name in found.left)
        with torch.no_grad():
            return mine(ids).logits

    with torch.no_grad():
        torch.testing.assert_close(weft.simulate(main, 2)[0], model(ids).logits, rtol=1e-4, atol=1e-4)
    lines = [record.getMessage() for record in caplog.records if "Left alone" in record.getMessage()]
    assert len(lines) == 2 and all(line.startswith("Qwen3ForCausalLM over 2 ranks: replaced") for line in lines)


def test_calls_and_models_that_do_not_fit_are_refused(tmp_path):
    model, ids = model_of("Qwen3Moe"), prompts()[0]

    def main(team):
        with pytest.raises(ValueError, match="model=Linear has no tp_plan"):
            replace(torch.nn.Linear(2, 2), team)
        with pytest.raises(ValueError, match="team=None is not a Team"):
            replace(model, None)
        mine = copy.deepcopy(model)
        replace(mine, team)
        with pytest.raises(ValueError, match="replace.. takes models|nothing replaced"):
            replace(mine, team)
        for name in ("output_attentions", "output_router_logits", "output_hidden_states"):
            with pytest.raises(ValueError, match=f"Qwen3MoeModel: {name}=True is not possible over ranks"):
                mine(ids, **{name: True})
        with pytest.raises(RuntimeError, match="save_pretrained: this rank has its share"):
            mine.save_pretrained(tmp_path)

    weft.simulate(main, 2)
    with pytest.raises(ValueError, match="num_attention_heads=4 .* cannot be split over world_size=3"):
        weft.simulate(lambda team: replace(copy.deepcopy(model), team), 3)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["replicated", "sequence_parallel"])
@pytest.mark.parametrize("kind", ["Qwen3", "Qwen3Moe"])
def test_local_work_in_kernels_gives_the_same_and_trains(kind, mode, monkeypatch):
    """Local work as on GPUs: logits, and the gradient of a norm through all layers."""
    monkeypatch.setattr(step_plan, "_local", lambda team, fused: step_plan.PLAIN if fused is False else step_plan.FUSED)
    model, (ids, _) = model_of(kind), prompts()
    ids[ids == 0] = 5

    def main(team):
        mine = copy.deepcopy(model)
        replace(mine, team, mode=mode)
        with torch.no_grad():
            logits = mine(ids).logits
        (mine(ids, labels=ids).loss / team.size).backward()
        return logits, ops.all_reduce(mine.model.layers[0].input_layernorm.weight.grad, team)

    for logits, grad in weft.simulate(main, 2):
        found = model(ids, labels=ids)
        model.zero_grad()
        found.loss.backward()
        torch.testing.assert_close(logits, found.logits.detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad, model.model.layers[0].input_layernorm.weight.grad, rtol=1e-4, atol=1e-6)
