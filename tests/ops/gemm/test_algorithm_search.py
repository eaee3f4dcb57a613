"""The search for cuBLAS's fastest algorithm: its choice by made-up times, one choice for all ranks, and on GPUs its answers."""

import dataclasses
import types

import pytest
import torch

import weft
from tests.ops.checking import assert_close
from weft import ops
from weft.errors import Unsupported
from weft.ops.gemm import algorithm_search, cublas
from weft.ops.gemm.algorithm_search import GpuContest, agree, fastest
from weft.plan import algorithms
from weft.plan.algorithms import Entry
from weft.runtime import cublaslt
from weft.runtime.cublaslt import Algorithm

BF16 = torch.bfloat16
A, B, C, D, E = (Algorithm(tile=tile, cluster=2, custom=0) for tile in range(5))


@dataclasses.dataclass
class Table:
    """Contest whose times are given: in the first rounds, and in those of the finalists."""

    first: dict
    final: dict
    asked: list = dataclasses.field(default_factory=list)

    def times(self, candidates, rounds):
        self.asked.append((list(candidates), rounds))
        known = self.final if len(self.asked) > 1 else self.first
        return {one: known[one] for one in candidates if one in known}


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    monkeypatch.setattr(algorithms, "_used", {})
    yield
    algorithms.forget()


# --- the choice ------------------------------------------------------------------------------------------------------


def test_the_fastest_of_a_second_run_wins():
    # E cannot run, D is too slow for a second run, A was lucky in the first.
    contest = Table({None: 100, A: 80, B: 90, C: 92, D: 99}, {None: 101, A: 97, B: 91, C: 90})
    assert fastest(contest, [A, B, C, D, E]) == (C, 90, 101)
    (all_of_them, few), (finalists, more) = contest.asked
    assert (all_of_them, finalists) == ([None, A, B, C, D, E], [None, A, B, C])
    assert few < more


def test_less_than_the_least_gain_is_none():
    contest = Table({None: 100, A: 95}, {None: 100, A: 98.1})
    assert fastest(contest, [A]) == (None, 100, 100)
    assert fastest(Table({None: 100, A: 95}, {None: 100, A: 97.9}), [A]) == (A, 97.9, 100)


def test_torch_stays_where_nothing_else_runs():
    assert fastest(Table({None: 100}, {}), [A, B]) == (None, 100, 100)


# --- all ranks -------------------------------------------------------------------------------------------------------


def found(dtype, shape, team):
    """What a rank finds, each another one."""
    algorithm = dataclasses.replace(A, custom=team.rank)
    return Entry(
        gpu="x", cublas="1.2.3", dtype="bfloat16", shape=shape, algorithm=algorithm, us=1.0 + team.rank, torch_us=3.0
    )


RANK_0 = types.SimpleNamespace(rank=0)


@pytest.fixture
def search(monkeypatch):
    """(rank, shape) of each search, with all shapes missing but (1, 8, 8)."""
    searched = []

    def tuned(M, N, K, dtype, caps):
        if M > 1:
            algorithms._missing[dtype, (M, N, K)] = None

    def search(dtype, shape, team):
        searched.append((team.rank, shape))
        return found(dtype, shape, team)

    monkeypatch.setattr(cublas, "tuned", tuned)
    monkeypatch.setattr(algorithm_search, "_search", search)
    return searched


def test_all_ranks_get_the_choice_of_rank_0(search, tmp_path):
    file = tmp_path / "x.json"
    algorithms.save(file, [found(BF16, (1, 8, 8), RANK_0)])

    def main(team):
        # Rank 1 has another shape, and asks in another order; the last one is asked for by what it runs.
        gemms = [(BF16, (m, 8, 8)) for m in ((1, 2) if team.rank == 0 else (3, 2))]
        return agree(team, gemms, lambda: cublas.tuned(4, 8, 8, BF16, team.caps), file)

    by_rank = weft.simulate(main, 2)
    expected = [found(BF16, (m, 8, 8), RANK_0) for m in (2, 4, 3)]
    assert by_rank == [expected, expected]
    assert search == [(0, one.shape) for one in expected]
    assert [one.shape[0] for one in algorithms.read(file)] == [1, 2, 3, 4]
    assert len(algorithms._used) == 4


def test_a_damaged_file_is_left_alone_and_the_search_goes_on(search, tmp_path, caplog):
    file = tmp_path / "x.json"
    file.write_text("{")
    assert len(weft.simulate(lambda team: agree(team, [(BF16, (2, 8, 8))], None, file), 2)[1]) == 1
    assert file.read_text() == "{"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("breaks", ["damaged", "unwritable"])
def test_a_file_that_breaks_during_the_search_leaves_no_rank_waiting(breaks, search, tmp_path, caplog):
    file = tmp_path / ("file/x.json" if breaks == "unwritable" else "x.json")

    def run():
        cublas.tuned(2, 8, 8, BF16, None)
        # Between reading and writing: the file is no longer a cache, or its folder is a file.
        (tmp_path / "file").touch() if breaks == "unwritable" else file.write_text("{")

    def main(team):
        return [one.shape[0] for one in agree(team, [(BF16, (3, 8, 8))], run if team.rank == 0 else None, file)]

    assert weft.simulate(main, 2) == [[3, 2], [3, 2]]
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("cuBLAS algorithms found from here on are not kept in a file: ")


def test_virtual_ranks_search_nothing(tmp_path):
    file = tmp_path / "x.json"
    assert weft.simulate(lambda team: ops.warm_up(team, [(1, 8, 8)], algorithm_cache=file), 2) == [[], []]
    assert not file.exists()
    with pytest.raises(ValueError, match=r"warm_up: shapes has \(1, 8\); pass \(M, N, K\)"):
        weft.simulate(lambda team: ops.warm_up(team, [(1, 8)]), 1)


# --- on GPUs ---------------------------------------------------------------------------------------------------------

SHAPES = [(777, 1304, 520), (4096, 5120, 2560)]


def search_on_rank(team, file):
    operands = []
    for M, N, K in SHAPES:
        generator = torch.Generator("cuda").manual_seed(1)
        operands.append([torch.empty(n, K, dtype=BF16, device="cuda").normal_(generator=generator) for n in (M, N)])
    entries = ops.warm_up(team, SHAPES[1:], run=lambda: ops.matmul(*operands[0]), algorithm_cache=file)
    again = ops.warm_up(team, SHAPES, algorithm_cache=file)
    outs = [ops.matmul(a, b) for a, b in operands]
    for (a, b), out in zip(operands, outs, strict=True):
        assert_close(out, a.float() @ b.float().T, a.shape[1], partials=1, what=str(a.shape))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(Unsupported, match="warm_up times GEMMs, and a CUDA graph is captured"), torch.cuda.graph(graph):
        ops.warm_up(team, SHAPES)
    used = [cublas.tuned(*shape, BF16, team.caps).algorithm for shape in SHAPES]
    return entries, again, used, [out.float().sum().item() for out in outs]


@pytest.mark.gpu(2)
def test_ranks_hold_equal_algorithms_and_compute_the_product(tmp_path):
    file = tmp_path / "x.json"
    first, second = weft.launch(search_on_rank, 2, "cuda", args=(file,))
    assert first == second
    entries, again, used, _ = first
    assert again == []
    rows = {entry.shape for entry in entries}
    if torch.cuda.get_device_capability() == (9, 0):
        assert SHAPES[0] in rows  # no shipped row
    assert algorithms.read(file) == sorted(entries, key=lambda entry: entry.shape)
    for entry in entries:
        assert entry.algorithm == used[SHAPES.index(entry.shape)]
        assert entry.algorithm is None or entry.us < entry.torch_us


@pytest.mark.gpu(1)
def test_a_contest_leaves_out_what_cannot_run():
    contest = GpuContest((512, 1032, 520), BF16, torch.device("cuda", torch.cuda.current_device()))
    missing = Algorithm(tile=9999, cluster=3, custom=1)
    named = cublaslt.algorithms(512, 1032, 520, BF16)
    times = contest.times([None, missing, *named[:3]], 2)
    assert missing not in times
    assert None in times
    assert all(0 < us < 1e4 for us in times.values())
    if torch.cuda.get_device_capability() == (9, 0):
        assert len(times) > 1
