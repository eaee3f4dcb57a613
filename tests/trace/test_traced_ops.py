"""Traces of ops on virtual ranks: each has its puts, tiles and waits, and an arrow to every wait."""

from collections import Counter

import pytest

import weft
from tests.ops.checking import run_cases
from tests.sampled import sampled
from weft.ops.op import find_op, registered
from weft.trace.chrome import read
from weft.trace.summary import summary

# Kinds of events that a design's trace has, besides those of others.
KINDS = {
    ("all_reduce", "one_shot"): {"put", "wait"},
    ("all_reduce_rms_norm", "two_shot"): {"put", "wait"},
    ("moe_dispatch", "push"): {"put", "notify", "wait"},
    ("moe_dispatch", "lamport"): {"put", "wait"},
    ("moe_combine", "push"): {"put", "notify", "wait", "tile"},
    ("moe_combine", "lamport"): {"put", "wait"},
    ("moe_dispatch", "pipelined"): {"copy", "notify", "wait"},
    ("moe_combine", "pipelined"): {"copy", "notify", "wait"},
    ("all_gather_grouped_matmul_silu_mul", "fused"): {"copy", "notify", "wait", "tile"},
    ("grouped_matmul_reduce_scatter", "slabs"): {"copy", "notify", "wait", "tile"},
    ("sharded_decode_attention", "one_kernel"): {"put", "wait", "tile"},
    ("sharded_decode_attention", "two_kernels"): {
        "put",
        "tile",
    },  # the words are there before the kernel that merges them
    ("gathered_prefill_attention", "gathered"): {"wait", "tile"},
}


def cases_of(op, world_size):
    """The first case of each design that callers name."""
    found = {}
    for case in op.cases():
        if case.world_size == world_size and isinstance(case.design, str):
            found.setdefault(case.design, case)
    return found


def traced(case, file):
    def main(team):
        run_cases(team, [case], 1)
        with weft.trace(file, team):
            run_cases(team, [case], 1)

    weft.simulate(main, case.world_size, seed=1)
    return read(file)


@pytest.mark.parametrize(
    ("name", "design"), sampled(KINDS, lambda name, design: design in ("one_shot", "one_kernel", "slabs"))
)
def test_a_trace_of_an_op_has_what_its_kernels_did(name, design, tmp_path):
    timeline = traced(cases_of(find_op(name), 2)[design], tmp_path / "out.json")
    assert KINDS[name, design] <= {event.kind for event in timeline.events}
    check_arrows(timeline)
    waits = Counter(event.cause for event in timeline.events if event.kind == "wait")
    listed = {}
    for line in summary(timeline).partition("of rank")[2].partition("\n\n")[0].splitlines()[1:]:
        cause, _, count, _ = line.rsplit(maxsplit=3)
        listed[cause.strip()] = listed.get(cause.strip(), 0) + int(count)
    assert listed == waits


def check_arrows(timeline):
    """Every wait has an arrow, from another rank's put or notify that ended before it did; of data with the same name."""
    waits = [number for number, event in enumerate(timeline.events) if event.kind == "wait"]
    assert sorted(arrow.wait for arrow in timeline.arrows) == waits
    for arrow in timeline.arrows:
        sent, wait = timeline.events[arrow.notify], timeline.events[arrow.wait]
        assert sent.end <= wait.end and sent.rank != wait.rank
        assert sent.kind in ("put", "notify") and (sent.kind == "notify" or sent.nbytes > 0)


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("op", [op for op in registered() if op.collective], ids=lambda op: op.name)
def test_every_wait_of_every_design_has_an_arrow(op, world_size, tmp_path):
    for case in cases_of(op, world_size).values():
        check_arrows(traced(case, tmp_path / "out.json"))
