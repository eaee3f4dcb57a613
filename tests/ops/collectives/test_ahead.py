"""An all-to-all that copy engines carry beside other kernels gives what was sent, under every schedule."""

import pytest
import torch

import weft
from weft import ops
from weft.ops.collectives.ahead import InFlight, travels_ahead


def part(call, source, target):
    return torch.arange(5 * 16).view(5, 16) + 1000 * call + 100 * source + 10.0 * target


def layers(team, early=False):
    """Three calls, each received before the next is sent, as layers do; ``early``: after it."""
    W, me = team.size, team.rank

    def send(call):
        return InFlight.send(torch.stack([part(call, me, target) for target in range(W)]), team)

    flight = send(0)
    for call in range(3):
        found = torch.full((5, W, 16), -1.0)
        later = send(call + 1) if early and call < 2 else None
        flight.receive(found.transpose(0, 1))
        flight = later or (send(call + 1) if call < 2 else None)
        total = ops.all_reduce(torch.ones(8), team)  # another op between
        assert total.tolist() == [W] * 8
        if not early:
            expected = torch.stack([part(call, source, me) for source in range(W)], 1)
            assert torch.equal(found, expected)


CASES = [(2, 3), *(pytest.param(*case, marks=pytest.mark.sweep) for case in ((2, 100), (3, 40), (4, 20)))]


@pytest.mark.parametrize(("world_size", "schedules"), CASES)
def test_parts_arrive_whatever_runs_first(world_size, schedules):
    report = weft.check(layers, world_size, schedules=schedules)
    assert report.ok, str(report)


def test_a_call_that_is_sent_before_the_last_one_is_received_is_found():
    report = weft.check(layers, 2, schedules=3, args=(True,))
    assert "race" in {found.finding.kind for found in report.findings}


def test_small_parts_and_full_heaps_do_not_send_ahead():
    def main(team):
        found = [travels_ahead(nbytes, team) for nbytes in ((1 << 20) - 1, 1 << 20)]
        team.empty((team.largest_free_bytes() - (1 << 20),), torch.uint8)
        return found, travels_ahead(1 << 20, team)

    assert weft.simulate(main, 2, heap_bytes=64 << 20) == [([False, True], False)] * 2
