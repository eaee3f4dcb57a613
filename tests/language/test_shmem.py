"""OpenSHMEM's names: constants, comparisons of waits."""

import re

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from tests.compiling import TARGETS, a_view, compiled
from tests.language.test_signals import WIDTHS, as_signed, loops

SIGNED = {32: torch.int32, 64: torch.int64}


@triton.jit
def waits_until(signal, out, value, team, CMP: tl.constexpr):
    tl.store(out, wl.shmem.signal_wait_until(signal, CMP, value, team))


def test_constants_have_nvshmem_s_names_and_numbers():
    names = {
        "CMP_EQ": 0, "CMP_NE": 1, "CMP_GT": 2, "CMP_LE": 3, "CMP_LT": 4, "CMP_GE": 5, "SIGNAL_SET": 9, "SIGNAL_ADD": 10,
    }  # fmt: skip
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
    asm = compiled(waits_until, signal, out, 7, a_view(), comparison, arch="gfx942").asm["amdgcn"]
    assert re.search(rf"v_cmp_(eq|ne)_u{WIDTHS[dtype]}", asm) and re.search(r"s_cbranch_\w+ \.LBB", asm)


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

    report = weft.check(main, [1, 2, 3], schedules=4)
    assert report.ok, str(report)


@triton.jit
def hand_over(box, out, full, team, N: tl.constexpr, ROUNDS: tl.constexpr):
    """A box that is full (1) or empty (0), as many kernels have it: rank 0 fills it, rank 1 empties it."""
    at = tl.arange(0, N)
    for turn in range(ROUNDS):
        if wl.rank(team) == 0:
            wl.shmem.signal_wait_until(full, wl.shmem.CMP_EQ, 0, team)
            wl.put(box, out + turn * N, N, 1, team, BLOCK=N)
            wl.notify(full, 0, 1, team)
            wl.notify(full, 1, 1, team)
        else:
            wl.shmem.signal_wait_until(full, wl.shmem.CMP_EQ, 1, team)
            tl.store(out + turn * N + at, tl.load(box + at))
            wl.notify(full, 1, 0, team)
            wl.notify(full, 0, 0, team)


def test_a_flag_that_falls_is_right_if_each_value_is_answered():
    """Signals need not grow where all waits are for one value."""

    def main(team):
        box, full = team.zeros((16,), torch.float32), team.signals(1)
        out = torch.arange(64.0) * (1 - team.rank)
        hand_over[(1,)](box, out, full, team.view, 16, 4)
        assert out.tolist() == list(range(64))
        team.barrier()

    report = weft.check(main, 2, schedules=12)
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


@triton.jit
def in_order_of_arrival(landed, status, out, team, n: tl.constexpr, CMP: tl.constexpr):
    """out[i] = number of the turn in which signal i came; ``status`` marks what has come."""
    for peer in tl.static_range(wl.num_ranks(team)):
        wl.shmem.signal_op(landed + wl.rank(team), 1, wl.shmem.SIGNAL_ADD, peer, team)
    for turn in range(1, n):
        index = wl.shmem.wait_until_any(landed, n, status, CMP, 1, team)
        tl.store(out + index, turn)
        tl.store(status + index, 1)
    wl.shmem.wait_until_all(landed, n, None, CMP, 1, team)
    left = wl.shmem.wait_until_any(landed, n, status, CMP, 1, team)
    tl.store(status + left, wl.shmem.signal_fetch(landed + left, team))
    tl.store(out + left, n)
    tl.store(out + n, wl.shmem.wait_until_any(landed, n, status, CMP, 1, team))
    wl.shmem.wait_until_all(landed, n, status, CMP, 7, team)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint64])
@pytest.mark.parametrize("cmp", ["GE", "EQ"])
def test_waits_for_any_skip_what_status_marks(cmp, dtype):
    def main(team):
        landed, status = team.zeros((team.size,), dtype, name="landed"), team.local((team.size,), torch.int32)
        out = team.local((team.size + 1,), torch.int32)
        in_order_of_arrival[(1,)](landed, status, out, team.view, team.size, getattr(wl.shmem, f"NVSHMEM_CMP_{cmp}"))
        assert sorted(out.tolist()[:-1]) == list(range(1, team.size + 1)) and out[-1] == -1
        assert status.tolist() == [1] * team.size

    report = weft.check(main, [1, 2, 3], schedules=3, deterministic=False)
    assert report.ok, str(report)


@triton.jit
def every_use(box, source, signals, out, value, team):
    wl.notify(signals, 1, value, team)
    wl.notify(signals, 1, value, team, "add")
    wl.put_signal(box, source, 64, signals, value, 1, team, "add", BLOCK=64)
    wl.shmem.signal_op(signals, value, wl.shmem.NVSHMEM_SIGNAL_ADD, 1, team)
    wl.shmem.putmem_signal_block(box, source, 64, signals, value, wl.shmem.NVSHMEM_SIGNAL_SET, 1, team)
    tl.store(out, wl.wait(signals, value, team))
    tl.store(out, wl.shmem.signal_fetch(signals, team))


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_signals_of_64_bits_are_sent_and_awaited_whole(dtype, arch):
    box, signals, out = torch.zeros(64), torch.zeros(2, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    made = compiled(every_use, box, box, signals, out, 2**40 + 7, a_view(), arch=arch).asm
    if arch == "gfx942":
        text = made["amdgcn"]
        # Newer Triton keeps a look, an atomic addition of 0, as it is; older ones make it a load.
        sets, adds = "global_atomic_swap_x2 ", r"global_atomic_add_x2 (?!.* sc0).*\n"
        looks = r"(?:_load_dwordx2|_atomic_add_x2) .* sc0 sc1\n"
        narrow = "global_atomic_(swap|add) "
    else:
        text = made["ptx"]
        sets, adds = r"st\.release\.sys\.global\.u64", r"(?:atom|red)\.global\.sys\.release\.add\.u64"
        looks, narrow = r"ld\.global\.sys\.acquire\.b64", r"(release|acquire)\S*\.[ub]32"
    assert len(re.findall(sets, text)) == 2 and len(re.findall(adds, text)) == 3 and len(re.findall(looks, text)) >= 2
    assert not re.search(narrow, text)


@triton.jit
def counts_past_32_bits(box, source, signals, out, start, team):
    peer = (wl.rank(team) + 1) % wl.num_ranks(team)
    wl.put_signal(box, source, 8, signals, start + 1, peer, team, "add", BLOCK=8)
    wl.wait(signals, start + 1, team)
    wl.shmem.signal_op(signals, 2, wl.shmem.SIGNAL_ADD, peer, team)
    wl.shmem.signal_wait_until(signals, wl.shmem.CMP_EQ, start + 3, team)
    wl.notify(signals + 1, peer, start + 4, team)
    wl.shmem.signal_wait_until(signals + 1, wl.shmem.CMP_GT, start + 3, team)
    tl.store(out, wl.shmem.signal_fetch(signals, team))
    tl.store(out + 1, wl.shmem.signal_fetch(signals + 1, team))


def count_past_32_bits(team):
    start, counted = 2**40 + 2**31, []
    for dtype in (torch.int64, torch.uint64):
        box, signals = team.zeros((8,), torch.float32), team.zeros((2,), dtype)
        out = team.local((2,), torch.int64)
        counts_past_32_bits[(1,)](box, box.clone(), signals, out, start, team.view)
        counted.append([x - start for x in out.tolist()])
    return counted


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_signals_of_64_bits_count_past_32(world_size):
    for seed in range(3):
        assert weft.simulate(count_past_32_bits, world_size, seed=seed) == [[[3, 4]] * 2] * world_size


@pytest.mark.gpu(2)
def test_gpu_signals_of_64_bits_count_past_32():
    assert weft.launch(count_past_32_bits, 2, "cuda") == [[[3, 4]] * 2] * 2


@triton.jit
def meets_a_handle(team):
    wl.shmem.sync_all_block(wl.shmem.NVSHMEM_TEAM_WORLD)


ABSENT = {
    "NVSHMEM_TEAM_WORLD": "pass the argument that was team.view",
    "NVSHMEMX_TEAM_NODE": "pass the argument that was team.view",
    "team_my_pe": "pass the argument that was team.view",
    "putmem_nbi_warp": "use putmem_nbi_block",
    "putmem_signal": "use putmem_signal_block",
    "nvshmemx_getmem_nbi_wave": "use getmem_nbi_block",
    "nvshmemx_putmem_signal_nbi_warp": "use putmem_signal_nbi_block",
    "barrier_all": "use barrier_all_block",
    "sync_block": "use barrier_all_block or sync_all_block",
    "nvshmem_my_pe": "use my_pe, without the prefix",
    "nvshmemx_putmem_signal_nbi_block": "use putmem_signal_nbi_block, without the prefix",
    "nvshmem_ptr": "use remote_ptr",
    "nvshmem_malloc": "team.empty",
    "nvshmem_init": "use weft.init",
    "nvshmemx_putmem_on_stream": "use weft.ops, or send",
    "int_put": "use weft.language.put, which takes elements of any type, or putmem_block",
    "put32_block": "use weft.language.put,",
    "nvshmemx_double_get_nbi_warp": "use weft.language.get_nbi, which takes elements of any type, or getmem_nbi_block",
    "nvshmemx_bfloat16_put_signal_nbi_block": "use weft.language.put_signal_nbi,",
    "float_iput": "through weft.language.symm_at",
    "uint64_p": "use int_p, which takes elements of any type",
    "nvshmem_float_g": "use int_g, which takes elements of any type",
    "uint64_wait_until": "use signal_wait_until, which takes a signal of any type",
    "nvshmem_int_wait_until_any": "use wait_until_any, which takes signals of any type",
    "uint64_wait_until_all_vector": "use signal_wait_until for each",
    "wait_until_some": "use wait_until_any",
    "wait_until": "use signal_wait_until",
    "nvshmem_uint64_test": "use signal_fetch",
    "test_any": "use signal_fetch",
    "nvshmem_int_atomic_fetch_add": "use tl.atomic_add or another atomic through weft.language.symm_at",
    "broadcast": "use weft.ops",
    "fcollectmem_block": "use weft.ops",
    "nvshmemx_float_sum_reduce_block": "use weft.ops",
    "int_broadcast": "use weft.ops",
    "put_men": "has no attribute 'put_men'",
    "nvshmem_put_men": "has no attribute 'nvshmem_put_men'",
}


@pytest.mark.parametrize("name", ABSENT)
def test_absent_names_say_what_to_use(name):
    with pytest.raises(AttributeError) as caught:
        getattr(wl.shmem, name)
    assert name in str(caught.value) and ABSENT[name] in str(caught.value)


def test_a_kernel_with_an_absent_name_is_refused():
    with pytest.raises((AttributeError, triton.CompilationError), match="pass the argument that was team.view"):
        compiled(meets_a_handle, a_view(), arch="sm_90")
    with pytest.raises(AttributeError, match="pass the argument that was team.view"):
        weft.simulate(lambda team: meets_a_handle[(1,)](team.view), 1)
