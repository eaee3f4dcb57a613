"""moe_dispatch and moe_combine by copy engines: bits of several pieces, plans, planted bugs, bad designs, compiled kernels."""

import functools
import itertools

import pytest
import torch
import triton.language as tl

import weft
import weft.check
from tests.check.calls import combined_in_pieces, dispatched, dispatched_fp8
from tests.compiling import a_view, compiled, stack_bytes
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import mutated
from tests.ops.moe.test_moe_exchange import calls_of
from tests.ops.test_compile_layer_kernels import caps_of, check_compiles
from tests.sampled import sampled
from weft import ops
from weft.kernels.fp8 import E4M3
from weft.ops.moe import moe_combine, moe_dispatch
from weft.ops.moe.all_gather_grouped_matmul_silu_mul import AG_MOE
from weft.ops.moe.exchange import pipelined
from weft.ops.moe.exchange.exchange_op import PushRows, Sizes
from weft.ops.moe.exchange.pipelined import CombinePieces, DispatchPieces, piece_ends
from weft.ops.moe.exchange.push import Mail
from weft.ops.moe.grouped_matmul_reduce_scatter import MOE_RS
from weft.ops.moe.moe_combine import MOE_COMBINE, CombineArguments
from weft.ops.moe.moe_dispatch import MOE_DISPATCH
from weft.ops.moe.routing import Experts, Routing
from weft.plan.planned import UNLIMITED, machine
from weft.runtime.capabilities import Capabilities, launch_options
from weft.runtime.team.channel import ChannelView
from weft.transport import copy_channel, halves

MOST, K, HIDDEN = 70, 3, 40
TOKENS = (70, 33, 0, 8)


def test_pieces_are_whole_and_none_is_empty():
    assert piece_ends((1, 3, 3, 1), 4096) == (512, 2048, 3584, 4096)
    assert piece_ends((1, 3, 3, 1), 70) == (16, 40, 64, 70)
    assert piece_ends((1, 3, 3, 1), 20) == (8, 16, 20)
    assert [piece_ends((1, 3), tokens) for tokens in (0, 1, 8, 9)] == [(), (1,), (8,), (8, 9)]


def drawn(team, tp=1):
    """This rank's y, with NaN where another rank's expert is, and routing of all; a third of the tokens chose no expert."""
    generator, experts = torch.Generator().manual_seed(0), 3 * team.size
    ids = torch.full((team.size, MOST, K), -1, dtype=torch.int32)
    for rank in range(team.size):
        count = TOKENS[rank]
        chosen = torch.rand((count, experts), generator=generator).topk(K).indices.int()
        ids[rank, :count] = chosen.masked_fill(torch.arange(count)[:, None] % 3 == 1, -1)
    ids = ids.flatten(0, 1)
    weights = torch.randn(ids.shape, generator=generator).bfloat16()
    mine = Experts.grouped(experts, team.rank, team.size // tp, tp).chosen(ids)
    own = torch.Generator().manual_seed(1 + team.rank)
    y = torch.randn((*ids.shape, HIDDEN), generator=own).bfloat16().masked_fill(~mine[..., None], torch.nan)
    rows = torch.randn((len(ids), HIDDEN), generator=own).bfloat16().masked_fill(~mine.any(-1)[:, None], torch.nan)
    return y.flatten(0, 1), rows, Routing(ids, weights), experts


@pytest.mark.parametrize(("world_size", "tp"), sampled(((2, 1), (3, 1), (4, 2)), lambda w, tp: w == 3))
def test_sums_in_pieces_have_the_bits_of_those_in_one_kernel(world_size, tp):
    """Also without weights, and where a tile has tokens of two pieces."""

    def main(team):
        y, rows, (ids, weights), experts = drawn(team, tp)
        found = []
        for design in (
            PushRows(), CombinePieces(), CombinePieces(pieces=(1, 1, 1), per_sm=1), CombinePieces(chunk=16, block=32, per_sm=1),
        ):  # fmt: skip
            given = CombineArguments(y, ids, weights, experts, TOKENS[team.rank], team.name, "auto", tp)
            unweighted = given._replace(y=rows, weights=None)
            found.append(tuple(MOE_COMBINE.run(design, team, one) for one in (given, unweighted)))
        return found

    for first, *others in weft.simulate(main, world_size, seed=1):
        for other in others:
            assert_identical(other[0], first[0])
            assert_identical(other[1], first[1])


def test_plans_of_many_tokens():
    """The least predicted time: words for few tokens, copy engines where nearly all rows are needed and the heap has room."""
    caps = Capabilities(device_name="GPU", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,) * 4)

    def names(tokens, choices, world_size, heap=UNLIMITED):
        here = machine(caps, world_size, heap_bytes=heap)
        calls = ((op, op.call_of((tokens, choices, 7168), torch.bfloat16, here)) for op in (MOE_DISPATCH, MOE_COMBINE))
        return [op.plan(call, here).name for op, call in calls]

    for world_size in (2, 4):
        assert names(256, 8, world_size) == names(512, 8, world_size) == ["lamport"] * 2
        assert names(4096, 1, world_size) == ["push"] * 2
    assert names(1024, 8, 2) == ["lamport"] * 2
    assert names(2048, 8, 2) == ["push", "lamport"]
    assert names(4096, 8, 2, 2 << 30) == names(8192, 8, 2) == ["pipelined", "lamport"]
    assert names(4096, 8, 4, 2 << 30) == names(4096, 8, 4, 1 << 30) == ["push", "lamport"]
    # More than 256 MiB in all.
    assert names(5000, 8, 4, 4 << 30) == ["push", "pipelined"]
    assert names(5000, 8, 4, 1 << 30)[1] == "sum_then_scatter"  # no room for copies
    assert names(8192, 8, 4, 2 << 30)[0] == "push"
    assert names(16384, 8, 4, 2 << 30) == ["lamport", "sum_then_scatter"]  # nor for rows that are pushed
    four = machine(caps, 4, heap_bytes=2 << 30)
    for tokens, name in ((4096, "lamport"), (5000, "push"), (16384, "sum_then_scatter")):
        call = MOE_COMBINE.call_of((tokens, 8, 7168), torch.bfloat16, four)
        assert MOE_COMBINE.plan(call._replace(weighted=False), four).name == name
    one = machine(caps, 1)
    assert MOE_COMBINE.plan(MOE_COMBINE.call_of((4096, 8, 7168), torch.bfloat16, one), one).name == "push"


def test_overlapped_designs_leave_room_in_the_heap():
    caps = Capabilities(device_name="GPU", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,) * 4)
    for op, overlapped, tp in ((AG_MOE, "fused", 1), (MOE_RS, "slabs", 4)):
        for tokens, heap, name in (
            (4096, UNLIMITED, overlapped),
            (4096, 2 << 30, overlapped),
            (16384, 2 << 30, "sequential"),
        ):
            here = machine(caps, 4, heap_bytes=heap)
            call = op.call_of((tokens, 8, 128, *op.gemm_sizes(7168, 2048)), torch.bfloat16, here)
            assert op.plan(call._replace(held=call.held * tp), here).name == name


def test_a_call_takes_the_next_half_of_the_receive_buffers():
    """What a call has received holds during the next one, by which it is no longer asked for; then it is written again."""

    def main(team):
        x, ids = torch.ones(3, 16), torch.zeros(3, 1, dtype=torch.int32) + team.rank
        found = []
        for _ in range(3):
            rows = ops.moe_dispatch(
                x, Routing(ids, torch.ones(3, 1)), team, experts=2, max_tokens=3, algorithm="pipelined"
            ).rows
            found.append(rows.data_ptr())
        assert found[0] == found[2] != found[1]

    weft.simulate(main, 2)


# --- planted bugs -------------------------------------------------------------------------------------------------------

COMBINE, DISPATCH = (moe_combine, "combine_pieces"), (moe_dispatch, "dispatch_pieces")
FP8 = functools.partial(dispatched_fp8, algorithm="pipelined", most=20)
FORK = "            team.copy_engine.fork()\n            channel"
FORKED = "        team.copy_engine.fork()\n"
PLACE = "        launch(grid, x, ids, weights, begin, T, mail, team.view)\n"
# Source that changes, what to, the function that a mutant replaces where, the calls that show it, the finding.
BUGS = {
    "a piece sent before its sums": (
        pipelined, FORK, FORK.replace("team", "number or team", 1), COMBINE, combined_in_pieces, "race"),
    "the first piece awaited alone": (
        pipelined, "% world, piece, team)", "% world, 0, team)", COMBINE, combined_in_pieces, "race"),
    "sums of the piece before written over": (
        pipelined, "sums[(step - 1) * most + begin : (step - 1) * most + end]", "sums[: end - begin]", COMBINE,
        combined_in_pieces, "race"),
    "the engine forked before the kernel": (
        pipelined, PLACE + FORKED, FORKED + PLACE, DISPATCH, FP8, "race"),
    "rows not awaited": (
        pipelined, "        copy_channel.await_chunk(", "        (lambda *given: None)(", DISPATCH, FP8, "race"),
    "no flag for a later peer": (
        pipelined, "    for peer in peers:\n", "    for peer in peers[:1]:\n", DISPATCH,
        functools.partial(dispatched, algorithm="pipelined"), "deadlock"),
}  # fmt: skip

# Bugs that the zoo plants in kernels of its own.
IN_ZOO = ("a piece sent before its sums", "the first piece awaited alone", "sums of the piece before written over",
          "the engine forked before the kernel")  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.sweep) if n in IN_ZOO else n for n in BUGS])
def test_the_check_finds_a_planted_bug(name, tmp_path, monkeypatch):
    module, old, new, (user, changed), run, kind = BUGS[name]
    mutant = mutated(module, old, new, f"pieces_mutant_{len(name)}", tmp_path)
    monkeypatch.setattr(user, changed, getattr(mutant, changed))
    report = weft.check.check(calls_of(run), 3 if kind == "deadlock" else 2, schedules=3)
    kinds = {found.finding.kind for found in report.wrong}
    assert kinds and all(kind in found for found in kinds), report


@pytest.fixture
def one_half(monkeypatch):
    """The same half in every call, as a CUDA graph with one call uses it."""
    monkeypatch.setattr(halves.Halves, "next", lambda self: self.halves[0])


@pytest.mark.parametrize(
    ("run", "waits"),
    sampled(itertools.product((FP8, combined_in_pieces), (True, False)), lambda run, waits: (run is FP8) is waits),
)
def test_one_half_is_written_again_only_after_it_was_read(run, waits, one_half, tmp_path, monkeypatch):
    """By the wait of begin_kernel: without it the check finds a race."""
    if not waits:
        awaits = "await_entered(half.entered, peer, last, team)"
        mutant = mutated(halves, awaits, awaits.replace("last", "0"), "begin_mutant", tmp_path)
        monkeypatch.setattr(copy_channel, "begin_kernel", mutant.begin_kernel)
    report = weft.check.check(calls_of(run), 2, schedules=3)
    assert report.ok if waits else {found.finding.kind for found in report.wrong} == {"race"}, report


# --- refused designs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("pieces=() are not 1 to 8 relative sizes of at least 1", lambda: CombinePieces(pieces=())),
        ("pieces=(1, 0) are not 1 to 8 relative sizes", lambda: DispatchPieces(pieces=(1, 0))),
        ("pieces=(1, 1, 1, 1, 1, 1, 1, 1, 1) are not 1 to 8", lambda: CombinePieces(pieces=(1,) * 9)),
        ("chunk=3 is not a power of two", lambda: DispatchPieces(chunk=3)),
        ("per_sm=0 is not positive; pass 1 or more", lambda: CombinePieces(per_sm=0)),
        ("block=64 is less than the 128 columns of a scale",
         lambda: Sizes.of(DispatchPieces(block=64), 8, 200, 2, 4, fp8=True)),
    ],
)  # fmt: skip
def test_wrong_designs_are_refused(message, make):
    with pytest.raises(ValueError) as refused:
        make()
    assert message in str(refused.value) and "\n" not in str(refused.value)


# --- compiled -----------------------------------------------------------------------------------------------------------

INTS, ROWS, FLOATS = (torch.zeros(16, dtype=dtype) for dtype in (torch.int32, torch.bfloat16, torch.float32))
LANDED = ChannelView(INTS, INTS, tl.constexpr(8))


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_kernels_of_pieces_compile(arch, tmp_path):
    """Rows in loads of 16 bytes a thread, no stack."""
    design, options = CombinePieces(), launch_options(caps_of(arch))
    constants = {"SIZES": Sizes.of(design, 4096, 7168, 8, 128), "ENDS": piece_ends(design.pieces, 4096), "PIECES": 4}
    kernels = []
    for world_size, weights in ((2, ROWS), (2, None), (8, ROWS)):
        arguments = ROWS, INTS, weights, ROWS, ROWS, 4096, LANDED, a_view(world_size)
        kernels.append(compiled(pipelined.add_pieces_kernel, *arguments, arch=arch, **constants, **options))
    if arch == "sm_90":
        ptx = kernels[0].asm["ptx"]
        assert "ld.global.v4" in ptx and "ld.global.v2" not in ptx
    for fp8, design in ((True, DispatchPieces()), (False, DispatchPieces(chunk=32))):
        mail = Mail(ROWS.to(E4M3) if fp8 else ROWS, INTS, ROWS, FLOATS if fp8 else None)
        arguments = ROWS, INTS, ROWS, 0, 4096, mail, a_view(2)
        sizes = Sizes.of(design, 4096, 7168, 8, 128, fp8=fp8)
        kernels.append(compiled(pipelined.place_tokens_kernel, *arguments, arch=arch, SIZES=sizes, **options))
    for kernel in kernels:
        check_compiles(kernel, arch)
        assert arch != "sm_90" or stack_bytes(kernel, tmp_path) == 0
