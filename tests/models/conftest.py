"""Small random checkpoints, and what transformers makes of them."""

import copy
from types import SimpleNamespace

import pytest
import torch

from weft.layers import moe
from weft.models import decoder
from weft.parallel import plain, vocabulary


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory):
    """make_checkpoint(family, **changes) -> (directory, transformers' model), such that a wrong model looks wrong.

    heads * head_dim != hidden, weights large enough for attention to choose, norm weights random (with all ones,
    swapped q- and k-norms go unseen), random biases
    (transformers' are zeros), a vocabulary that no world size divides, several safetensors files.
    """
    transformers = pytest.importorskip("transformers")
    made = {}

    def make(family="Qwen3", *, tied=False, kv_heads=2, **changes):
        changes = copy.deepcopy(changes)  # transformers writes into rope_parameters, which families share
        key = (family, tied, kv_heads, str(sorted(changes.items())))
        if key in made:
            return made[key]
        config = getattr(transformers, f"{family}Config")(
            **{
                "vocab_size": 257,
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_hidden_layers": 3,
                "num_attention_heads": 8,
                "num_key_value_heads": kv_heads,
                "head_dim": 16,
                "max_position_embeddings": 256,
                "initializer_range": 0.1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
                "tie_word_embeddings": tied,
                "eos_token_id": None,
                "pad_token_id": None,
                "bos_token_id": None,
                "dtype": "float32",
            }
            | changes
        )
        torch.manual_seed(kv_heads + 100 * tied)
        # Earlier versions compute attention with a soft cap by SDPA, which has none.
        how = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
        model = transformers.AutoModelForCausalLM.from_config(config, **how).eval()
        for name, weight in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
        # Both signs: a tied head would otherwise mostly answer with the token it was given.
        model.model.norm.weight.data *= torch.randint(2, model.model.norm.weight.shape) * 2 - 1
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory, max_shard_size="100KB")
        made[key] = directory, model
        return made[key]

    return make


def by_torch(plan):
    """``plan`` with torch's operations between the ops where nothing is asked for."""
    return lambda *given, fused=None, **options: plan(*given, fused=bool(fused), **options)


@pytest.fixture
def plain_ops(monkeypatch):
    """weft.ops by their definitions, to test the modes' shapes and padding without simulating each tile."""

    def matmul_all_reduce(a, b, team, wire="same"):
        return team.library.all_reduce(a @ b.T)

    def all_gather_matmul(a, b, team, own_first=False, return_gathered=False):
        gathered = team.library.all_gather(a)
        if return_gathered:
            return [gathered @ one.T for one in b], gathered
        return (gathered.roll(-team.rank * a.shape[0], 0) if own_first else gathered) @ b.T

    def matmul_reduce_scatter(a, b, team, own_first=False, wire="same"):
        assert a.shape[0] % team.size == 0
        in_order = a.roll(team.rank * a.shape[0] // team.size, 0) if own_first else a
        return team.library.reduce_scatter(in_order @ b.T)

    def all_gather_grouped_matmul_silu_mul(x, routing, gate_up, experts, team, max_tokens, **options):
        rows, ids, weights = (team.library.all_gather(tensor) for tensor in (x, *routing))
        return grouped_matmul_silu_mul(rows, gate_up, experts, **options), experts, (ids, weights)

    def grouped_matmul_silu_mul(rows, gate_up, experts, fp8=None, bias=None, swiglu=None):
        products = torch.einsum("tk,enk->etn", rows, gate_up)  # of all rows, chosen or not
        products = products if bias is None else products + bias[:, None]
        return plain.silu_mul(products) if swiglu is None else plain.clamped_swiglu(products, swiglu)

    def grouped_matmul_reduce_scatter(h, down, experts, choices, tokens, team, shared=None, gate=None, bias=None):
        ids, weights = choices
        of_experts = torch.stack([(weights * (ids == experts.first + e)).sum(-1) for e in range(experts.count)])
        summand = torch.einsum("etn,ehn,et->th", h, down, of_experts)
        summand = summand if bias is None else summand + of_experts.T @ bias
        if shared is not None:
            summand += shared if gate is None else shared * gate.sigmoid()[:, None]
        return team.library.reduce_scatter(summand)

    by_definition = SimpleNamespace(
        all_reduce=lambda x, team: team.library.all_reduce(x),
        all_gather=lambda x, team: team.library.all_gather(x),
        reduce_scatter=lambda x, team: team.library.reduce_scatter(x),
        matmul=lambda a, b: a @ b.T,
        all_gather_matmul=all_gather_matmul,
        matmul_reduce_scatter=matmul_reduce_scatter,
        matmul_all_reduce=matmul_all_reduce,
        all_to_all=lambda x, team: torch.cat([parts[team.rank, None] for parts in team.exchange(x)]),
        all_gather_grouped_matmul_silu_mul=all_gather_grouped_matmul_silu_mul,
        moe_schedule=lambda ids, experts, tickets: experts,
        grouped_matmul_silu_mul=grouped_matmul_silu_mul,
        Dispatched=lambda rows, routing, experts: routing,
        grouped_matmul_reduce_scatter=grouped_matmul_reduce_scatter,
    )
    for module, name in ((decoder, "plan_step"), (vocabulary, "plan_layer"), (moe, "plan_layer")):
        monkeypatch.setattr(module, name, by_torch(getattr(module, name)))
    for module in ("replicated", "sequence_parallel", "adapters", "vocabulary", "context"):
        monkeypatch.setattr(f"weft.parallel.{module}.ops", by_definition)
