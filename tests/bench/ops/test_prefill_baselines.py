"""Baselines of attention over sharded prompts: right answers on simulated ranks, with torch's arithmetic; wrong ones show."""

import types

import pytest
import torch

import weft
from weft.bench.harness.provider import Unavailable
from weft.bench.ops import prefill_baselines as baselines
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import op_of, parse_shapes
from weft.bench.ops.workload import OpWorkload

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


def test_figures_of_a_prompt():
    """Half of the operations at each of two ranks; the second stripe of rank 0 stays at home."""
    shapes = parse_shapes(OP, ["qwen3-30b-a3b:32768"], 2)
    work = OpWorkload(name=OP, shapes=shapes, dtype="bf16")
    (size,) = (shape.size for shape in shapes)
    assert size == (32768, 32, 4, 128)
    assert work.rate(2, size, 1e6) == pytest.approx(2 * 32 * 32768 * 32769 * 128 / 2 / 1e12)
    # Rank 1 sends both of its stripes, of 8192 tokens, to rank 0.
    assert work.wire_bytes(2, size) == 2 * 8192 * 2 * 4 * 128 * 2
    for word, message in (
        ("qwen4", "neither a set .qwen3-30b-a3b, qwen3-8b, qwen3-32b. nor TOKENS,QUERY_HEADS"),
        ("64,6,4,64", "q has 6 heads and k 4"),
        ("64,8,4,60", "head_dim=60 is not one of"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_shapes(OP, [word], 2)
