"""Baselines of attention over ranks, with torch's attention computed by hand and NCCL made up."""

import types

import pytest
import torch

import weft
from tests.bench.ops.choosing import choose
from tests.benchmarks.providers.loaded import loaded
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import op_of, parse_shapes

attention = loaded("attention")
OP = "sharded-decode-attention"


def by_hand(q, keys, values):
    scores = q.float() @ keys.float().transpose(-1, -2) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ values.float()).to(q.dtype), scores.logsumexp(-1)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_baseline_gives_the_answer(world_size, monkeypatch):
    def all_gather(out, x, group):
        out.copy_(group.team.library.all_gather(x))

    monkeypatch.setattr(attention, "dist", types.SimpleNamespace(all_gather_into_tensor=all_gather))
    monkeypatch.setattr(attention, "by_flash", by_hand)
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
