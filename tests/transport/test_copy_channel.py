"""Calls that copy engines carry: buffers in turn, chunks awaited by rank or by place."""

import pytest
import torch

import weft
from weft.transport.copy_channel import MAX_CHUNKS, CopyChannel, await_chunk


def gathered(team, halves=2, calls=4, by_place=False):
    """All-gathers of two chunks a rank, in calls with other data; what each call found."""
    n, world, me = 64, team.size, team.rank
    space = CopyChannel.make(team, team.zeros((halves, world, 2 * n), torch.float32, name="buffers"), world)
    found = []
    for call in range(calls):
        shard = torch.full((2 * n,), 10.0 * call + me)
        buffer = space.begin(team)
        buffer[me].copy_(shard)
        team.copy_engine.fork()
        for chunk in range(2):
            rows = slice(chunk * n, (chunk + 1) * n)
            for step in range(1, world):
                if by_place:
                    space.send(team, buffer[me][rows], shard[rows], me, chunk, (me + step) % world)
                else:
                    space.landed.send(buffer[me][rows], shard[rows], (me + step) % world, chunk)
        for chunk in range(2):
            if by_place:
                for rank in (rank for rank in range(world) if rank != me):
                    await_chunk(space.rows_from(rank), chunk, 0)
            else:
                await_chunk(space.landed, chunk, (me + 1) % world, world - 1)
        found.append(buffer.mean(1).tolist())
        team.copy_engine.join()
    return found


@pytest.mark.parametrize("by_place", [False, True], ids=["by rank", "by place"])
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_call_gets_its_own_data(world_size, halves, by_place):
    expected = [[10.0 * call + rank for rank in range(world_size)] for call in range(4)]
    assert weft.simulate(gathered, world_size, args=(halves, 4, by_place)) == [expected] * world_size


@pytest.mark.parametrize("schedules", [4, pytest.param(12, marks=pytest.mark.sweep)])
def test_a_half_is_written_again_only_after_it_was_read(schedules):
    report = weft.check(gathered, 3, schedules=schedules, args=(1, 3))
    assert report.ok, str(report)


def test_a_chunk_beyond_the_channel_is_refused():
    def main(team):
        space = CopyChannel.make(team, team.zeros((1, 8)), team.size)
        with pytest.raises(ValueError, match=rf"chunk={MAX_CHUNKS} is not an integer in 0 .. {MAX_CHUNKS - 1}"):
            space.landed.send(space.buffers[0], space.buffers[0], 0, MAX_CHUNKS)

    weft.simulate(main, 1)
