"""Baselines of attention over ranks, with torch's attention computed by hand and NCCL made up; named shapes."""

import types

import pytest
import torch

import weft
from tests.bench.ops.choosing import choose
from weft.bench.ops import attention_baselines
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import op_of, parse_shapes
from weft.bench.ops.workload import OpWorkload

OP = "sharded-decode-attention"


def by_hand(q, keys, values):
    scores = q.float() @ keys.float().transpose(-1, -2) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ values.float()).to(q.dtype), scores.logsumexp(-1)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_baseline_gives_the_answer(world_size, monkeypatch):
    def all_gather(out, x, group):
        out.copy_(group.team.library.all_gather(x))

    monkeypatch.setattr(attention_baselines, "dist", types.SimpleNamespace(all_gather_into_tensor=all_gather))
    monkeypatch.setattr(attention_baselines, "by_flash", by_hand)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    names = ["weft.local", "weft.one_gpu", "sdpa+nccl", "sdpa+tiles"]

    def main(team):
        team.group = types.SimpleNamespace(team=team)
        problem = OpProblem(op_of(OP), parse_shapes(OP, ["2,6,2,16,200"], team.size)[0], "bf16", team)
        chosen = choose(OP, names)
        for provider in chosen:
            prepared = provider.make(problem)
            for _ in range(2):
                assert problem.verdict(prepared, prepared.run(0)).wrong == "", provider.name
        return [provider.name for provider in chosen]

    assert weft.simulate(main, world_size) == [names] * world_size


def test_shapes():
    assert [shape.size for shape in parse_shapes(OP, ["12-kv-heads", "qwen3-30b-a3b:100,7"], 2)] == [
        (1, 96, 12, 128, 65536, 2),
        (1, 96, 12, 128, 1 << 20, 2),
        (1, 32, 4, 128, 100, 2),
        (1, 32, 4, 128, 7, 2),
    ]
    for word, message in (
        ("1,32,4,128", "is neither a set"),
        ("1,32,4,100,64", "head_dim=100 is not one of"),
        ("1,30,4,128,64", "heads=30 is not divisible by kv_heads=4; take 32"),
        ("1,4,4,128,64", "heads=4 is not divisible by world_size=3; take 6"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_shapes(OP, [word], 3)


def test_the_limit_is_a_ranks_share_of_the_cache():
    workload = OpWorkload(name=OP, shapes=(), dtype="bf16", words=())
    size = (1, 32, 4, 128, 1 << 20, 2)
    assert op_of(OP).memory_bytes(size, torch.bfloat16) == 2 * (1 << 19) * 4 * 128 * 2
    assert workload.wire_bytes(2, size) == 16 * 129 * 4 and workload.unit == "GB/s"
