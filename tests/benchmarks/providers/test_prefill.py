"""Baselines of attention over sharded prompts: right answers on simulated ranks, with torch's arithmetic; wrong ones show."""

import types

import pytest
import torch

import weft
from tests.benchmarks.providers.loaded import loaded
from weft.bench.harness.provider import Unavailable
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import op_of, parse_shapes

baselines = loaded("prefill")
OP = "gathered-prefill-attention"


class Library:
    @staticmethod
    def all_gather_into_tensor(out, x, group):
        out.copy_(torch.cat(group.team.exchange(x)))


def plain(q, k, v, causal):
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1)


def test_a_gather_and_a_kernel_of_torch_and_weft_s_alone_give_the_answer(monkeypatch):
    monkeypatch.setattr(baselines, "dist", Library)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)

    def main(team):
        team.group = types.SimpleNamespace(team=team)
        problem = OpProblem(op_of(OP), parse_shapes(OP, ["24,8,4,16"], 2)[0], "bf16", team)
        for prepared in (baselines.nccl_and_torch(problem, plain), baselines.local(problem)):
            out = prepared.run(0)
            assert problem.verdict(prepared, out).wrong == ""
            out += 1
            assert problem.verdict(prepared, out).wrong != ""
        ragged = OpProblem(op_of(OP), parse_shapes(OP, ["25,8,4,16"], 2)[0], "bf16", team)
        with pytest.raises(Unavailable, match="25 tokens do not divide into 4 stripes"):
            baselines.nccl_and_torch(ragged, plain)
        with pytest.raises(Unavailable, match="25 tokens on 2 ranks"):
            baselines.ring(ragged)

    weft.simulate(main, 2)
