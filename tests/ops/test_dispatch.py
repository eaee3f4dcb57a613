"""A public function calls its op directly only where torch's dispatcher would add nothing."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft import ops
from weft.ops.collectives.all_reduce import ALL_REDUCE


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """A subclass whose calls must reach its __torch_function__."""


@contextlib.contextmanager
def counted(monkeypatch):
    """Counts the calls that go through ``torch.ops.weft.all_reduce``."""
    calls, real = [], ALL_REDUCE.torch_op
    monkeypatch.setattr(ALL_REDUCE, "torch_op", lambda *arguments: (calls.append(1), real(*arguments))[1])
    yield calls


def test_plain_tensors_need_no_dispatcher(monkeypatch):
    def main(team):
        x = torch.ones(8)
        parameter = torch.nn.Parameter(torch.ones(8))
        with counted(monkeypatch) as calls:
            results = [ops.all_reduce(x, team)]
            with torch.no_grad():
                results.append(ops.all_reduce(parameter, team))
            with torch.inference_mode():
                results.append(ops.all_reduce(x, team))
        return len(calls), all(result.eq(1).all() for result in results)

    assert weft.simulate(main, 1) == [(0, True)]


@pytest.mark.parametrize("why", ["gradient", "mode", "function mode", "profiler", "subclass"])
def test_what_torch_must_see_goes_through_the_dispatcher(monkeypatch, why):
    def main(team):
        x = torch.ones(8, requires_grad=why == "gradient")
        if why == "subclass":
            x = x.as_subclass(Marked)
        around = {
            "mode": Watching(),
            "function mode": torch.device("cpu"),
            "profiler": torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        }.get(why, contextlib.nullcontext())
        with counted(monkeypatch) as calls, around:
            result = ops.all_reduce(x, team)
        if why == "gradient":
            result.sum().backward()
            assert x.grad.eq(1).all()
        if why == "mode":
            assert "weft.all_reduce.default" in around.seen
        return len(calls)

    assert weft.simulate(main, 1) == [1]


def test_fake_tensors_are_traced():
    def main(team):
        with FakeTensorMode():
            return tuple(ops.all_reduce(torch.empty(3, 5, dtype=torch.bfloat16), team).shape)

    assert weft.simulate(main, 1) == [(3, 5)]
