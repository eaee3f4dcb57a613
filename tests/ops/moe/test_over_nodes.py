"""Experts over several nodes: answers, bytes over the rails, gradients, what is refused."""

import threading

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_close, run_cases
from tests.ops.layer_cases import mutated
from tests.ops.nodes import experts, teams_of_nodes
from weft import ops
from weft.ops.moe import all_gather_grouped_matmul_silu_mul as ag_moe
from weft.ops.moe import by_nodes
from weft.ops.moe.all_gather_grouped_matmul_silu_mul import AllGatherGroupedMatmulSiluMul
from weft.ops.moe.grouped_matmul_reduce_scatter import GroupedMatmulReduceScatter
from weft.plan.memo import forget
from weft.runtime.team.rail import Rail


@pytest.mark.parametrize(("nodes", "node_size", "seed"), teams_of_nodes(2))
def test_every_case(nodes, node_size, seed):
    """Every second case once, or all of them three times."""
    size = nodes * node_size
    cases, calls = (list(experts(nodes, size))[::2], 1) if seed == 0 else (list(experts(nodes, size)), 3)
    weft.simulate(run_cases, size, node_size=node_size, seed=seed, args=(cases, calls))


def drawn(rank, tokens, experts, most=4):
    """Rows of 16 elements, and choices of two experts."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn((tokens, 16), generator=generator)
    ids = torch.rand((tokens, experts), generator=generator).topk(2).indices.int()
    return x, ops.Routing(ids, torch.rand((tokens, 2), generator=generator))


def there_and_back(team, algorithm="auto"):
    """Rows to their experts, which double them, and back; bytes over the rail of both ways."""
    count = 2 * team.size
    x, routing = drawn(team.rank, 4, count)
    found = ops.moe_dispatch(x, routing, team, experts=count, max_tokens=4, algorithm=algorithm)
    sent = team.rail.sent_bytes
    y = (2 * found.rows).repeat_interleave(2, 0)
    out = ops.moe_combine(y, found, 4, team, algorithm=algorithm)
    expected = 2 * x * routing.weights.sum(1, keepdim=True)
    assert_close(out, expected, 2, partials=team.size)
    return sent, team.rail.sent_bytes - sent


@pytest.mark.parametrize(("nodes", "node_size"), [(2, 2), (3, 1)])
def test_a_token_crosses_to_each_node_once_and_back(nodes, node_size):
    """Four rows of 64 bytes, with two choices of 8 bytes each; then four sums."""
    least = 4 * (nodes - 1) * (64 + 2 * 8), 4 * (nodes - 1) * 64
    assert weft.simulate(there_and_back, nodes * node_size, node_size=node_size) == [least] * (nodes * node_size)


def overlapped(team, algorithm="auto"):
    """A layer of two experts a rank; bytes over the rail of both of its ops, and what it logged (``logging``)."""
    count, log = 2 * team.size, []
    LOGS.of_rank = log
    x, routing = drawn(team.rank, 4, count)
    generator = torch.Generator().manual_seed(10 + team.rank)
    up, down = (torch.randn(size, generator=generator) for size in ((2, 32, 16), (2, 16, 16)))
    mine = ops.Experts.whole(count, team.rank, team.size)
    h, schedule, found = ops.all_gather_grouped_matmul_silu_mul(
        x, routing, up, mine, team, max_tokens=4, algorithm=algorithm
    )
    sent = team.rail.sent_bytes
    log.append("h")
    out = ops.grouped_matmul_reduce_scatter(h, down, schedule, found, 4, team, algorithm=algorithm)
    return out, (sent, team.rail.sent_bytes - sent), log


LOGS = threading.local()


@pytest.fixture
def overlapping(monkeypatch):
    """Designs that overlap at any size, where "auto" is asked for: the rules take few rows in one hop."""
    for op, name in ((AllGatherGroupedMatmulSiluMul, "fused"), (GroupedMatmulReduceScatter, "slabs")):
        monkeypatch.setattr(op, "rule", lambda op, call, machine, name=name: (name, "enough to overlap"))
    forget()
    yield
    forget()


@pytest.fixture
def logging(monkeypatch, overlapping):
    """Log of each rank's GEMMs, exchanges and waits of its rail, in the order in which the host submits them."""

    def logged(where, name, word):
        original = getattr(where, name)

        def call(*arguments, **named):
            LOGS.of_rank.append(word)
            return original(*arguments, **named)

        monkeypatch.setattr(where, name, call)

    logged(by_nodes.gemms, "run", "GEMM")
    logged(Rail, "exchange", "rail")
    logged(Rail, "after", "await")


@pytest.mark.parametrize(("nodes", "node_size"), [(2, 2), (3, 1)])
def test_rails_run_under_the_gemms_and_carry_no_byte_twice(nodes, node_size, logging):
    """This rank's and this node's rows come before a wait for others; other nodes' sums leave before this node's GEMM."""
    size = nodes * node_size
    by_both = [weft.simulate(overlapped, size, node_size=node_size, args=(one,)) for one in ("auto", "sequential")]
    least = 4 * (nodes - 1) * (64 + 2 * 8), 4 * (nodes - 1) * 64
    for (out, sent, log), (expected, as_much, _) in zip(*by_both, strict=True):
        assert sent == as_much == least
        assert_close(out, expected.double(), 64, partials=2 * nodes)
        of_gather, of_scatter = " ".join(log).split(" h ")
        assert of_gather == "rail await GEMM GEMM" + " await await GEMM" * (nodes - 1)
        assert of_scatter == "GEMM rail " * (nodes - 1) + "GEMM"


@pytest.mark.parametrize("arriving", [True, False])
def test_tiles_go_with_a_node(arriving):
    """With the one whose rows come last, or whose sums go first; in each group tiles keep their order."""
    nodes, size, most = 3, 2, 40

    def main(team):
        ids = torch.randint(0, 3, (team.size * most, 1), generator=torch.Generator().manual_seed(0)).int()
        here, found = team.rail.index, []
        for start in (here * size * most,) if arriving else (0, team.rank * most + 7):
            schedule = ops.moe_schedule(ids, ops.Experts.slices(3), block=16, start=start)
            tiles, pairs = schedule.tiles[: int(schedule.tile_count)].tolist(), schedule.pairs.view(-1)
            divided = by_nodes.group_tiles(team, schedule, most, arriving=arriving)
            assert sorted(sum((one.tiles[: int(one.tile_count)].tolist() for one in divided), [])) == sorted(tiles)
            for group, one in enumerate(divided):
                kept = one.tiles[: int(one.tile_count)].tolist()
                assert kept == [tile for tile in tiles if tile in kept]
                for _, first, _, count in kept:
                    ranks = pairs[first : first + count] // most
                    steps = (ranks // size - here) % nodes
                    if arriving and bool((ranks == team.rank).all()):
                        assert group == 0
                    elif arriving:
                        assert group == 1 + int(steps.max())
                    else:
                        assert group <= int(((steps - 1) % nodes).min())
            found.append([int(one.tile_count) for one in divided])
        return found

    for counts in sum(weft.simulate(main, nodes * size, node_size=size), []):
        assert min(counts[1:] if arriving else counts) > 0, counts


BUGS = {
    "a node's rows not awaited": ("        if size > 1:\n", "        if size > 1 and step == 0:\n", "gather_by_nodes"),
    "rows sent on before they have come": (
        "                rail.after(mark)\n",
        "                pass\n",
        "gather_by_nodes",
    ),
    "a tile with the node of its first row": ("1 + (of_tail + NODES", "1 + (of_head + NODES", "group_tiles_kernel"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", [None, *BUGS])
def test_the_check_finds_a_planted_bug(name, tmp_path, monkeypatch, overlapping):
    if name is not None:
        old, new, changed = BUGS[name]
        mutant = mutated(by_nodes, old, new, f"nodes_mutant_{len(name)}", tmp_path)
        monkeypatch.setattr(by_nodes, changed, getattr(mutant, changed))
        monkeypatch.setattr(ag_moe, "gather_by_nodes", (mutant if "gather" in changed else by_nodes).gather_by_nodes)

    def main(team):
        # The first call makes workspaces, at which the ranks meet; that hides what nothing else orders.
        team = weft.init(node_size=2)
        return [overlapped(team)[0] for _ in range(2)]

    report = weft.check.check(main, 4, schedules=4)
    assert report.ok == (name is None), report
    assert name is None or all(found.finding.kind == "race" for found in report.wrong), report


@pytest.mark.parametrize("overlapped", [False, True])
def test_gradients_are_those_of_one_node(overlapped):
    def main(team):
        grads, count = [], 2 * team.size
        for members in (weft.init(node_size=1), weft.init()):
            x, (ids, weights) = drawn(team.rank, 4 - team.rank, count)
            x.requires_grad_(), weights.requires_grad_()
            routing = ops.Routing(ids, weights)
            generator = torch.Generator().manual_seed(10 + team.rank)
            up, down = (torch.randn(size, generator=generator) for size in ((2, 32, 16), (2, 16, 16)))
            up.requires_grad_(), down.requires_grad_()
            mine = ops.Experts.whole(count, team.rank, team.size)
            if overlapped:
                h, schedule, found = ops.all_gather_grouped_matmul_silu_mul(x, routing, up, mine, members, max_tokens=4)
                out = ops.grouped_matmul_reduce_scatter(h, down, schedule, found, len(x), members)
            else:
                found = ops.moe_dispatch(x, routing, members, experts=count, max_tokens=4)
                schedule = ops.moe_schedule(found.routing.ids, mine)
                h = ops.grouped_matmul_silu_mul(found.rows, up, schedule)
                out = ops.moe_combine(ops.grouped_matmul(h, down, schedule), found, len(x), members)
            (out * torch.arange(out.numel()).view_as(out)).sum().backward()
            grads.append((x.grad, weights.grad, up.grad, down.grad))
        return grads

    for over, within in weft.simulate(main, 2):
        for actual, expected in zip(over, within, strict=True):
            assert_close(actual, expected, 200, partials=4)


def test_what_is_of_one_node_is_refused():
    def main(team):
        x, routing = drawn(team.rank, 3, 4)
        up, mine = torch.ones((2, 32, 16)), ops.Experts.whole(4, team.rank, 2)
        with pytest.raises(ValueError, match="algorithm='fused' is of one node, and the team has 2; pass 'auto'"):
            ops.all_gather_grouped_matmul_silu_mul(x, routing, up, mine, team, max_tokens=3, algorithm="fused")
        with pytest.raises(
            ValueError, match="is sent within one node, and the team has 2 nodes x 1 ranks; leave it out"
        ):
            ops.moe_dispatch(x, routing, team, experts=4, max_tokens=3, dtype=torch.float8_e4m3fn)
        with pytest.raises(ValueError, match="shared by 2 ranks, which node_size=1 is no multiple of"):
            ops.moe_dispatch(x, routing, team, experts=ops.Experts.slices(4), max_tokens=3)

    weft.simulate(main, 2, node_size=1)
