"""The push transport: stages, clearings, and how a stage lies in the workspace."""

import functools

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.check
from tests.sampled import sampled
from weft import ops
from weft.ops.collectives import all_reduce
from weft.ops.collectives.all_gather import ALL_GATHER
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.collectives.all_to_all import ALL_TO_ALL
from weft.ops.collectives.collective import ONE_HOP, TWO_HOPS, of_world
from weft.ops.collectives.reduce_scatter import REDUCE_SCATTER
from weft.plan.planned import machine_of
from weft.transport import exchange, push
from weft.transport.plans import PushPlan

# By design of all-reduce or name of the op: the op, and the module that asks if clearings are in order.
MODULES = {
    "all_gather": (ALL_GATHER, exchange),
    "reduce_scatter": (REDUCE_SCATTER, exchange),
    "all_to_all": (ALL_TO_ALL, exchange),
    "one_shot": (ALL_REDUCE, exchange),
    "two_shot": (ALL_REDUCE, all_reduce),
}


@pytest.mark.parametrize(
    "stages, algorithm, clean",
    [
        (6, "two_shot", True), (5, "two_shot", False), (5, "one_shot", True), (4, "one_shot", False),
        (5, "gather", True), (4, "gather", False),
    ],
)  # fmt: skip
def test_the_orders_of_sends_need_as_many_stages_as_the_proof_says(monkeypatch, stages, algorithm, clean):
    """weft.transport.push: a peer one tile ahead reuses a stage that is not cleared yet, with one stage less."""

    def main(team):
        generator = torch.Generator().manual_seed(team.rank)
        x = torch.randn(256 * 8, generator=generator).bfloat16()
        if algorithm == "gather":
            return [ops.all_gather(x, team) for _ in range(3)]
        return [ops.all_reduce(x, team, algorithm) for _ in range(3)]

    monkeypatch.setattr(push, "STAGES", tl.constexpr(stages))
    report = weft.check.check(main, 2, schedules=4, sms=1, heap_bytes=None)
    assert report.ok is clean
    assert clean or "race" in {f.kind for found in report.findings for f in (found.finding, *found.also)}


@triton.jit
def never(slot, exchanges, WIDTH: tl.constexpr):
    return exchanges < 0


@pytest.mark.parametrize(
    ("row_bytes", "most", "name"),
    sampled(
        ((*stages, name) for stages in ((512, 4), (4096, 16)) for name in MODULES),
        lambda row_bytes, most, name: (name, row_bytes) in (("one_shot", 512), ("all_to_all", 512), ("two_shot", 4096)),
    ),
)
def test_a_launch_of_few_tiles_need_not_see_its_clearings(monkeypatch, name, row_bytes, most):
    """weft.transport.push: up to three exchanges less than there are stages. With one more, `weft check` finds a clearing that
    comes too late; what the kernels do of their own accord, it finds clean."""
    op, module = MODULES[name]
    each = 2 if name == "two_shot" else 1
    plan = PushPlan(
        transport="keyed" if op.moves_bits else "lamport", row_bytes=row_bytes, num_warps=1, programs_per_sm=1
    )
    design = op.designs.get(name, op.designs.get("push"))(push=plan)

    def main(team, sizes):
        generator = torch.Generator().manual_seed(team.rank)
        for tiles in sizes:
            parts = tiles * row_bytes // 2 * (1 if name in ("all_gather", "one_shot") else team.size)
            op.run(design, team, torch.randn(parts, generator=generator).bfloat16())

    def findings(*sizes):
        report = weft.check.check(functools.partial(main, sizes=sizes), 2, schedules=3, sms=1, heap_bytes=None)
        return {finding.kind for found in report.findings for finding in (found.finding, *found.also)}

    few = most // each
    assert not findings(few + 1, 1, few, few + 2, few + 1)
    monkeypatch.setattr(module, "clears_in_order", never)
    assert not findings(few, 1, few, few, 1, 2, few)
    assert "overtaken" in findings(few + 1, few + 1, few + 1)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 9])
def test_rows_of_all_plans_begin_on_lines(world_size):
    """A warp's stores to a peer go in whole packets: a stage is whole lines, keys and all."""
    line = push.LINE_BYTES.value
    keys = push.key_bytes("keyed", world_size, 512)
    assert keys % line == 0 and keys >= world_size * push.KEY_BYTES.value
    assert push.key_bytes("lamport", world_size, 512) == 0
    for table in (ONE_HOP, TWO_HOPS):
        assert all(row_bytes % line == 0 for _, row_bytes, _, _ in of_world(table, world_size))


def test_a_stage_holds_its_rows_and_then_its_keys():
    def main(team):
        x = torch.arange(100, dtype=torch.int32) + 1000 * (team.rank + 1)
        ops.all_gather(x, team)
        here = machine_of(team)
        plan = ALL_GATHER.plan(ALL_GATHER.call_of((x.shape,), x.dtype, here), here).design.push
        slots = push.slots_of(team, plan, 4)
        stage = 3 * plan.row_bytes + push.LINE_BYTES.value
        assert slots.buffer.numel() == slots.programs * push.stages_of(plan.row_bytes) * stage
        assert slots.buffer.data_ptr() % push.LINE_BYTES.value == 0
        first = slots.buffer.view(torch.int32)[stage // 4 : 2 * stage // 4]  # epoch 1 of the first program
        rows, keys = first[: 3 * plan.row_bytes // 4].view(3, -1), first[3 * plan.row_bytes // 4 :].view(-1, 4)
        for peer in range(3):
            if peer != team.rank:
                assert torch.equal(rows[peer, :100] ^ keys[peer, 0], torch.arange(100) + 1000 * (peer + 1))

    weft.simulate(main, 3, seed=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transport": "flags"}, "transport='flags' is not one of 'lamport', 'keyed'"),
        ({"row_bytes": 40}, "row_bytes=40 is not a positive multiple of 16"),
        ({"row_bytes": 0}, "row_bytes=0 is not a positive multiple of 16"),
        ({"num_warps": 3}, "num_warps=3 is not a power of two"),
        ({"programs_per_sm": 0}, "programs_per_sm=0 is not positive"),
    ],
)
def test_plans_that_no_kernel_has_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PushPlan(**{"transport": "lamport", "row_bytes": 64, "num_warps": 1} | fields)
