"""The baselines' plumbing, with libraries that are made up: on simulated ranks, summed by the simulator's own library."""

import contextlib
import re
import types

import pytest
import torch

import weft
from tests.bench.ops.choosing import choose
from weft.bench.harness.provider import Unavailable
from weft.bench.ops import baselines, buffers, fp8_baselines
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import OPS, op_of, parse_shapes
from weft.bench.ops.workload import OpWorkload

NORMED = "all-reduce-rms-norm"


class Library:
    """torch.distributed, whose group is a team."""

    @staticmethod
    def all_reduce(x, group):
        x.copy_(group.team.library.all_reduce(x))

    @staticmethod
    def all_gather_into_tensor(out, x, group):
        out.copy_(group.team.library.all_gather(x))

    @staticmethod
    def reduce_scatter_tensor(out, x, group):
        out.copy_(group.team.library.reduce_scatter(x))

    @staticmethod
    def all_to_all_single(out, x, group):
        out.copy_(torch.cat([part.chunk(group.team.size)[group.team.rank] for part in group.team.exchange(x)]))


class Backend:
    mem_allocator = None

    def __init__(self):
        self.registered = 0

    def register_mem_pool(self, pool, symm):
        self.registered += 1

    def deregister_mem_pool(self, pool):
        self.registered -= 1


def group_of(team, backend):
    return types.SimpleNamespace(team=team, group_name="g", _get_backend=lambda device: backend)


@pytest.fixture
def libraries(monkeypatch):
    for module in (baselines, buffers, fp8_baselines):
        monkeypatch.setattr(module, "dist", Library)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: object())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: contextlib.nullcontext())


WORDS = {"bytes": ["nccl", "nccl.window"], "gemm": ["nccl", "cublas", "torch.mm", "cublas+nccl"]}
COMPARED = {op for provider in baselines.BASELINES for op in provider.ops}


@pytest.mark.parametrize("op", [op for op in OPS if op_of(op).form in WORDS and op in COMPARED])
def test_every_library_gives_the_answer(op, libraries):
    names = [provider.name for provider in choose(op, WORDS[op_of(op).form])]

    def main(team):
        backend = Backend()
        team.group = group_of(team, backend)
        problem = OpProblem(op_of(op), parse_shapes(op, [], team.size, tiny=True)[0], "bf16", team)
        for provider in choose(op, names):
            prepared = provider.make(problem)
            for _ in range(2):
                if prepared.prepare is not None:
                    prepared.prepare(0)
                assert problem.judge(prepared.run(0), prepared.local).wrong == "", provider.name
            assert backend.registered == ("window" in provider.name)
            prepared.release()
            assert backend.registered == 0
        return len(choose(op, names))

    assert weft.simulate(main, 3) == [len(names)] * 3


@pytest.mark.parametrize("form", ["block_fp8", "channel_fp8"])
@pytest.mark.parametrize("op", ["ag-gemm", "gemm-rs", "gemm-ar"])
def test_cublas_in_fp8_gives_the_answer(op, form, libraries):
    """And with other scales it does not."""
    name = f"{op}+{form}"

    def main(team):
        team.group = group_of(team, None)
        problem = OpWorkload(name=name, shapes=()).problem(parse_shapes(name, ["9,32,512"], team.size)[0], team)
        for provider in choose(name, ["cublas", "cublas+nccl"]):
            prepared = provider.make(problem)
            for _ in range(2):
                result = prepared.run(0)
                assert problem.judge(result, prepared.local).wrong == "", provider.name
            assert problem.judge(result * 1.1, prepared.local).wrong
        return len(choose(name, ["cublas", "cublas+nccl"]))

    assert weft.simulate(main, 3) == [2] * 3


def test_a_library_and_a_norm_give_the_answer(libraries):
    """And a wrong residual, weight or hidden state shows."""

    def main(team):
        team.group = group_of(team, None)
        problem = OpProblem(op_of(NORMED), parse_shapes(NORMED, ["5,24"], team.size)[0], "bf16", team)
        (provider,) = choose(NORMED, ["nccl+torch"])
        prepared = provider.make(problem)
        for _ in range(2):
            prepared.prepare(0)
            normed, hidden = prepared.run(0)
            assert problem.verdict(prepared, (normed, hidden)).wrong == ""
        assert "result 1: 1 of 120 elements" in problem.judge((normed, bump(hidden))).wrong
        assert re.search(r"result 0: 1\d\d of 120 elements", problem.judge((normed * 1.5, hidden)).wrong)
        assert "shape (4, 24), not (5, 24)" in problem.judge((normed[1:], hidden)).wrong
        return True

    def bump(x):
        x = x.clone()
        x[2, 3] += 1
        return x

    assert all(weft.simulate(main, 3))


def test_buffers_in_a_window_are_one_allocation_and_aligned(libraries):
    def main(team):
        team.group = group_of(team, Backend())
        problem = OpProblem(op_of("all-reduce"), parse_shapes("all-reduce", ["96"], 1)[0], "bf16", team)
        a, b = buffers.windowed(problem, [(3, 5), (7,)])[0]
        assert (a.shape, b.shape) == ((3, 5), (7,))
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        assert b.data_ptr() - a.data_ptr() == 512

        team.group = group_of(team, types.SimpleNamespace(mem_allocator=None))
        with pytest.raises(Unavailable, match="no register_mem_pool"):
            buffers.windowed(problem, [(8,)])

    weft.simulate(main, 1)


def test_torch_ops_share_one_symmetric_buffer(monkeypatch):
    """Two providers in turn, each writing its input first."""

    def main(team):
        team.group = group_of(team, None)
        shared = torch.empty(1024, dtype=torch.bfloat16)
        monkeypatch.setattr(baselines, "symmetric", lambda problem, size: shared[: size[0]])
        problem = OpProblem(op_of("all-reduce"), parse_shapes("all-reduce", ["96"], 1)[0], "bf16", team)

        def reduce(x, name):
            assert name == "g"
            return x.copy_(team.library.all_reduce(x))

        first, second = (baselines.torch_all_reduce(problem, reduce) for _ in range(2))
        for prepared in (first, second, first):
            prepared.prepare(0)
            assert problem.judge(prepared.run(0)).wrong == ""
        return True

    assert weft.simulate(main, 1) == [True]
