"""Host-side rendezvous are bounded in time. Threads stand for ranks; the store is torch's own."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from weft.errors import ArgumentMismatch, CallMismatch, MixedGPUs, NoPeerAccess, PeerFailed, PeerSilent, WaitTimeout
from weft.runtime.platforms import cuda
from weft.runtime.platforms.cuda import Entry, Place, check_entries, check_peers
from weft.runtime.team.rendezvous import Rendezvous
from weft.runtime.wait_record import raise_from_record


def on_ranks(size, body, patience=20.0):
    """body(rank, rendezvous) on a thread for every rank; results or exceptions in rank order."""
    store = dist.HashStore()

    def run(rank):
        try:
            return body(rank, Rendezvous(store, "team", rank, size, patience))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_everybody_gets_every_item_in_rank_order_many_times(size):
    found = on_ranks(size, lambda rank, rendezvous: [rendezvous.exchange("call", (rank, n)) for n in range(6)])
    assert found == [[[(r, n) for r in range(size)] for n in range(6)]] * size


def test_a_rank_that_does_not_come_is_named_after_the_patience():
    found = on_ranks(3, lambda rank, rendezvous: rank == 1 or rendezvous.exchange("allocation #4", rank), patience=0.3)
    for rank in (0, 2):
        assert isinstance(found[rank], PeerSilent)
        assert f"rank {rank}: rank 1 did not reach allocation #4" in str(found[rank])


def test_ranks_in_different_calls_learn_it_on_every_rank():
    def body(rank, rendezvous):
        rendezvous.exchange("allocation #0", None)
        return rendezvous.exchange("exchange" if rank == 1 else "barrier", rank)

    for rank, error in enumerate(on_ranks(3, body)):
        assert isinstance(error, CallMismatch)
        assert str(error) == (
            f"rank {rank}: host call #2: rank 0 is in barrier, rank 1 is in exchange, rank 2 is in barrier; "
            f"all ranks must make the same calls in the same order"
        )


def test_calls_are_compared_on_every_rank():
    """What ``weft.init(debug=True)`` does before each op: equal calls pass, other values, other calls and none end."""

    def body(call):
        def compare(rank, rendezvous):
            rendezvous.compare("weft.ops.all_gather", {"x": "(3,) float32"}, 20.0)
            return call(rank, rendezvous)

        return on_ranks(3, compare)

    def of_sizes(rank, rendezvous):
        rendezvous.compare("weft.ops.all_reduce", {"x": f"({4 + rank // 2},) float32", "algorithm": "'auto'"}, 20.0)

    def other_calls(rank, rendezvous):
        if rank == 1:
            return rendezvous.exchange("barrier", None)
        return rendezvous.compare("weft.ops.all_reduce", {}, 20.0)

    for rank, error in enumerate(body(of_sizes)):
        assert isinstance(error, ArgumentMismatch) and isinstance(error, ValueError)
        assert str(error) == (
            f"rank {rank}: weft.ops.all_reduce: x is (4,) float32 on rank 0, (4,) float32 on rank 1, (5,) float32 on rank 2; "
            f"pass the same on all ranks"
        )
    for error in body(other_calls):
        assert isinstance(error, CallMismatch) and "rank 1 is in barrier, rank 2 is in weft.ops.all_reduce" in str(
            error
        )
    found = body(lambda rank, rendezvous: rank == 1 or rendezvous.compare("weft.ops.all_reduce", {}, 0.3))
    assert found[1] is True
    for rank in (0, 2):
        assert isinstance(found[rank], PeerSilent)
        assert "rank 1 did not reach weft.ops.all_reduce (host call #2) within 0.3 s" in str(found[rank])


def test_a_rank_that_fails_is_learnt_of_long_before_the_patience():
    def body(rank, rendezvous):
        if rank == 0:
            rendezvous.fail("out of cheese")
            return "failed"
        return rendezvous.exchange("barrier", None) if rank == 1 else rendezvous.watch(lambda: False)

    said, *others = on_ranks(3, body)
    assert said == "failed"
    for rank, error in enumerate(others, 1):
        assert isinstance(error, PeerFailed)
        assert str(error) == f"rank {rank}: rank 0 failed: out of cheese"


def test_a_team_has_one_name_on_all_its_ranks_whatever_else_some_of_them_made(monkeypatch):
    names = []
    for others in ([[0, 1], [0, 1]], []):  # what a rank has made before
        monkeypatch.setattr(cuda, "_made", Counter())
        made = [cuda.name_of_next(ranks) for ranks in others]
        names.append([cuda.name_of_next([0, 1, 2, 3]) for _ in range(2)])
        assert len({*made, *names[-1]}) == len(others) + 2
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("num_warps", "registers", "programs"),
    [
        (4, 255, 2),
        (4, 128, 4),
        (8, 128, 2),
        (4, 80, 6),
        (8, 64, 4),
        (1, 64, 32),
        (4, 41, 10),
        (4, 16, 16),
        (16, 255, 1),
    ],
)
def test_an_sm_holds_what_its_registers_and_warps_allow(num_warps, registers, programs):
    """Registers are allocated 8 a thread at a time, and an SM has at most 64 warps."""
    assert cuda.resident_programs(num_warps, registers) == programs


@pytest.mark.parametrize(
    ("arch", "most_of_one_warp"), [("sm_80", 32), ("sm_86", 16), ("sm_89", 24), ("sm_120", 24), ("sm_999", 16)]
)
def test_small_sms_hold_fewer_programs(arch, most_of_one_warp):
    warps = 64 if arch == "sm_80" else 48
    assert cuda.resident_programs(1, 32, arch, warps) == most_of_one_warp
    assert cuda.resident_programs(4, 32, arch, warps) == warps // 4


def test_gpus_without_a_link_are_the_same_error_on_every_rank():
    places = [Place("box", 0), Place("box", 1), Place("box", 2)]
    check_peers(0, places, lambda one, other: True)
    for rank in range(3):
        with pytest.raises(
            NoPeerAccess, match=f"rank {rank}: rank 1 on GPU 1 of box cannot reach rank 2 on GPU 2 of box"
        ):
            check_peers(rank, places, lambda one, other: {one, other} != {1, 2})
    with pytest.raises(NoPeerAccess, match="GPU 0 of box cannot reach rank 1 on GPU 0 of attic"):
        check_peers(0, [Place("box", 0), Place("attic", 0)], lambda one, other: True)


def test_gpus_of_two_kinds_and_heaps_of_two_sizes_are_the_same_error_on_every_rank():
    h100, h200 = (Entry(Place("box", 0), f"NVIDIA {name}", 132, 4) for name in ("H100", "H200"))
    check_entries(0, [h100, h100._replace(place=Place("attic", 3))])
    kinds = r"rank 0 has NVIDIA H100 \(132 SMs\), rank 1 has NVIDIA "
    for other, said in ((h200, r"H200 \(132 SMs\)"), (h100._replace(sms=114), r"H100 \(114 SMs\)")):
        for rank in range(2):
            with pytest.raises(
                MixedGPUs, match=f"^rank {rank}: a team needs GPUs of one kind, and {kinds}{said}; choose"
            ):
                check_entries(rank, [h100, other])
    with pytest.raises(
        ArgumentMismatch, match="rank 1: a new team: heap_bytes is 4 on rank 0, 8 on rank 1; pass the same"
    ):
        check_entries(1, [h100, h100._replace(heap_bytes=8)])


def test_the_record_of_a_wait_that_gave_up_becomes_an_exception():
    told = []
    words = [
        int.from_bytes(b"wait_for_nobody".ljust(64, b"\0")[at : at + 8], "little", signed=True)
        for at in range(0, 64, 8)
    ]
    record = torch.tensor([2, 3, 7, 41, 0x1000, 5, -1, 2_500_000, *words])
    raise_from_record(torch.zeros(16, dtype=torch.int64), str, told.append)
    with pytest.raises(
        WaitTimeout, match=r"rank 3: kernel wait_for_nobody, program 7, line 41 waited 2.5 s for 4096 >= 5 .* saw -1"
    ):
        raise_from_record(record, str, told.append)
    assert len(told) == 1
    record[0] = 3
    with pytest.raises(WaitTimeout, match="4096 == 5 "):
        raise_from_record(record, str, told.append)
