"""Side streams differ from each other and from the caller's, whichever stream of torch's pool that is."""

import itertools

import pytest
import torch

from weft.runtime import side_streams, streams
from weft.runtime.side_streams import SideStreams
from weft.runtime.streams import IN_POOL, on_stream, own_stream

DEVICE = torch.device("cuda", 0)


class Stream:
    """One of IN_POOL streams of a priority, handed out in turn as by torch."""

    turns: dict[int, itertools.count] = {}

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.handle = priority, next(self.turns.setdefault(priority, itertools.count())) % IN_POOL

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.handle == other.handle

    def __hash__(self) -> int:
        return hash(self.handle)


class Event:
    """Event that only other streams than the one that recorded it may wait for."""

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def wait(self, stream: Stream) -> None:
        assert stream != self.stream


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(Stream, "turns", {})
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(side_streams, "on_stream", lambda stream: stream)
    monkeypatch.setattr(streams, "_taken", type(streams._taken)())


def test_streams_of_weft_are_distinct_while_there_are_enough(pool):
    held = [own_stream(DEVICE) for _ in range(20)]
    for _ in range(IN_POOL - 20):
        Stream(DEVICE)  # of other code
    held += [own_stream(DEVICE) for _ in range(12)]
    assert len(set(held)) == IN_POOL
    held.append(own_stream(DEVICE))  # none is left: one of them again
    assert len(set(held)) == IN_POOL
    first = held[0].handle
    held.clear()
    assert first in {own_stream(DEVICE).handle for _ in range(IN_POOL)}  # freed with their owners


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_side_stream_is_the_callers_stream(pool, monkeypatch, count):
    made = SideStreams(DEVICE, count)
    for _ in range(2 * IN_POOL):
        callers = Stream(DEVICE)
        monkeypatch.setattr(side_streams, "current_stream", lambda device, callers=callers: callers)
        made.fork()
        assert len({made.turn(number) for number in range(count)}) == count
        assert made.turn(0) == made.turn(count) == callers
        assert made.urgent() not in {made.turn(number) for number in range(count)}


def test_the_current_stream_is_looked_up_by_its_handle(monkeypatch):
    handles, asked = {0: 7, 1: 7}, []
    monkeypatch.setattr(streams, "_known", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", handles.get, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: (asked.append(index), handles[index]))
    for index, handle in ((0, 7), (0, 8), (1, 8), (0, 7), (1, 8)):
        handles[index] = handle
        assert streams.current_stream(torch.device("cuda", index))[1] == handle
    assert asked == [0, 0, 1], "another stream, or another device"


@pytest.fixture
def current(monkeypatch):
    """The streams that were current on device 0, one after the other."""
    found = [CALLERS]
    monkeypatch.setattr(streams, "_current", lambda index: found[-1])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(streams, "_set", found.append)
    return found


class Side:
    device_index = 0

    def __init__(self, cuda_stream: int = 1) -> None:
        self.cuda_stream = cuda_stream


CALLERS = Side(0)


def test_the_former_stream_is_current_again_after_an_error_too(current):
    side = Side()
    with pytest.raises(RuntimeError, match="in between"), on_stream(side):
        assert current[-1] is side
        raise RuntimeError("in between")
    assert current == [CALLERS, side, CALLERS]


def test_a_stream_that_is_current_is_set_only_for_its_device(current, monkeypatch):
    side = Side()
    with on_stream(side):
        with on_stream(side):
            assert current == [CALLERS, side]
        assert current == [CALLERS, side]
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
        with on_stream(side):
            assert current == [CALLERS, side, side]
    assert current[-1] is CALLERS
