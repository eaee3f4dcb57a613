"""moe_dispatch and moe_combine: a layer over ranks, the same bits from every algorithm, planted bugs, refused arguments."""

import re

import pytest
import torch

import weft
import weft.check
from tests.check.calls import combined, dispatched, routed
from tests.compiling import a_view, compiled_exchange, pairs_taken_apart, stack_bytes
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import mutated
from tests.ops.moe import changing
from tests.ops.moe.test_moe_ops import by_torch
from tests.ops.test_compile_layer_kernels import caps_of, check_compiles
from tests.sampled import sampled
from weft import ops
from weft.ops.moe import moe_dispatch
from weft.ops.moe.exchange import exchange_op, lamport, push
from weft.ops.moe.exchange.pipelined import DispatchPieces
from weft.ops.moe.moe_combine import MOE_COMBINE
from weft.ops.moe.moe_dispatch import MOE_DISPATCH
from weft.ops.moe.routing import Experts, Routing
from weft.plan.planned import machine
from weft.runtime.capabilities import Capabilities, launch_options
from weft.runtime.team.team import Team
from weft.transport import halves

EXPERTS, K, HIDDEN, FEATURES, MOST = 12, 3, 48, 48, 20


def weights(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (EXPERTS, HIDDEN), (EXPERTS, 2 * FEATURES, HIDDEN), (EXPERTS, HIDDEN, FEATURES)
    return [(torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype) for shape in shapes]


def layer(team, x, dispatch, combine, tp=1):
    """A mixture of experts whose tokens lie on their own ranks, its experts' features on tp ranks."""
    router, gate_up, down = weights(x.dtype)
    routing, experts = ops.route(x @ router.T, K), EXPERTS
    if tp > 1:
        experts = Experts.grouped(EXPERTS, team.rank, team.size // tp, tp)
        of_slice = slice(team.rank % tp * FEATURES // tp, (team.rank % tp + 1) * FEATURES // tp)
        gate_up = torch.cat([part[:, of_slice] for part in gate_up.chunk(2, dim=1)], dim=1)
        down = down[:, :, of_slice].contiguous()
    found = ops.moe_dispatch(x, routing, team, experts=experts, max_tokens=MOST, algorithm=dispatch)
    mine = slice(found.experts.first, found.experts.first + found.experts.count)
    schedule = ops.moe_schedule(found.routing.ids, found.experts, start=team.rank * MOST)
    h = ops.grouped_matmul_silu_mul(found.rows, gate_up[mine], schedule)
    y = ops.grouped_matmul(h, down[mine], schedule)
    return ops.moe_combine(y, found, len(x), team, algorithm=combine)


def tokens_of(rank, call, dtype):
    """Another number of tokens at every rank and call, often none."""
    count = (0, 20, 7, 13, 1, 0, 19)[(2 * rank + call) % 7]
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 * rank + call)).to(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.sweep)])
def test_a_layer_over_ranks_is_the_whole_one_in_every_call(world_size):
    def main(team):
        inputs = [tokens_of(team.rank, call, torch.float32) for call in range(5)]
        return [layer(team, x, "push", "push") for x in inputs]

    of_layer = [w.double() for w in weights(torch.float32)]
    for rank, results in enumerate(weft.simulate(main, world_size, seed=world_size, slow={0: 20})):
        for call, found in enumerate(results):
            expected = by_torch(tokens_of(rank, call, torch.float64), *of_layer, K)
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_plans_of_few_tokens():
    """The least predicted times: one kernel of words, a push where few of many rows are needed, copy engines for the most."""
    caps = Capabilities(device_name="GPU", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,) * 4)

    def names(tokens, choices, world_size):
        here = machine(caps, world_size)
        calls = ((op, op.call_of((tokens, choices, 2048), torch.bfloat16, here)) for op in (MOE_DISPATCH, MOE_COMBINE))
        return [op.plan(call, here).name for op, call in calls]

    assert names(1, 8, 2) == names(128, 8, 2) == ["lamport", "lamport"]
    assert names(64, 8, 4) == names(64, 1, 2) == ["lamport", "lamport"]
    assert names(600, 8, 2) == ["lamport", "lamport"] and names(4096, 1, 2) == ["push", "push"]
    assert names(600, 8, 4) == names(2048, 8, 2) == ["lamport", "lamport"]
    assert names(8192, 8, 2) == ["push", "lamport"]
    assert names(20000, 8, 2) == ["pipelined", "lamport"]


def test_words_of_many_tokens_are_larger():
    caps = Capabilities(device_name="GPU", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,) * 2)
    two = machine(caps, 2)

    def design(op, tokens, **fields):
        return op.plan(op.call_of((tokens, 8, 2048), torch.bfloat16, two)._replace(**fields), two).design

    gathered, sums = lamport.DispatchWords, lamport.CombineWords
    assert [design(MOE_DISPATCH, tokens, design="lamport") for tokens in (128, 2048, 4096)] == [
        gathered(),
        gathered(row_bytes=1024, num_warps=2),
        gathered(row_bytes=4096, num_warps=8),
    ]
    assert [design(MOE_DISPATCH, tokens, fp8=True) for tokens in (512, 4096)] == [
        gathered(row_bytes=1024, num_warps=2, rounds=True),
        gathered(row_bytes=4096, num_warps=8, rounds=True),
    ]
    assert isinstance(design(MOE_DISPATCH, 20000, fp8=True), DispatchPieces)
    assert [design(MOE_COMBINE, tokens) for tokens in (128, 4096, 12000)] == [
        sums(),
        sums(row_bytes=512),
        sums(row_bytes=1024),
    ]


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.sweep), 3])
def test_every_algorithm_gives_the_same_bits(world_size):
    def main(team):
        x = tokens_of(team.rank, 1, torch.bfloat16)
        pairs = ("push", "push"), ("push", "sum_then_scatter"), ("pipelined", "pipelined"), ("lamport", "lamport")
        return [layer(team, x, dispatch, combine) for dispatch, combine in pairs]

    for first, *others in weft.simulate(main, world_size):
        for other in others:
            assert_identical(other, first)


@pytest.mark.parametrize(
    ("world_size", "tp"), [(4, 2), *(pytest.param(*one, marks=pytest.mark.sweep) for one in ((2, 2), (8, 2), (8, 4)))]
)
def test_experts_shared_by_ranks_give_the_same_bits_by_every_algorithm_and_schedule(world_size, tp):
    """In groups a rank's sum is of slices of features, so only as near to the whole layer's as fp32 lets it be."""

    def main(team):
        x = tokens_of(team.rank, 1, torch.float32)
        pairs = ("push", "push"), ("pipelined", "pipelined"), ("lamport", "lamport")
        return [layer(team, x, dispatch, combine, tp) for dispatch, combine in pairs]

    of_layer, runs = [w.double() for w in weights(torch.float32)], ({}, {"seed": 1, "slow": {0: 20}})
    by_run = [weft.simulate(main, world_size, **options) for options in runs[: 1 if world_size == 2 else 2]]
    for rank, (first, *others) in enumerate(by_run[0]):
        expected = by_torch(tokens_of(rank, 1, torch.float64), *of_layer, K)
        torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-5)
        for other in (*others, *by_run[-1][rank]):
            assert_identical(other, first)


@pytest.mark.parametrize("way", sampled(zip(changing.WAYS), lambda way: way == "overlapped"))
def test_tokens_and_routing_may_change_from_call_to_call(way):
    """A few calls; the GPU suite's group "experts" makes 2,000 and lets torch raise where the host waits."""

    def main(team):
        changing.check(team, changing.run(team, way, 2, 3, 16, 8, 6), 16, 8, 6)

    weft.simulate(main, 2)


# Of the expression that says whose expert it is, in the kernels of both ways.
OWNERS = {
    "owner off by one": (push, exchange_op, "rank // SIZES.tp)", "rank // SIZES.tp + 1)", "chosen_of"),
    "whole experts": (push, exchange_op, "rank // SIZES.tp)", "rank)", "chosen_of"),
}


@pytest.mark.parametrize("name", OWNERS)
def test_a_wrong_owner_is_seen(name, tmp_path, monkeypatch):
    user, module, old, new, changed = OWNERS[name]
    mutant = mutated(module, old, new, f"owner_mutant_{len(name)}", tmp_path)
    monkeypatch.setattr(user, changed, getattr(mutant, changed))

    def main(team):
        return layer(team, tokens_of(team.rank, 1, torch.float32), "push", "push", 2)

    of_layer, wrong = [w.double() for w in weights(torch.float32)], []
    for rank, found in enumerate(weft.simulate(main, 4)):
        expected = by_torch(tokens_of(rank, 1, torch.float64), *of_layer, K)
        wrong.append(not torch.allclose(found.double(), expected, rtol=1e-3, atol=1e-3))
    assert any(wrong)


# --- planted bugs -------------------------------------------------------------------------------------------------------

FLAG = "                wl.chunk_notify(call, peer, chunk, team)\n"
PUT = "            if step < world:\n                wl.end_put(began, mail.rows, 0, peer, team)\n"
SEND = "            send_chunk(x, ids, weights, T, chunk, peer, mail, SIZES, team)\n"
ENTERED = "        await_entered(half.entered, (me + step) % world, last, team)\n"
SUMS = "            for begin in range(0, SIZES.width, SIZES.block):\n                column"
SENT = "            wl.chunk_notify(call, owner, chunk, team)\n"
ARRIVED = "        await_chunk(call, chunk, team)\n"
# Where the kernel of each is.
SENDERS = {dispatched: (push, "moe_dispatch_kernel"), combined: (push, "moe_combine_kernel")}
# Source that changes, what to, the calls that show it, the finding.
BUGS = {
    "flag before rows": (push, SEND + PUT + FLAG,
                         "            if step < world:\n" + FLAG + SEND, dispatched, "race"),
    "a rank without tokens sends no flags": (push, PUT, PUT.replace("step < world", "(step < world) & (T > 0)"),
                                             dispatched, "deadlock"),
    "rows not awaited": (push, ARRIVED, "        pass\n", dispatched, "race"),
    "a half written again too soon": (halves, ENTERED, ENTERED.replace("last", "0"), dispatched, "race"),
    "combined before the last arrival": (push, ARRIVED, "        pass\n", combined, "race"),
    "flag before the sums": (push, SUMS, SENT + SUMS, combined, "race"),
    "sums written again too soon": (halves, ENTERED, ENTERED.replace("last", "0"), combined, "race"),
}  # fmt: skip


def calls_of(run):
    def main(team):
        generator = torch.Generator().manual_seed(team.rank)
        return [run(team, lambda *shape: torch.randn(shape, generator=generator).bfloat16()) for _ in range(3)]

    return main


@pytest.fixture
def one_half(monkeypatch):
    """The same half in every call, as a CUDA graph with one call uses it."""
    monkeypatch.setattr(halves.Halves, "next", lambda self: self.halves[0])


# Bugs that the zoo plants in kernels of its own.
IN_ZOO = ("flag before rows", "a rank without tokens sends no flags", "a half written again too soon",
          "combined before the last arrival")  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.sweep) if n in IN_ZOO else n for n in BUGS])
def test_the_check_finds_a_planted_bug(name, tmp_path, monkeypatch, request):
    if "again" in name:
        request.getfixturevalue("one_half")
    module, old, new, run, kind = BUGS[name]
    mutant = mutated(module, old, new, f"exchange_mutant_{len(name)}", tmp_path)
    sender, kernel = SENDERS[run]
    changed = "begin_half" if module is halves else kernel
    monkeypatch.setattr(sender, changed, getattr(mutant, changed))
    report = weft.check.check(calls_of(run), 2, schedules=3)
    kinds = {found.finding.kind for found in report.wrong}
    assert kinds and all(kind in found for found in kinds), report


@pytest.mark.parametrize("run", [dispatched, combined])
def test_one_half_is_enough(run, one_half):
    report = weft.check.check(calls_of(run), 2, schedules=3)
    assert report.ok, report


def test_calls_of_different_designs_share_no_flags(one_half, monkeypatch):
    """With fewer programs a call would leave behind flags that the next one of more programs trusts."""
    monkeypatch.setattr(Team, "max_programs", lambda self, num_warps=4, registers=255: 8 // num_warps)
    many, few = (exchange_op.PushRows(chunk=2, block=64, num_warps=warps) for warps in (2, 8))

    def main(team):
        results = []
        for design in (many, few, few, many):
            ids = torch.zeros(8, 1, dtype=torch.int32) + team.rank
            x, op = torch.ones(8, 48).bfloat16(), moe_dispatch.MOE_DISPATCH
            given = exchange_op.DispatchArguments(
                x, Routing(ids, x[:, :1].contiguous()), 2, 8, fp8=False, kept=False, team=team.name, algorithm="auto"
            )
            rows, ids, _, _ = op.run(design, team, given)
            schedule = ops.moe_schedule(ids, Experts.whole(2, team.rank, 2))
            results.append(
                ops.grouped_matmul(rows, torch.ones(1, 16, 48).bfloat16(), schedule, gather=True)[:8].clone()
            )
        return results

    report = weft.check.check(main, 2, schedules=3)
    assert report.ok, report


def test_rows_of_the_call_before_are_gone():
    """They hold until this rank's next call, as the contract says, and the check finds a read behind it."""

    def dispatch(team):
        return routed(team, lambda *shape: torch.ones(shape).bfloat16(), "push")[0]

    def main(team, late):
        found = dispatch(team)
        if late:
            dispatch(team)
        counts = ops.moe_schedule(found.routing.ids, found.experts).counts
        dispatch(team), dispatch(team)
        return counts

    assert weft.check.check(main, 2, schedules=2, args=(False,)).ok
    report = weft.check.check(main, 2, schedules=2, args=(True,))
    assert {found.finding.kind for found in report.wrong} == {"race"}, report


# --- refused arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("moe_dispatch: x has shape (3, 8); it must be (2, H)", {"ids": torch.zeros(2, 2).int()}),
        ("moe_dispatch: ids.dtype=torch.int64 is not one of int32", {"ids": torch.zeros(3, 2).long()}),
        ("moe_dispatch: weights.dtype=torch.float32 is not one of bfloat16", {"weights": torch.zeros(3, 2)}),
        ("moe_dispatch: max_tokens=2 is not an integer of at least 3", {"max_tokens": 2}),
        ("total=9 experts cannot be shared by world_size=2", {"experts": 9}),
        ("moe_dispatch: algorithm='pull' is not one of", {"algorithm": "pull"}),
        ("Experts(total=8, first=0, count=3) is no equal share of rank=", {"experts": Experts(8, 0, 3)}),
        ("Experts(total=8, first=2, count=4) is no equal share of rank=", {"experts": Experts(8, 2, 4)}),
        ("moe_dispatch: x has shape (3, 0); rows have at least one element", {"x": torch.zeros(3, 0).bfloat16()}),
        ("moe_dispatch: ids has shape (3, 17); a token has 1 to 16 choices", {"ids": torch.zeros(3, 17).int()}),
    ],
)
def test_wrong_arguments_of_dispatch_are_refused(message, fields):
    def main(team):
        x, ids = fields.get("x", torch.zeros(3, 8).bfloat16()), fields.get("ids", torch.zeros(3, 2).int())
        routing = Routing(ids, fields.get("weights", torch.zeros(ids.shape).bfloat16()))
        named = {"experts": 8, "max_tokens": 4, **{k: v for k, v in fields.items() if k not in ("x", "ids", "weights")}}
        with pytest.raises(ValueError) as refused:
            ops.moe_dispatch(x, routing, team, **named)
        assert message in str(refused.value) and "\n" not in str(refused.value)

    weft.simulate(main, 2)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("moe_combine: y has shape (15, 4); it must be (16, H)", {"y": torch.zeros(15, 4)}),
        ("moe_combine: tokens=5 is not an integer in 0 .. 4", {"tokens": 5}),
        ("moe_combine: dispatched=None is not a Dispatched", {"dispatched": None}),
        ("moe_combine: algorithm='sum' is not one of", {"algorithm": "sum"}),
    ],
)
def test_wrong_arguments_of_combine_are_refused(message, fields):
    def main(team):
        routing = Routing(torch.zeros(8, 2).int(), torch.zeros(8, 2))
        given = {
            "y": torch.zeros(16, 4),
            "dispatched": ops.Dispatched(None, routing, Experts.whole(8, team.rank, 2)),
            "tokens": 4,
            **fields,
        }
        with pytest.raises(ValueError) as refused:
            ops.moe_combine(given.pop("y"), given.pop("dispatched"), given.pop("tokens"), team, **given)
        assert message in str(refused.value) and "\n" not in str(refused.value)

    weft.simulate(main, 2)


# --- compiled -----------------------------------------------------------------------------------------------------------

INTS, SHORTS, FLOATS = (torch.zeros(16, dtype=dtype) for dtype in (torch.int32, torch.int16, torch.bfloat16))
TILE = {"ROWS": 4, "num_warps": 1}


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("row_bytes", "num_warps"),
    sampled(
        [(512, 1), (1024, 2), (2048, 4), (4096, 8), (1024, 1), (4096, 4)], lambda row_bytes, num_warps: row_bytes > 512
    ),
)
def test_the_kernel_that_rounds_and_sends_rows_compiles(arch, row_bytes, num_warps, tmp_path):
    design = lamport.DispatchWords(row_bytes=row_bytes, num_warps=num_warps, rounds=True)
    options = {"ROWS": 2, "num_warps": design.num_warps, **launch_options(caps_of(arch))}
    options |= {"BLOCK": row_bytes // 4, "TRANSPORT": "keyed", **({"maxnreg": 128} if arch == "sm_90" else {})}
    own, of_all = lamport.Unrounded(FLOATS, INTS, SHORTS), lamport.Tokens(INTS, INTS, SHORTS, INTS)
    arguments, blocks = (own, of_all, 1 << 18, INTS, INTS, a_view()), lamport.Blocks(128 * 56, 56, 128 * 8, 8)
    kernel = compiled_exchange(lamport.GATHER_FP8, *arguments, arch=arch, tokens=(100, 128), sizes=blocks, **options)
    check_compiles(kernel, arch)
    if arch == "sm_90":
        assert stack_bytes(kernel, tmp_path) == 0
        # Single bytes taken out of words, of which ptxas 12.8 lost some.
        assert not re.search(r"prmt\.b32 .*, 0, 0x777", kernel.asm["ptx"]) and not pairs_taken_apart(kernel)


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize(("ranks", "row_bytes"), sampled([(4, 256), (2, 512)], lambda ranks, row_bytes: ranks == 4))
def test_kernels_of_words_compile(ranks, row_bytes, arch, tmp_path):
    options = {**TILE, "ROWS": ranks, **launch_options(caps_of(arch))}
    lengths, tokens = lamport.Lengths(1792, 8, 56), lamport.Tokens(INTS, INTS, SHORTS, INTS)
    options["tokens"] = 100, 128
    gathering = compiled_exchange(
        lamport.GATHER, tokens, tokens, 1 << 18, INTS, INTS, a_view(), arch=arch, sizes=lengths, BLOCK=128,
        TRANSPORT="keyed", **options,
    )  # fmt: skip
    options |= {"sizes": lamport.PairLengths(7168, 8, 64), "BLOCK": row_bytes // 2, "TRANSPORT": "lamport"}
    combining, returning = (
        compiled_exchange(
            lamport.COMBINE, lamport.Pairs(FLOATS, INTS, weights), FLOATS, 1 << 18, FLOATS, INTS, a_view(), arch=arch,
            **options,
        )
        for weights in (FLOATS, None)
    )  # fmt: skip
    for kernel in (gathering, combining, returning):
        check_compiles(kernel, arch)
        if arch == "sm_90":
            assert stack_bytes(kernel, tmp_path) == 0
