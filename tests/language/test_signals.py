"""Signals of every accepted type: a loop in the code, values modulo their width. Others are refused."""

import re

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from tests.compiling import a_view, compiled

WIDTHS = {torch.int32: 32, torch.uint32: 32, torch.int64: 64, torch.uint64: 64}
REFUSED = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.bool,
]  # fmt: skip


@triton.jit
def waits(signal, out, value, team):
    tl.store(out, wl.wait(signal, value, team))


@triton.jit
def waits_for_uint32(signal, out, value, team):
    tl.store(out, wl.wait(signal, value.to(tl.uint32), team))


@triton.jit
def waits_for_a_constant(signal, out, value: tl.constexpr, team):
    tl.store(out, wl.wait(signal, value, team))


@triton.jit
def waits_in_openshmem(signal, out, value, team):
    tl.store(out, wl.shmem.signal_wait_until(signal, wl.shmem.CMP_GT, value, team))


@triton.jit
def notifies(signal, value, peer, team, op: tl.constexpr):
    wl.notify(signal, peer, value, team, op)


def story(error: BaseException | None) -> str:
    lines = ""
    while error is not None:
        lines, error = lines + f"{error}\n", error.__cause__ or error.__context__
    return lines


def loops(ptx: str) -> list[str]:
    """The bodies of loops that load with acquire order."""
    found = []
    for branch in re.finditer(r"bra(?:\.uni)?\s+(\$\w+);", ptx):
        start = ptx.find(f"{branch[1]}:")
        if 0 <= start < branch.start() and "acquire" in ptx[start : branch.start()]:
            found.append(ptx[start : branch.end()])
    return found


@pytest.mark.parametrize("patience_us", [0, 1_000_000], ids=["release", "debug"])
@pytest.mark.parametrize("kernel", [waits, waits_for_uint32, waits_for_a_constant, waits_in_openshmem])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_a_wait_is_a_loop_on_a_signed_difference(dtype, kernel, patience_us):
    signal, out = torch.zeros(2, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    ptx = compiled(kernel, signal, out, 7, a_view(patience_us=patience_us), arch="sm_90").asm["ptx"]
    assert loops(ptx), "no loop, so no wait"
    assert re.search(rf"setp\.\w+\.s{WIDTHS[dtype]}\b", "".join(loops(ptx)))
    assert ("trap;" in ptx) == (patience_us > 0)
    if patience_us > 0:
        # Threads read their clocks at different times, so some may give up alone.
        assert "bar.sync" not in ptx[ptx.rindex("%globaltimer") : ptx.index("trap;")]


@pytest.mark.parametrize("dtype", WIDTHS)
def test_a_notify_stores_the_signal_s_width_and_amd_compiles_both(dtype):
    signal, out = torch.zeros(2, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    ptx = compiled(notifies, signal, 7, 1, a_view(), "set", arch="sm_90").asm["ptx"]
    assert f"st.release.sys.global.u{WIDTHS[dtype]}" in ptx
    assert f".u{WIDTHS[dtype]}" in re.search(r"atom.*add\S*|red.*add\S*", compiled(
        notifies, signal, 7, 1, a_view(), "add", arch="sm_90").asm["ptx"])[0]  # fmt: skip
    suffix = "_x2" if WIDTHS[dtype] == 64 else " "
    assert f"atomic_swap{suffix}" in compiled(notifies, signal, 7, 1, a_view(), "set", arch="gfx942").asm["amdgcn"]
    assert re.search(r"s_cbranch_\w+ \.LBB", compiled(waits, signal, out, 7, a_view(), arch="gfx942").asm["amdgcn"])


BIG = [
    (0, 1), (1, 1), (5, -3), (-3, 5), (2**31 - 1, 2**31), (2**31, 2**31 - 1), (2**31 + 5, 2**31 + 4),
    (2**32 - 1, 2), (2, 2**32 - 1), (2**63 - 1, 2**63), (2**63, 2**63 - 1), (2**64 - 1, 3), (3, 2**64 - 1), (7, 2**40 + 5),
]  # fmt: skip


def is_reached(seen: int, wanted: int, bits: int) -> bool:
    """Condition of ``wait`` in Python integers: the signed difference, modulo the width."""
    return (seen - wanted) % 2**bits < 2 ** (bits - 1)


def as_signed(x: int, bits: int) -> int:
    return (x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


@pytest.mark.parametrize("kernel", [waits, waits_for_uint32, waits_in_openshmem])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_what_a_simulated_wait_lets_through(dtype, kernel):
    bits = WIDTHS[dtype]

    def main(team, seen, wanted):
        word = torch.tensor([as_signed(seen, bits)], dtype={32: torch.int32, 64: torch.int64}[bits]).view(dtype)
        signal, out = (
            team.zeros((1,), dtype),
            torch.zeros(1, dtype=torch.uint64 if dtype.is_signed is False else torch.int64),
        )
        signal.copy_(word)
        kernel[(1,)](signal, out, wanted, team.view)
        assert out.view(torch.int64).item() % 2**bits == seen % 2**bits

    for seen, wanted in BIG:
        asked = wanted % 2**32 if kernel is waits_for_uint32 else wanted + (kernel is waits_in_openshmem)
        if is_reached(seen, asked, bits):
            weft.simulate(main, 1, args=(seen, wanted), heap_bytes=1 << 16)
        else:
            with pytest.raises(weft.errors.Deadlock, match=">="):
                weft.simulate(main, 1, args=(seen, wanted), heap_bytes=1 << 16)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_notifies_count_past_the_sign_bit(dtype):
    """Start just below it: each rank adds, then sets, and waits for the other's."""
    bits = WIDTHS[dtype]
    start = 2 ** (bits - 1) - 2

    def main(team):
        signal, out = team.zeros((2,), dtype), torch.zeros(1, dtype=torch.int64)
        signal.view({32: torch.int32, 64: torch.int64}[bits]).fill_(start)
        team.barrier()
        peer = 1 - team.rank
        for value in (start + 1, start + 2, start + 5):
            notifies[(1,)](signal, value - start, peer, team.view, "add") if value < start + 5 else None
            notifies[(1,)](signal[1:], value, peer, team.view, "set")
            waits[(1,)](signal[1:], out, value, team.view)
            waits_in_openshmem[(1,)](signal[1:], out, value - 1, team.view)
        waits[(1,)](signal, out, start + 3, team.view)
        return [word % 2**bits for word in signal.view({32: torch.int32, 64: torch.int64}[bits]).tolist()]

    report = weft.check(main, 2, schedules=4)
    assert report.ok, str(report)
    assert weft.simulate(main, 2) == [[start + 3, start + 5]] * 2


@triton.jit
def misuses(x, s, n, team, CASE: tl.constexpr):
    at = tl.arange(0, 8)
    wide = x.to(tl.pointer_type(tl.float64))
    if CASE == "notify: signal is a block of shape [8] of pointers to int32":
        wl.notify(s + at, 1, 1, team)
    if CASE == "notify: signal is a run-time value of type int32":
        wl.notify(n, 1, 1, team)
    if CASE == "notify: peer is a block of shape [8] of int32":
        wl.notify(s, at, 1, team)
    if CASE == "notify: peer is 1.0":
        wl.notify(s, 1.0, 1, team)
    if CASE == "notify: value is 1.5":
        wl.notify(s, 1, 1.5, team)
    if CASE == "notify: value is a run-time value of type fp32":
        wl.notify(s, 1, n * 1.0, team)
    if CASE == "notify: value=1099511627776 does not fit into the 32 bits":
        wl.notify(s, 1, 2**40, team)
    if CASE == "notify: op is a run-time value of type int32; it is a compile-time constant":
        wl.notify(s, 1, 1, team, n)
    if CASE == "notify: op must be 'set' or 'add'":
        wl.notify(s, 1, 1, team, "max")
    if CASE == "notify: team is 1; pass the kernel's argument that was team.view":
        wl.notify(s, 1, 1, 1)
    if CASE == "wait: signal is a block of shape [8] of pointers to int32":
        wl.wait(s + at, 1, team)
    if CASE == "wait: value is a block of shape [8] of int32":
        wl.wait(s, at, team)
    if CASE == "wait: value is 1.0":
        wl.wait(s, 1.0, team)
    if CASE == "put: dst is a block of shape [8] of pointers to bf16":
        wl.put(x + at, x, n, 1, team)
    if CASE == "put: src is a run-time value of type int32":
        wl.put(x, n, n, 1, team)
    if CASE == "put: peer is a block":
        wl.put(x, x, n, at, team)
    if CASE == "put: nelems is 1.5":
        wl.put(x, x, 1.5, 1, team)
    if CASE == "put: BLOCK is a run-time value":
        wl.put(x, x, n, 1, team, n)
    if CASE == "get: src is a block":
        wl.get(x, x + at, n, 1, team)
    if CASE == "get: BLOCK is a run-time value":
        wl.get(x, x, n, 1, team, n)
    if CASE == "put_nbi: BLOCK is a run-time value":
        wl.put_nbi(x, x, n, 1, team, n)
    if CASE == "get_nbi: BLOCK is a run-time value":
        wl.get_nbi(x, x, n, 1, team, n)
    if CASE == "put_signal: op is a run-time value":
        wl.put_signal(x, x, n, s, 1, 1, team, n)
    if CASE == "put_signal: signal points to bf16":
        wl.put_signal(x, x, n, x, 1, 1, team)
    if CASE == "put_signal_nbi: op is a run-time value":
        wl.put_signal_nbi(x, x, n, s, 1, 1, team, n)
    if CASE == "symm_at: ptr is a run-time value of type int32":
        wl.symm_at(n, 1, team)
    if CASE == "symm_at: peer is 1.0":
        wl.symm_at(x, 1.0, team)
    if CASE == "lamport_load: ptr is a pointer to bf16; pass a block of pointers":
        wl.lamport_load(x, at < 0, team)
    if CASE == "lamport_load: ptr points to fp64":
        wl.lamport_load(wide + at, at < 0, team)
    if CASE == "lamport_load: mask is None":
        wl.lamport_load(x + at, None, team)
    if CASE == "lamport_store: mask is a block of shape [8] of int32":
        wl.lamport_store(x + at, at, at)
    if CASE == "lamport_store: ptr points to fp64":
        wl.lamport_store(wide + at, at, at < 0)
    if CASE == "lamport_clear: ptr points to fp64":
        wl.lamport_clear(wide + at, at < 0)
    if CASE == "lamport_receive: old points to fp64":
        wl.lamport_receive(x + at, wide + at, at < 0, team)
    if CASE == "lamport_receive_keyed: key points to fp64":
        wl.lamport_receive_keyed(x + at, x + at, at < 0, wide + at, x + at, at < 0, team)
    if CASE == "lamport_load_keyed: key points to fp64":
        wl.lamport_load_keyed(x + at, at < 0, wide + at, at < 0, team)
    if CASE == "prefetch: ptr is a run-time value":
        wl.prefetch(n, 16)
    if CASE == "prefetch: nbytes is a block of shape [8] of int64":
        wl.prefetch(x + at, at.to(tl.int64))
    if CASE == "prefetch: nbytes is a block of shape [16] of int32":
        wl.prefetch(x + at, tl.arange(0, 16))
    if CASE == "next_epoch: epoch points to bf16":
        wl.next_epoch(x)
    if CASE == "next_epoch: epoch is a block":
        wl.next_epoch(s + at)
    if CASE == "advance_epoch: epoch points to bf16":
        wl.advance_epoch(x, 1)
    if CASE == "multimem_store: ptr is a pointer to bf16; pass a block of pointers":
        wl.multimem_store(x, (at, at, at, at), at < 8, team)
    if CASE == "multimem_store: mask is None":
        wl.multimem_store(x + at, (at, at, at, at), None, team)
    if CASE == "multimem_load_reduce: ptr points to fp64":
        wl.multimem_load_reduce(wide + at, at < 8, team)
    if CASE == "multimem_load_reduce: team is a run-time value":
        wl.multimem_load_reduce(x + at, at < 8, n)
    if CASE == "fence: team is a run-time value":
        wl.quiet(n)
    if CASE == "barrier: team is a run-time value":
        wl.barrier(n)
    if CASE == "rank: team is a run-time value":
        wl.rank(n)
    if CASE == "num_ranks: team is a run-time value":
        wl.num_ranks(n)
    if CASE == "n_pes: team is a run-time value":
        wl.shmem.n_pes(n)
    if CASE == "signal_wait_until: cmp is a run-time value of type int32; it is a compile-time constant":
        wl.shmem.signal_wait_until(s, n, 0, team)
    if CASE == "signal_wait_until: cmp=3; pass CMP_GE, CMP_GT, CMP_EQ or CMP_NE":
        wl.shmem.signal_wait_until(s, wl.shmem.CMP_LE, 0, team)
    if CASE == "signal_wait_until: cmp=4; pass CMP_GE, CMP_GT, CMP_EQ or CMP_NE":
        wl.shmem.signal_wait_until(s, wl.shmem.NVSHMEM_CMP_LT, 0, team)
    if CASE == "signal_wait_until: signal points to bf16":
        wl.shmem.signal_wait_until(x, wl.shmem.CMP_GE, 0, team)
    if CASE == "signal_op: sig_op is a run-time value":
        wl.shmem.signal_op(s, 1, n, 1, team)
    if CASE == "signal_op: sig_op must be SIGNAL_SET or SIGNAL_ADD":
        wl.shmem.signal_op(s, 1, 3, 1, team)
    if CASE == "putmem_signal_block: sig_op is a run-time value":
        wl.shmem.putmem_signal_block(x, x, n, s, 1, n, 1, team)
    if CASE == "putmem_signal_nbi_block: sig_op is a run-time value":
        wl.shmem.putmem_signal_nbi_block(x, x, n, s, 1, n, 1, team)
    if CASE == "putmem_block: dest is a block":
        wl.shmem.putmem_block(x + at, x, n, 1, team)
    if CASE == "getmem_nbi_block: dest is a run-time value":
        wl.shmem.getmem_nbi_block(n, x, n, 1, team)
    if CASE == "putmem_signal_nbi_block: source is a run-time value":
        wl.shmem.putmem_signal_nbi_block(x, n, n, s, 1, wl.shmem.SIGNAL_SET, 1, team)
    if CASE == "getmem_block: nbytes is 1.5":
        wl.shmem.getmem_block(x, x, 1.5, 1, team)
    if CASE == "putmem_signal_block: nbytes is a block of shape [8] of int32":
        wl.shmem.putmem_signal_block(x, x, at, s, 1, wl.shmem.SIGNAL_SET, 1, team)


MISUSES = re.findall(r'if CASE == "(.*)":', misuses.src)


def refused(kernel, *args, tensors=()) -> tuple[str, str]:
    """Messages of the compiler and the simulator for a kernel; fails if one accepts it.

    The kernel gets the ``tensors``, then the ``args``.
    """
    with pytest.raises(triton.CompilationError) as compiler:
        compiled(
            kernel, *(torch.zeros(16, dtype=dtype) for dtype in tensors), *args[:1], a_view(2), *args[1:], arch="sm_90"
        )

    def main(team):
        kernel[(1,)](*(team.zeros((16,), dtype) for dtype in tensors), *args[:1], team.view, *args[1:])

    with pytest.raises(Exception) as simulator:  # noqa: PT011  (the text says which)
        weft.simulate(main, 2, heap_bytes=1 << 16)
    return story(compiler.value), str(simulator.value)


@pytest.mark.parametrize("case", MISUSES)
def test_compiler_and_simulator_refuse_the_same_misuse_in_one_line(case):
    compiler, simulator = refused(misuses, 10, case, tensors=(torch.bfloat16, torch.int32))
    assert simulator.startswith(case) and "\n" not in simulator and simulator in compiler


@triton.jit
def one_primitive(x, n, team, WHICH: tl.constexpr):
    if WHICH == "notify":
        wl.notify(x, 1, n, team)
    elif WHICH == "wait":
        wl.wait(x, 0, team)
    elif WHICH == "put_signal":
        wl.put_signal(x, x, n, x, 1, 1, team)
    elif WHICH == "put_signal_nbi":
        wl.put_signal_nbi(x, x, n, x, 1, 1, team)
    elif WHICH == "signal_op":
        wl.shmem.signal_op(x, 1, wl.shmem.SIGNAL_SET, 1, team)
    elif WHICH == "next_epoch":
        wl.next_epoch(x)


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_nothing_but_an_integer_of_32_or_64_bits_is_a_signal(dtype):
    """The default dtype is bf16, which the 4 bytes of a notify would overrun."""
    for primitive in ("notify", "wait", "put_signal", "put_signal_nbi", "signal_op", "next_epoch"):
        compiler, simulator = refused(one_primitive, 1, primitive, tensors=(dtype,))
        assert simulator.startswith(f"{primitive}: ") and "team.signals(" in simulator and simulator in compiler


@triton.jit
def meet(team):
    wl.barrier(team)


def test_a_barrier_meets_in_grids_of_one_dimension_only():
    """Programs that differ in another index share counters, so that one may pass before its peers arrive."""
    for grid in ((2, 2), (1, 1, 2), (1025,)):
        with pytest.raises(weft.errors.WeftError, match=r"barrier in a grid of .*launch "):
            weft.simulate(lambda team, grid=grid: meet[grid](team.view), 2)
    weft.simulate(lambda team: meet[(3,)](team.view), 2)


@triton.jit
def flags_at_peer(x, team):
    tl.store(wl.symm_at(x, 1, team), 1)


def test_symm_at_takes_tensors_of_bool():
    assert compiled(flags_at_peer, torch.zeros(4, dtype=torch.bool), a_view(2), arch="sm_90").asm["ptx"]

    def main(team):
        x = team.zeros((4,), torch.bool)
        flags_at_peer[(1,)](x, team.view)
        team.barrier()
        return x.tolist()

    assert weft.simulate(main, 2) == [[False] * 4, [True, False, False, False]]


@triton.jit
def hand_over(box, out, signal, value, team, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    peer = 1 - wl.rank(team)
    tl.store(wl.symm_at(box, peer, team) + at, tl.cast(value, tl.int64) * 2 + at)
    wl.notify(signal, peer, value, team)
    wl.wait(signal, value, team)
    tl.store(out + at, tl.load(box + at))
    # Neither rank writes the box again before both have read it.
    wl.notify(signal + 1, peer, value, team)
    wl.shmem.signal_wait_until(signal + 1, wl.shmem.CMP_GT, value - 1, team)


def hand_over_at_the_sign_bit(team):
    """Hand over values around the sign bit and around 0; a wait that ends too early gives old data."""
    got = []
    for dtype, bits in WIDTHS.items():
        signed = {32: torch.int32, 64: torch.int64}[bits]
        for start in (2 ** (bits - 1) - 3, -3):
            signal = team.zeros((2,), dtype)
            signal.view(signed).fill_(start)
            box, out = team.zeros((256,), torch.int64), torch.zeros(256, dtype=torch.int64, device=team.device)
            team.barrier()
            for step in range(1, 7):
                value = as_signed(start + step, bits)
                hand_over[(1,)](box, out, signal, value, team.view, 256)
                got.append(torch.equal(out.cpu(), as_signed(value * 2, 64) + torch.arange(256)))
    return got


def test_data_handed_over_around_the_sign_bit():
    assert all(map(all, weft.simulate(hand_over_at_the_sign_bit, 2)))


@pytest.mark.gpu(2)
def test_gpu_data_handed_over_around_the_sign_bit():
    assert all(map(all, weft.launch(hand_over_at_the_sign_bit, 2, "cuda")))
