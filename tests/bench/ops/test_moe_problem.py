"""Problems of a mixture of experts: their routing, what of a result is checked, and which weights are read."""

import types

import pytest
import torch

import weft
from weft.bench.names import VARIED
from weft.bench.ops import problem
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import OPS, op_of, parse_shapes
from weft.bench.ops.workload import OpWorkload

MOE = [*(op for op in OPS if op_of(op).form == "moe"), *(name for name in VARIED if "moe" in name)]


def problem_of(op, word, team):
    shapes = parse_shapes(op, [word], team.size, tiny=True)
    return OpWorkload(name=op, shapes=shapes).problem(shapes[0], team)


@pytest.mark.parametrize("op", MOE)
def test_each_of_an_op_s_results_is_checked(op):
    """Where the op defines it: elements that it does not write may be anything."""

    def main(team):
        made = problem_of(op, "qwen3-30b-a3b", team)
        out = made.call(made.arguments[0])
        assert not made.judge(out).wrong
        for x in out if isinstance(out, tuple) else (out,):
            kept = x.clone()
            x += 1
            assert made.judge(out).wrong, x.shape
            x.copy_(kept)

    weft.simulate(main, 2)


def test_weights_of_experts_that_no_token_chose_are_neither_read_nor_warm(monkeypatch):
    """One token with 8 of 128 choices reads 4 of a rank's 64 experts."""
    op, bytes_of_four = op_of("grouped-gemm-silu"), 4 * 2 * 96 * 256 * 2
    [shape] = parse_shapes("grouped-gemm-silu", ["1,8,128,64,256,96"], 2)
    assert op.memory_bytes(shape.size, torch.bfloat16) == pytest.approx(bytes_of_four, rel=0.01)
    assert op.flops(shape.size) == 2 * 4 * 96 * 256 * 2
    monkeypatch.setattr(problem, "COLD_BYTES", 3.5 * bytes_of_four)
    monkeypatch.setattr(type(op), "arguments", lambda op, case, team, *tensors: tensors)
    nodes = types.SimpleNamespace(nodes=1, node_size=2)
    team = types.SimpleNamespace(is_simulated=False, size=2, rank=1, shape=nodes, device=torch.device("cpu"))
    assert len(OpProblem(op, shape, "bf16", team).sets) == 1 + 4


def test_ranks_see_one_routing_and_popular_experts_are_shared_out():
    def main(team):
        [shape] = parse_shapes("moe-schedule", ["64,2,16,8,32,32,1"], 2)
        [ids] = OpProblem(op_of("moe-schedule"), shape, "bf16", team).sets[0]
        return torch.bincount(ids.flatten().long(), minlength=16).tolist()

    one, other = weft.simulate(main, 2)
    assert one == other
    assert one[0] > one[8] > one[1] > 64 * 2 / 16 > one[15]
    assert sum(one[:8]) > sum(one[8:])
