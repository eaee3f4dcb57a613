"""OpenSHMEM's names: constants, comparisons of waits."""

import re

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from tests.compiling import a_view, compiled
from tests.language.test_signals import WIDTHS, as_signed, loops

SIGNED = {32: torch.int32, 64: torch.int64}


@triton.jit
def waits_until(signal, out, value, team, CMP: tl.constexpr):
    tl.store(out, wl.shmem.signal_wait_until(signal, CMP, value, team))


def test_constants_have_nvshmem_s_names_and_numbers():
    names = {
        "CMP_EQ": 0,
        "CMP_NE": 1,
        "CMP_GT": 2,
        "CMP_LE": 3,
        "CMP_LT": 4,
        "CMP_GE": 5,
        "SIGNAL_SET": 9,
        "SIGNAL_ADD": 10,
    }
    for name, number in names.items():
        assert getattr(wl.shmem, name).value == getattr(wl.shmem, f"NVSHMEM_{name}").value == number


@pytest.mark.parametrize(("cmp", "condition"), [("EQ", "eq"), ("NE", "ne")])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_a_wait_for_one_value_is_a_loop_on_the_whole_signal(dtype, cmp, condition):
    signal, out = torch.zeros(2, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    comparison = getattr(wl.shmem, f"CMP_{cmp}")
    for patience_us in (0, 1_000_000):
        ptx = compiled(waits_until, signal, out, 7, a_view(patience_us=patience_us), comparison, arch="sm_90").asm[
            "ptx"
        ]
        assert re.search(rf"setp\.(eq|ne)\.[bs]{WIDTHS[dtype]}\b", "".join(loops(ptx)))
        assert ("trap;" in ptx) == (patience_us > 0)


@pytest.mark.parametrize("cmp", ["EQ", "NE"])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_what_a_simulated_wait_for_one_value_lets_through(dtype, cmp):
    bits, comparison = WIDTHS[dtype], getattr(wl.shmem, f"CMP_{cmp}")

    def main(team, seen, asked):
        signal, out = team.zeros((1,), dtype), torch.zeros(1, dtype=torch.int64)
        signal.copy_(torch.tensor([as_signed(seen, bits)], dtype=SIGNED[bits]).view(dtype))
        waits_until[(1,)](signal, out, asked, team.view, comparison)
        return out.item() % 2**bits

    for seen, asked in [(0, 0), (0, 1), (1, 0), (5, -3), (2 ** (bits - 1), 2 ** (bits - 1)), (2**bits - 1, -1)]:
        if (seen % 2**bits == asked % 2**bits) == (cmp == "EQ"):
            assert weft.simulate(main, 1, args=(seen, asked), heap_bytes=1 << 16) == [seen % 2**bits]
        else:
            with pytest.raises(weft.errors.Deadlock, match="[!=]= "):
                weft.simulate(main, 1, args=(seen, asked), heap_bytes=1 << 16)


@triton.jit
def send_answered(landed, seen, out, rounds, team, CMP: tl.constexpr):
    """Each value is answered before the next is sent, so that a wait for it alone cannot miss it."""
    me, world = wl.rank(team), wl.num_ranks(team)
    for value in range(1, rounds + 1):
        wl.notify(landed, (me + 1) % world, value, team)
        tl.store(out + value - 1, wl.shmem.signal_wait_until(landed, CMP, value - (CMP == wl.shmem.CMP_NE), team))
        wl.notify(seen, (me + world - 1) % world, value, team)
        wl.wait(seen, value, team)


@pytest.mark.parametrize("cmp", ["EQ", "NE"])
def test_a_wait_for_one_value_that_is_answered_is_clean(cmp):
    def main(team):
        landed, seen = team.zeros((1,), torch.uint64, name="landed"), team.signals(1, name="seen")
        out = team.local((3,), torch.int64)
        send_answered[(1,)](landed, seen, out, 3, team.view, getattr(wl.shmem, f"NVSHMEM_CMP_{cmp}"))
        assert out.tolist() == [1, 2, 3]

    report = weft.check(main, [1, 2, 3, 4], schedules=6)
    assert report.ok, str(report)


@triton.jit
def overtaken(landed, team, COMPARISON: tl.constexpr):
    if wl.rank(team) == 0:
        wl.notify(landed, 1, 1, team)
        wl.notify(landed, 1, 2, team)
    else:
        wl.shmem.signal_wait_until(landed, COMPARISON, 1, team)


@pytest.mark.parametrize("strategy", ["uniform", "delay", "pct", "slow", "exhaustive"])
def test_every_strategy_finds_a_wait_that_may_miss_its_value(strategy):
    """Also in a schedule in which it saw the value."""

    def main(team, comparison):
        overtaken[(1,)](team.signals(1, name="landed"), team.view, comparison)

    report = weft.check(
        main, 2, schedules=1 if strategy != "exhaustive" else 500, strategy=strategy, args=(wl.shmem.CMP_EQ,)
    )
    assert [found.finding.kind for found in report.wrong] == ["equality-wait"], str(report)
    for comparison in (wl.shmem.CMP_GE, wl.shmem.CMP_NE):
        assert weft.check(main, 2, schedules=4, strategy=strategy, args=(comparison,)).ok
