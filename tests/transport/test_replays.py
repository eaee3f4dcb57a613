"""Replays of eager calls: which calls are replayed, and on virtual ranks that they compute what launches compute."""

from types import SimpleNamespace

import pytest
import torch

import weft
from tests.ops.checking import assert_close
from tests.transport.replaying import launches_kept, replayed
from weft import ops
from weft.kernels.fp8 import Fp8, by_torch, quantized_weight
from weft.ops.overlap import matmul_all_reduce, matmul_reduce_scatter
from weft.ops.overlap.all_gather_matmul import ALL_GATHER_MATMUL, Pipelined
from weft.ops.overlap.eager import submit
from weft.ops.overlap.matmul_all_reduce import MATMUL_ALL_REDUCE
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from weft.transport import replays
from weft.transport.replays import Replays, replays_of


class Halves:
    def __init__(self, count=2):
        self.calls, self.count = 0, count

    @property
    def turn(self):
        return self.calls % self.count


class Device:
    """Runs calls, which use ``halves``, and records what was run how."""

    def __init__(self, *halves):
        self.halves, self.done, self.settled = halves, [], 0
        self.replays = Replays(self.record, halves, self.settle)
        self.is_capturing = self.fails = False

    def settle(self):
        self.settled += 1

    def record(self, run):
        self.is_capturing = True
        try:
            name = run()
        finally:
            self.is_capturing = False
        if self.fails:
            raise RuntimeError("no capture today")
        return lambda: self.done.append(f"{name}'")

    def call(self, name, halves=()):
        def run():
            if not self.is_capturing:
                self.done.append(name)
            turns = [half.turn for half in halves]
            for half in halves:
                half.calls += 1
            return "".join(map(str, (name, *turns)))

        self.replays.submit(name, run)


def test_the_second_call_at_the_same_addresses_is_captured_and_later_ones_replay_it():
    device = Device()
    for name in "ababcbb":
        device.call(name)
    assert device.done == ["a", "b", "a'", "b'", "c", "b'", "b'"]
    assert (device.replays.captures, device.replays.replays) == (2, 4)


def test_a_graph_is_replayed_in_the_turn_of_its_halves_and_counts_as_a_call():
    two, one = Halves(), Halves(1)
    device = Device(two, one)
    for _ in range(5):
        device.call("a", [two, one])
    device.call("b", [two])
    device.call("a", [two, one])
    assert device.done == ["a", "a10'", "a00'", "a10'", "a00'", "b", "a00'"]
    assert (two.calls, one.calls) == (7, 6)
    assert device.replays.captures == 2  # one for each half


def test_further_captures_are_paid_by_replays(monkeypatch):
    monkeypatch.setattr(replays, "FREE_CAPTURES", 2)
    device = Device()
    for name in "aabbccc":
        device.call(name)
    assert device.done[4:] == ["c", "c'", "c'"]  # two replays have paid for it
    device = Device()
    for name in "abcdabcd":
        device.call(name)
    assert device.done[4:] == ["a'", "b'", "c'", "d"]


def test_a_failed_capture_is_launched_and_leaves_the_turns(caplog):
    halves = Halves()
    device = Device(halves)
    device.fails = True
    for _ in range(6):
        device.call("a", [halves])
    assert device.done == ["a"] * 6 and halves.calls == 6
    assert device.replays.failures == 3 == len(caplog.records)
    assert "no capture today" in caplog.text


def test_the_graphs_that_were_used_longest_ago_are_dropped_after_the_work_has_ended(monkeypatch):
    monkeypatch.setattr(replays, "MOST_GRAPHS", 4)
    device = Device()
    for name in "aabbccdd":
        device.call(name)
    device.call("a")  # so that b's is the oldest
    for name in "ee":
        device.call(name)
    assert device.settled == 1
    device.done.clear()
    for name in "acdeb":
        device.call(name)
    assert device.done == ["a'", "c'", "d'", "e'", "b"]
    monkeypatch.setattr(replays, "MOST_KEYS", 8)
    for name in map(str, range(20)):
        device.call(name)
    assert len(device.replays._known) <= 9


def test_a_call_that_drops_graphs_keeps_its_own(monkeypatch):
    """Its key may be the one that was used longest ago."""
    monkeypatch.setattr(replays, "MOST_GRAPHS", 4)
    device = Device()
    for name in "xaabbccddxx":
        device.call(name)
    assert device.settled == 1
    assert device.done[-2:] == ["x'", "x'"]


def test_a_key_with_more_graphs_than_are_kept_is_not_dropped_by_its_own_call(monkeypatch):
    """Each combination of its buffers' turns is a graph."""
    monkeypatch.setattr(replays, "MOST_GRAPHS", 4)
    buffers = [Halves(), Halves(), Halves()]
    device = Device(*buffers)
    device.call("a", buffers)
    for turns in [*range(8), *range(8)]:
        for place, halves in enumerate(buffers):
            halves.calls = turns >> place & 1
        device.call("a", buffers)
    assert device.done.count("a") == 1 and device.replays.captures == 8


def test_simulated_ranks_and_compared_calls_are_not_replayed():
    assert weft.simulate(lambda team: replays_of(team) is None, 2) == [True, True]


# --- on virtual ranks ------------------------------------------------------------------------------------------------

M, N, K = 16, 8, 8


def product(a, b):
    return a @ b.T


def calls_of(team, a_shard, a, b, outs):
    """Calls by designs with halves, a chunk or several, one stream or two."""
    gather, scatter, total, (several, rows) = outs
    cut = Pipelined(chunks=2, streams=2, begin_first=True)
    scattered = matmul_reduce_scatter.Pipelined(accumulate=team.size == 2)
    summed = matmul_all_reduce.Pipelined(chunks=2)
    return {
        "gather": (
            (a_shard, b, gather),
            lambda: ALL_GATHER_MATMUL.run_several(cut, team, a_shard, (b,), into=[gather]),
        ),
        "several": (
            (a_shard, b, several, rows),
            lambda: ALL_GATHER_MATMUL.run_several(Pipelined(), team, a_shard, (b,), gathers=True, into=[several, rows]),
        ),
        "scatter": ((a, b, scatter), lambda: MATMUL_REDUCE_SCATTER.run(scattered, team, a, b, into=scatter)),
        "total": ((a, b, total), lambda: MATMUL_ALL_REDUCE.run(summed, team, a, b, into=total)),
    }


def rounds(team, replaying, order):
    """Distances of the results from torch's, and what was captured and replayed."""
    graphs = replayed(team) if team.rank in replaying else None
    torch.manual_seed(team.rank)
    a_shard, a, b = torch.empty(M // team.size, K), torch.empty(M, K), torch.empty(N, K)
    outs = torch.empty(M, N), torch.empty(M // team.size, N), torch.empty(M, N), (torch.empty(M, N), torch.empty(M, K))
    worst = 0.0
    for _ in range(5):
        for x in (a_shard, a, b):
            x.normal_()
        by_rank = team.exchange((a_shard, a, b))
        gathered, summed = torch.cat([one[0] for one in by_rank]), sum(product(*one[1:]) for one in by_rank)
        wanted = {
            "gather": product(gathered, b), "several": product(gathered, b), "scatter": summed.chunk(team.size)[team.rank],
            "total": summed,
        }  # fmt: skip
        for name in order:
            tensors, run = calls_of(team, a_shard, a, b, outs)[name]
            tensors[2].fill_(torch.nan)
            submit(name, team, tensors, None, run)
            worst = max(worst, (tensors[2] - wanted[name]).abs().max().item())
            if name == "several":
                worst = max(worst, (tensors[3] - gathered).abs().max().item())
    return worst, graphs and (graphs.captures, graphs.replays, graphs.failures)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("order", [("gather", "several"), ("scatter",), ("total", "gather", "total")])
def test_ranks_that_replay_and_ranks_that_launch_compute_the_same(world_size, order):
    """A rank that replays, and one that does not, use the same half of the buffers in each call."""
    M_here = 18 if world_size == 3 else M
    with launches_kept(), pytest.MonkeyPatch.context() as patched:
        patched.setitem(globals(), "M", M_here)
        results = weft.simulate(rounds, world_size, sms=4, args=({0, *range(2, world_size)}, order))
    assert max(worst for worst, _ in results) < 1e-4
    assert results[1][1] is None
    captures, played, failures = results[0][1]
    # All but the first calls of a kind, and of the one that makes the workspace.
    assert played >= 5 * len(order) - 2 * len(set(order))
    assert 0 < captures <= 2 * len(order) and not failures


def random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(x, weight):
    return Fp8(*by_torch(x)).dequantized(torch.float64) @ weight.dequantized(torch.float64).T


def fp8_rounds(team):
    """Compare fp8 calls by designs with halves with plain torch; (captures, replays, failures) of rank 0, which replays."""
    graphs, me, W, wide = replayed(team) if team.rank == 0 else None, team.rank, team.size, 256
    a_shard, a, weights = random(0, 8, wide), random(0, 8 * W, wide), [random(rank, N, wide) for rank in range(W)]
    weights = [quantized_weight(weight.float(), "block") for weight in weights]
    b, gather, scatter, total = weights[me], random(0, 8 * W, N), random(0, 8, N), random(0, 8 * W, N)
    cut, sent, summed = (
        Pipelined(chunks=2, streams=2),
        matmul_reduce_scatter.Pipelined(streams=2),
        matmul_all_reduce.Pipelined(),
    )
    calls = {
        "gather": (
            (a_shard, b, gather),
            lambda: ALL_GATHER_MATMUL.run_several(cut, team, a_shard, (b,), into=[gather]),
        ),
        "scatter": ((a, b, scatter), lambda: MATMUL_REDUCE_SCATTER.run(sent, team, a, b, into=scatter)),
        "total": ((a, b, total), lambda: MATMUL_ALL_REDUCE.run(summed, team, a, b, into=total)),
    }
    for turn in range(4):
        inputs = [random(100 * turn + rank, 8 * W, wide) for rank in range(W)]
        a_shard.copy_(inputs[0][8 * me : 8 * me + 8])
        a.copy_(inputs[me])
        for name, (operands, run) in calls.items():
            operands[2].fill_(torch.nan)
            submit(name, team, operands, None, run)
        of_all = sum(exact(x, weight) for x, weight in zip(inputs, weights, strict=True))
        assert_close(gather, exact(inputs[0], b), wide, what="gathered")
        assert_close(scatter, of_all[8 * me : 8 * me + 8], wide * W, partials=W - 1, what="scattered")
        assert_close(total, of_all, wide * W, partials=W - 1, what="all-reduced")
    return graphs and (graphs.captures, graphs.replays, graphs.failures)


def test_replayed_fp8_calls_compute_what_launched_ones_do():
    with launches_kept():
        (captures, played, failures), of_rank_1 = weft.simulate(fp8_rounds, 2, sms=4)
    assert of_rank_1 is None and not failures
    assert 3 <= captures <= 6 and played >= 6


def test_a_replay_in_another_turn_would_write_where_the_peer_does_not_read(monkeypatch):
    """Without the look at turns, a rank that replays and one that launches would take different halves."""
    monkeypatch.setattr(replays.Replay, "is_next", True)
    with launches_kept():
        try:
            results = weft.simulate(rounds, 2, sms=4, args=({0}, ("gather",)))
        except weft.errors.WeftError:
            return
    assert max(worst for worst, _ in results) > 1e-2


def test_public_ops_submit_by_the_addresses_of_their_operands():
    def main(team):
        graphs = replayed(team)
        a, b = torch.randn(M, K), torch.randn(N, K)
        kept = [ops.matmul_all_reduce(a, b, team) for _ in range(3)]
        assert len({out.data_ptr() for out in kept}) == 3  # new results, and so new keys
        assert (graphs.captures, len(graphs._known)) == (0, 3)
        (key, *_), shapes = graphs._known, [(M, K), (N, K), (M, N)]
        assert key[0] == "matmul_all_reduce" and [part for part in key if isinstance(part, torch.Size)] == shapes
        return True

    with launches_kept():
        assert weft.simulate(main, 2, sms=4) == [True, True]


def test_captured_traced_and_profiled_calls_are_launched(monkeypatch):
    from weft.ops.overlap import eager

    ran, graphs = [], Device().replays
    monkeypatch.setattr(eager, "replays_of", lambda team: graphs)
    x = torch.zeros(2)
    for capturing, traced, profiled in ((True, None, False), (False, object(), False), (False, None, True)):
        team = SimpleNamespace(heap_changes=0, is_capturing=lambda capturing=capturing: capturing)
        monkeypatch.setattr(eager, "recorder", lambda traced=traced: traced)
        monkeypatch.setattr(eager, "is_profiled", lambda profiled=profiled: profiled)
        for _ in range(3):
            submit("op", team, (x,), None, lambda: ran.append("ran"))
    assert ran.count("ran") == 9 and not graphs._known
