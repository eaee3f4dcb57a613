"""Arrows and summaries of timelines made by hand, clocks, and the records of a ring."""

import copy
import json
import math
import zlib

import pytest
import torch
from typer.testing import CliRunner

from weft.cli import app
from weft.runtime.team.trace_rings import KINDS, RECORDS, RING_BYTES, RINGS, Record, records_of
from weft.trace.chrome import to_json
from weft.trace.clocks import Offset, aligned, offset_of, other_clocks
from weft.trace.device import event_of
from weft.trace.summary import summarize, summary
from weft.trace.timeline import MEASURED, Arrow, Event, Signal, arrows_of, make_timeline


def event(kind, start, end, rank=0, track="SM 0", **details):
    return Event(rank=rank, track=track, kind=kind, name=kind, start=start, end=end, **details)


def signal(value, place=(0, 64), bits=32):
    return Signal(place=place, value=value, bits=bits)


def test_the_first_notify_that_is_enough_has_released_a_wait():
    events = [
        event("notify", 0, 1, rank=1, signal=signal(1)),
        event("notify", 5, 6, rank=1, signal=signal(2)),
        event("notify", 8, 9, rank=1, signal=signal(3)),
        event("notify", 3, 4, rank=1, signal=signal(9, place=(0, 68))),
        event("wait", 2, 10, signal=signal(2)),
    ]
    assert arrows_of(events, 0) == [Arrow(notify=1, wait=4)]


def test_values_count_modulo_the_signal_s_width():
    events = [event("notify", 0, 1, signal=signal(-(2**31))), event("wait", 0, 2, signal=signal(2**31 - 1))]
    assert arrows_of(events, 0) == [Arrow(notify=0, wait=1)]
    events = [event("notify", 0, 1, signal=signal(-(2**31), bits=64)), event("wait", 0, 2, signal=signal(1, bits=64))]
    assert arrows_of(events, 0) == []


def test_of_notifies_that_add_the_last_one_has_released_a_wait():
    events = [event("notify", t, t + 1, signal=signal(None)) for t in (0, 2, 7)] + [
        event("wait", 1, 4, signal=signal(2))
    ]
    assert arrows_of(events, 0) == [Arrow(notify=1, wait=3)]
    assert arrows_of(events, 4) == [Arrow(notify=2, wait=3)]  # clocks may differ by so much


def test_the_last_put_of_another_rank_has_released_a_wait_for_words():
    def sent(start, rank, place):
        return event("put", start, start + 1, rank=rank, signal=signal(None, place=place))

    events = [
        sent(0, 1, (None, 64)), sent(2, 2, (None, 64)), sent(3, 0, (None, 64)), sent(4, 1, (None, 128)), sent(4, 1, (2, 64)),
        sent(8, 1, (None, 64)), event("wait", 1, 6, signal=signal(None)),
    ]  # fmt: skip
    assert arrows_of(events, 0) == [Arrow(notify=1, wait=6)]
    assert arrows_of([sent(0, 1, (0, 64)), *events[1:]], 0) == [Arrow(notify=1, wait=6)]
    at_once = [event("wait", 0, 6, rank=rank, signal=signal(None, place=(rank, 64))) for rank in range(3)]
    arrows = arrows_of([*(sent(0, rank, (None, 64)) for rank in range(3)), *at_once], 0)
    assert [arrow.notify for arrow in arrows] == [2, 0, 1]


def test_exposed_time_is_that_of_idle_sms():
    """Two SMs: one waits while the other computes, then both wait; a copy of 60 ns, tiles of 50 ns an SM."""
    events = [
        event("tile", 0, 40), event("wait", 40, 60, cause="landed", signal=signal(1)), event("tile", 60, 80),
        event("wait", 0, 60, track="SM 1", cause="landed", signal=signal(1)), event("tile", 60, 100, track="SM 1"),
        event("copy", 0, 60, track="copy engine", rank=1), event("notify", 55, 60, rank=1, signal=signal(1)),
    ]  # fmt: skip
    timeline = make_timeline(2, MEASURED, events, residual_ns=90)
    here, there = summarize(timeline)
    assert here.exposed == {("landed", 1): pytest.approx(40 / 2 + 20)}
    assert (here.time, here.gemm, here.bound) == (100, 50, 50) and there.wire == 60
    assert there.awaited == 80 and here.awaited == 0
    text = summary(timeline)
    assert "straggler: the others waited 0.1 us for rank 1" in text and "clocks agree to 0.09 us" in text


def test_the_command_prints_a_summary_or_one_line(tmp_path):
    file = tmp_path / "out.json"
    file.write_text(to_json(make_timeline(1, MEASURED, [event("tile", 0, 2000)], lost=3)))
    result = CliRunner().invoke(app, ["trace", "summary", str(file)])
    assert result.exit_code == 0 and "3 records lost" in result.stdout
    written = json.loads(file.read_text())
    of_time = copy.deepcopy(written)
    next(line for line in of_time["traceEvents"] if line["ph"] == "X")["ts"] = math.inf
    written["otherData"]["weft"]["lost"] = [1]
    for damaged in ({"traceEvents": []}, written, of_time):
        file.write_text(json.dumps(damaged))
        result = CliRunner().invoke(app, ["trace", "summary", str(file)])
        assert result.exit_code == 2 and "is not a trace" in result.stderr, damaged
    result = CliRunner().invoke(app, ["trace", "summary", str(tmp_path / "none")])
    assert result.exit_code == 2 and "no such file" in result.stderr


# --- GPUs ------------------------------------------------------------------------------------------------------------


def test_the_offset_is_that_of_the_best_round_trips():
    began = 1_763_900_000_123_456_789 // 1000 * 1000
    first = [(began + 1000 * i, began + 1000 * i + (2400 if i % 10 == 0 else 9000)) for i in range(100)]
    second = [(began + 1000 * i + 1200 + 5000 + i % 3 if i % 10 == 0 else 0, 0) for i in range(100)]
    found = offset_of(first, second)
    assert found.offset == pytest.approx(5001, abs=1) and found.residual <= 1


def test_a_clock_that_drifts_is_aligned_between_two_measurements():
    began = 10**18 + 1
    before, after = (
        Offset(time=began + time, offset=offset, residual=0) for time, offset in ((1000, 100.4), (2000, 200.4))
    )
    assert [aligned(began + t, before, after) - began for t in (1000, 1500, 2000)] == [900, 1350, 1800]


def ring_with(*records):
    """Rings in which program 3 has written ``records``, each as the PTX of ptx.record packs it."""
    rings = torch.zeros((RINGS, RING_BYTES), dtype=torch.uint8)
    words = rings.view(torch.int64).view(RINGS, 1 + RECORDS, 4)
    words[3, 0, 0] = len(records)
    for number, one in enumerate(records):
        crc = one.kernel - ((one.kernel & 1 << 31) << 1)
        words[3, 1 + number % RECORDS] = torch.tensor(
            [one.end, one.line << 48 | one.kind << 44 | one.sm << 32 | one.duration, one.peer << 48 | one.address,
             crc << 32 | one.value]
        )  # fmt: skip
    return rings


def record(kind, **fields):
    known = {"program": 3, "end": 10**18, "duration": 700, "sm": 131, "line": 187, "address": 0x7F0000001010, "peer": 1}
    return Record(**known | {"value": 7, "kernel": zlib.crc32(b"kernel"), "kind": KINDS[kind]} | fields)


def test_records_are_read_as_they_are_written():
    written = [
        record("wait", kernel=2**32 - 1),
        record("put", value=2**32 - 1, peer=0x7FFF),
        record("tile", duration=0),
    ]
    assert records_of(ring_with(*written)) == (written, 0)
    assert records_of(ring_with(*[record("put")] * (RECORDS + 5)))[1] == 5


def test_a_record_becomes_an_event():
    def made(one):
        return event_of(
            one, 0, {zlib.crc32(b"kernel"): "kernel"}, lambda a: f"landed[{a & 15}]", lambda a: a - 0x7F0000001000
        )

    wait = made(record("wait", peer=0, value=2**32 - 1))
    assert (wait.kind, wait.name, wait.cause, wait.kernel) == ("wait", "wait for landed[0]", "landed", "kernel:187")
    assert (wait.track, wait.start, wait.end) == ("SM 131", 10**18 - 700, 10**18)
    assert wait.signal == Signal(place=(0, 16), value=-1)
    assert made(record("notify")).signal == Signal(place=(1, 16), value=7)
    add = made(record("add", kernel=5))
    assert (add.kind, add.signal.value, add.kernel) == ("notify", None, "kernel 00000005:187")
    put = made(record("put", value=4096))
    assert (put.name, put.nbytes, put.cause) == ("put to rank 1", 4096, "landed")
    assert put.signal == Signal(place=(1, 16), value=None)
    to_all = made(record("put", peer=0))
    assert (to_all.name, to_all.signal.place) == ("put to all others", (None, 16))
    words = made(record("words", peer=0))
    assert (words.kind, words.name, words.signal) == ("wait", "wait for landed[0]", Signal(place=(0, 16), value=None))
    assert made(record("tile", address=12 | 3 << 32)).name == "tile 12,3"


def test_ranks_that_share_a_gpu_need_no_ping_pong():
    assert (
        other_clocks(["a", "b", "c"]) == [1, 2]
        and other_clocks(["a", "b", "a", "b"]) == [1, 3]
        and other_clocks("aa") == []
    )
