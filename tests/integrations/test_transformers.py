"""weft.integrations.transformers: tiny random models over virtual ranks against the untouched ones."""

from types import SimpleNamespace

import pytest
import torch

from tests.integrations.virtual_groups import simulate_mesh  # noqa: F401

pytest.importorskip("transformers", "5.17")
from benchmarks.doors.transformers_llama import over

SMALL = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=48, max_position_embeddings=64, pad_token_id=0, tie_word_embeddings=False,
)  # fmt: skip
FAMILIES = ["Qwen3", "Llama", "Mistral", "Gemma", "Qwen2", "Granite"]


@pytest.fixture
def hf():
    import transformers

    from weft.integrations import transformers as integration

    integration.install()
    yield SimpleNamespace(transformers=transformers, weft=integration)
    integration.uninstall()


def model_of(hf, family, attention="eager", **options):
    """A model with random weights, the same at every call."""
    torch.manual_seed(0)
    config = getattr(hf.transformers, f"{family}Config")(**SMALL | options, attn_implementation=attention)
    model = getattr(hf.transformers, f"{family}ForCausalLM")(config).eval()
    for number, weight in enumerate(model.parameters()):
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(number))
    return model


def relative_error(found, wanted):
    return ((found - wanted).pow(2).mean() / wanted.pow(2).mean()).sqrt()


def decided(mesh):
    from weft.integrations.fallback import Fallback

    return {(kind.op, pays) for kind, pays in Fallback.of(mesh)._pays.items()}


def compare(hf, mesh, family, ids, **options):
    wanted = model_of(hf, family, **options)(ids).logits.detach()
    model = over(model_of(hf, family, **options | {"attention": "weft"}), mesh)
    with torch.no_grad():
        assert relative_error(model(ids).logits, wanted) <= 1e-5
    described = {
        "model.layers.*.self_attn.o_proj": "matmul_all_reduce",
        "model.layers.*.mlp.down_proj": "matmul_all_reduce",
        "model.embed_tokens": "style 'embedding_rowwise': left to transformers",
        "lm_head": "style 'colwise_gather_output': left to transformers",
    }
    if "model.embed_tokens" not in model.tp_plan:  # before 5.23
        del described["model.embed_tokens"]
    assert hf.weft.describe(model) == described
    assert decided(mesh) == {("matmul_all_reduce", True)}
    return model


@pytest.fixture
def attended(monkeypatch, hf):
    """Number of tokens of each call that weft's attention computes."""
    from weft import ops

    calls, compute = [], ops.paged_prefill_attention
    monkeypatch.setattr(ops, "paged_prefill_attention", lambda q, *rest: calls.append(len(q)) or compute(q, *rest))
    return calls


def test_logits_are_those_of_the_untouched_models(hf, attended, simulate_mesh):  # noqa: F811
    ids = torch.arange(12).view(2, 6)
    simulate_mesh(lambda mesh, team: [compare(hf, mesh, family, ids) and None for family in FAMILIES])
    assert attended == [12] * (len(FAMILIES) * SMALL["num_hidden_layers"] * 2), "every layer of every rank"


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_more_world_sizes(hf, simulate_mesh, family, world_size):  # noqa: F811
    options = dict(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2)
    if family in ("Qwen2", "Llama", "Qwen3", "Granite"):
        options |= dict(attention_bias=True)
    ids = torch.arange(26).view(2, 13)
    simulate_mesh(lambda mesh, team: compare(hf, mesh, family, ids, **options) and None, world_size)


def test_generate_and_training(hf, attended, simulate_mesh):  # noqa: F811
    """Tokens of generate, with and without padding, and gradients, whose pass is left to transformers."""
    ids = torch.arange(1, 9).view(2, 4)
    padding = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    options = dict(max_new_tokens=3, do_sample=False)
    whole = model_of(hf, "Llama")
    wanted = [whole.generate(ids, attention_mask=mask, **options) for mask in (torch.ones_like(ids), padding)]
    whole(ids, labels=ids).loss.backward()

    def main(mesh, team):
        model = over(model_of(hf, "Llama", "weft"), mesh)
        for mask, tokens in zip((torch.ones_like(ids), padding), wanted, strict=True):
            assert torch.equal(model.generate(ids, attention_mask=mask, **options), tokens)
        model(ids, labels=ids).loss.backward()
        for (name, mine), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
            grad = getattr(mine.grad, "full_tensor", lambda mine=mine: mine.grad)()
            torch.testing.assert_close(grad, theirs.grad, msg=lambda m, name=name: f"{name}: {m}")

    simulate_mesh(main)
    assert attended == [8] * 2, "the prompt without padding; SDPA the rest"


def test_attention_leaves_what_it_does_not_compute_to_sdpa(hf, attended):
    q, k, v = (torch.randn(1, heads, 5, 16) for heads in (4, 2, 2))
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    calls = [
        ((q, k, v, mask), {}),
        ((q[:, :, -1:], k, v, None), {}),
        ((q, k, v, None), dict(is_causal=False)),
        ((q, k, v, None), dict(position_bias=torch.zeros(1, 4, 5, 5))),
        ((q[..., :12], k[..., :12], v[..., :12], None), {}),
        ((q.double(), k.double(), v.double(), None), {}),
    ]
    with torch.no_grad():
        for tensors, options in calls:
            out, _ = hf.weft.attention(module, *tensors, **options)
            wanted, _ = hf.weft.sdpa_attention_forward(module, *tensors, **options)
            assert torch.equal(out, wanted)
    hf.weft.attention(module, q.requires_grad_(), k, v, None)
    assert attended == []


def test_from_pretrained_with_the_plan_of_the_model(hf, simulate_mesh, tmp_path, monkeypatch):  # noqa: F811
    from transformers.distributed import DistributedConfig, mixin

    ids, whole = torch.arange(12).view(2, 6), model_of(hf, "Qwen3")
    whole.save_pretrained(tmp_path)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # its threads are no ranks

    def main(mesh, team):
        manager = SimpleNamespace(get_mesh=lambda names: mesh)
        monkeypatch.setattr(mixin, "initialize_distributed_mesh", lambda config: (None, manager))
        model = hf.transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, distributed_config=DistributedConfig(tp_plan="auto", tp_size=mesh.size())
        )
        with torch.no_grad():
            assert relative_error(model(ids).logits, whole(ids).logits) <= 1e-5
        assert decided(mesh) == {("matmul_all_reduce", True)}

    simulate_mesh(main)


def test_modules_that_are_no_linear_layers_are_left_and_named(hf, simulate_mesh):  # noqa: F811
    class Quantized(torch.nn.Linear):
        pass

    def main(mesh, team):
        model = model_of(hf, "Llama")
        model.model.layers[0].mlp.down_proj.__class__ = Quantized
        found = hf.weft.describe(over(model, mesh))
        assert found["model.layers.*.mlp.down_proj"].startswith("Quantized over ")
        assert found["model.layers.*.self_attn.o_proj"] == "matmul_all_reduce"

    simulate_mesh(main)
