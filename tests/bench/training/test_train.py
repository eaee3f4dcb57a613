"""``weft bench train``: the providers' answers, with stand-ins for NCCL and torch's fused ops, and its shapes."""

import pytest
import torch.distributed as dist

import weft
from tests.benchmarks.providers.loaded import loaded
from weft.bench.harness.workload import Shape
from weft.bench.training.shapes import TINY, parse_layers
from weft.bench.training.workload import TrainWorkload
from weft.ops.gemm.cublas import matmul
from weft.runtime.team.team import find_team

baselines = loaded("training")


class Group:
    """Stand-in of a process group for a simulated team."""

    def __init__(self, team):
        self.team, self.group_name, self.size = team, team.name, lambda: team.size


class Done:
    def wait(self):
        pass


def all_gather_into_tensor(out, x, group, async_op=False):
    out.copy_(group.team.library.all_gather(x))
    return Done()


def reduce_scatter_tensor(out, x, group, async_op=False):
    out.copy_(group.team.library.reduce_scatter(x))
    return Done()


def fused_all_gather_matmul(x, bs, dim, name, return_A):
    assert dim == 0 and return_A and x.is_contiguous()
    whole = find_team(name).library.all_gather(x)
    return whole, [whole @ b for b in bs]


def fused_matmul_reduce_scatter(a, b, op, dim, name):
    assert (op, dim) == ("sum", 0)
    return find_team(name).library.reduce_scatter(a @ b)


@pytest.fixture
def stand_ins(monkeypatch):
    import torch.distributed._symmetric_memory  # noqa: F401  defines the ops

    monkeypatch.setattr(baselines, "_group", Group)
    for function in (all_gather_into_tensor, reduce_scatter_tensor):
        monkeypatch.setattr(dist, function.__name__, function)
    for function in (fused_all_gather_matmul, fused_matmul_reduce_scatter):
        monkeypatch.setattr(torch.ops.symm_mem, function.__name__, function)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_all_providers_give_the_answer(world_size, stand_ins):
    """In fp32, where a wrong formula shows; and a wrong gradient is named."""
    workload = TrainWorkload(
        name="train", shapes=parse_layers(("2x4,32,4,4,8,24",), world_size, tiny=True), dtype="fp32"
    )

    def main(team):
        problem = workload.problem(workload.shapes[0], team)
        problem.expect()
        named = TrainWorkload(name="train", shapes=(), dtype="fp32", words=("weft.by_shards", "weft.under_scatter"))
        for provider in (*workload.providers(), *named.providers()):
            prepared = provider.make(problem)
            out = prepared.run(0)
            assert problem.verdict(prepared, out).wrong == "", provider.name
        wrong = problem.verdict(prepared, (*out[:2], 1.01 * out[2], *out[3:])).wrong
        assert "of qkv, more than 0.0001" in wrong and ";" not in wrong

    weft.simulate(main, world_size)


def test_the_baseline_runs_the_searched_algorithms_in_its_forward(stand_ins, monkeypatch):
    """In all four GEMMs; a backward's read transposes, for which none is searched."""
    sizes = []

    def counted(a, b):
        sizes.append((*a.shape, b.shape[0]))
        return matmul(a, b)

    monkeypatch.setattr(baselines, "matmul", counted)
    workload = TrainWorkload(
        name="train", shapes=parse_layers(("2x4,32,4,4,8,24",), 2, tiny=True), words=("cublas+nccl",)
    )

    def main(team):
        problem = workload.problem(workload.shapes[0], team)
        (provider,) = workload.providers()
        provider.make(problem).run(0)

    weft.simulate(main, 2)
    assert sorted(sizes) == sorted(2 * [(8, 32, 48), (8, 16, 32), (8, 32, 24), (8, 12, 32)])


def test_designs_are_measured_by_name_only():
    def names(*words, simulated=False):
        made = TrainWorkload(name="train", shapes=(), words=words)
        return [provider.name for provider in made.providers(simulated)]

    assert names() == names(simulated=True) == ["weft.auto", "cublas+nccl", "torch.fused"]
    assert names("weft") == ["weft.auto", "weft.under_scatter", "weft.by_shards", "weft.in_turn"]
    assert names("weft.by_shards", "torch") == ["weft.by_shards", "torch.fused"]


def test_shapes_are_of_a_model_or_numbers():
    one, two = parse_layers(("qwen3-32b:1x4096,2x2048",), 2, tiny=False)
    assert one == Shape(size=(1, 4096, 5120, 64, 8, 128, 25600), label="qwen3-32b 1x4096")
    assert two.size[:2] == (2, 2048)
    assert parse_layers((TINY,), 2, tiny=True)[0].size == (2, 16, 64, 8, 4, 16, 96)


@pytest.mark.parametrize(
    ("word", "world_size", "tiny", "message"),
    [
        ("qwen3-32b", 2, False, "is not MODEL:BATCHxLENGTH"),
        ("qwen3-30b-a3b:1x64", 2, False, "choose a dense model"),
        ("1x9,32,4,4,8,24", 2, False, "length=9 is not divisible by world_size=2"),
        ("1x8,32,4,2,8,24", 4, False, "kv_heads=2 is not divisible by world_size=4"),
        ("qwen3-32b:1x4096", 2, True, "simulated ranks take at most 256"),
    ],
)
def test_other_shapes_are_refused(word, world_size, tiny, message):
    with pytest.raises(ValueError, match=message):
        parse_layers((word,), world_size, tiny=tiny)
