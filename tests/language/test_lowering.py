"""Lowerings of the primitives: they compile for every GPU, and the PTX of sm_90 shows their promises."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
import weft.language as wl
from tests.compiling import TARGETS, a_view, compiled
from weft.language.shmem import CMP_EQ, CMP_GE, CMP_GT, SIGNAL_ADD

X = torch.zeros((64, 64), dtype=torch.bfloat16)
SIGNALS = torch.zeros(8, dtype=torch.int32)
COUNTER = torch.zeros(1, dtype=torch.int64)


def positions(ptx, *needles):
    """First position of each needle after the one before it; fails if one is missing."""
    at, found = 0, []
    for needle in needles:
        at = ptx.find(needle, at)
        assert at >= 0, f"{needle!r} is missing or out of order"
        found.append(at)
        at += len(needle)
    return found


@triton.jit
def every_primitive(x, out, signals, counter, n, team, BLOCK: tl.constexpr):
    me = wl.rank(team)
    offsets = tl.arange(0, BLOCK)
    for peer in tl.static_range(wl.num_ranks(team)):
        tl.store(wl.symm_at(x, peer, team) + me * BLOCK + offsets, tl.load(x + offsets))
        wl.notify(signals + me, peer, 1, team)
    token = wl.wait(signals + 1, 1, team)
    first = wl.consume_token(tl.load(out + offsets), token)
    tl.store(out + offsets, first)
    wl.put(x, out, n, 1, team)
    wl.get(out, x, n, 1, team)
    wl.put_nbi(x, out, n, 1, team)
    wl.get_nbi(out, x, n, 1, team)
    wl.put_signal(x, out, n, signals, 3, 1, team, "add")
    wl.put_signal_nbi(x, out, n, signals, 3, 1, team)
    wl.fence(team)
    wl.gather_stores()
    wl.quiet(team)
    wl.barrier(team)
    wl.grid_barrier(counter, team)
    wl.wait_all(signals, 4, 1, team)
    source, done = wl.wait_any(signals, 4, 1, team)
    tl.store(signals + source, done)
    data = wl.lamport_load(x + offsets, offsets < n, team)
    wl.lamport_store(out + offsets, data, offsets < n)
    wl.lamport_clear(x + offsets, offsets < n)
    now = wl.next_epoch(signals)
    wl.advance_epoch(signals, now)


@triton.jit
def every_shmem_primitive(x, out, signals, n, team):
    pe = (wl.shmem.my_pe(team) + 1) % wl.shmem.n_pes(team)
    wl.shmem.putmem_block(x, out, n, pe, team)
    wl.shmem.putmem_nbi_block(x, out, n, pe, team)
    wl.shmem.getmem_block(out, x, n, pe, team)
    wl.shmem.getmem_nbi_block(out, x, n, pe, team)
    wl.shmem.putmem_signal_block(x, out, n, signals, 1, SIGNAL_ADD, pe, team)
    wl.shmem.putmem_signal_nbi_block(x, out, n, signals, 1, SIGNAL_ADD, pe, team)
    wl.shmem.signal_wait_until(signals, CMP_GE, 2, team)
    wl.shmem.wait_until_all(signals, 3, None, CMP_EQ, 2, team)
    tl.store(signals + 4, wl.shmem.wait_until_any(signals, 3, signals + 5, CMP_GT, 2, team))
    tl.store(signals + 4, wl.shmem.signal_fetch(signals, team))
    wl.shmem.int_p(signals + 1, 5, pe, team)
    tl.store(signals + 2, wl.shmem.int_g(signals + 1, pe, team))
    tl.store(wl.shmem.remote_ptr(signals + 3, pe, team), 1)
    wl.shmem.fence(team)
    wl.shmem.quiet(team)
    wl.shmem.barrier_all_block(team)
    wl.shmem.sync_all_block(team)


@triton.jit
def put_between_stores(x, out, n, team, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out + (BLOCK - 1 - offsets), tl.full([BLOCK], 1, tl.bfloat16))
    wl.put(x, out, n, 1, team, BLOCK=BLOCK)
    tl.store(out + (BLOCK - 1 - offsets), tl.full([BLOCK], 2, tl.bfloat16))


@triton.jit
def tma_store_then_notify(source, target, signals, team):
    target.store([0, 0], source.load([0, 0]))
    wl.notify(signals, 1, 1, team)


@triton.jit
def wait_then_tma_load(source, target, signals, team):
    wl.wait(signals, 1, team)
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def push_tile(x, out, team, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(wl.symm_at(out, 1, team) + offsets, tl.load(x + offsets))


@triton.jit
def sum_to_all(x, team, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    at = x + offsets * (128 // x.dtype.element_ty.primitive_bitwidth)
    wl.multimem_store(at, wl.multimem_load_reduce(at, offsets < BLOCK - 1, team), offsets < BLOCK, team)


@pytest.mark.parametrize(
    ("arch", "patience_us"),
    [
        *(pytest.param(arch, 0, marks=() if arch in ("sm_90", "gfx942") else pytest.mark.sweep) for arch in TARGETS),
        ("sm_90", 1_000_000),
        pytest.param("gfx942", 1_000_000, marks=pytest.mark.sweep),
    ],
    ids=lambda value: {0: "release", 1_000_000: "debug"}.get(value, value),
)
def test_every_primitive_compiles(arch, patience_us):
    view = a_view(patience_us=patience_us)
    assert compiled(every_primitive, X, X, SIGNALS, COUNTER, 100, view, 1024, arch=arch).asm
    assert compiled(every_shmem_primitive, X, X, SIGNALS, 100, view, arch=arch).asm


def test_all_ranks_run_the_same_machine_code():
    codes = {compiled(push_tile, X, X, a_view(4, rank), 1024, arch="sm_90").asm["ptx"] for rank in range(4)}
    assert len(codes) == 1


def test_notify_drains_tma_stores_then_meets_its_threads_then_releases():
    tile = TensorDescriptor.from_tensor(X, [64, 64])
    ptx = compiled(tma_store_then_notify, tile, tile, SIGNALS, a_view(), arch="sm_90").asm["ptx"]
    positions(ptx, "cp.async.bulk.tensor.2d.global", "cp.async.bulk.wait_group 0;", "bar.sync", "st.release.sys.global")


@triton.jit
def store_then_release(x, signals, tickets, team, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(wl.symm_at(x, 1, team) + offsets, tl.load(x + offsets))
    wl.notify(signals, 1, 1, team)
    tl.store(x + offsets, tl.load(x + BLOCK + offsets))
    wl.gather_stores()
    tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu")


def test_on_an_amd_gpu_without_a_lowering_notify_is_a_compile_time_error_that_says_so():
    with pytest.raises(triton.CompilationError) as caught:
        compiled(store_then_release, X, SIGNALS, SIGNALS, a_view(), 4096, arch="gfx90a")
    assert "notify, fence and gather_stores are not written for this AMD GPU" in _whole_story(caught.value)
    assert compiled(push_tile, X, X, a_view(), 1024, arch="gfx90a").asm["amdgcn"]


def test_notify_without_tma_has_the_barrier_before_the_release_on_sm_80():
    ptx = compiled(every_primitive, X, X, SIGNALS, COUNTER, 100, a_view(), 1024, arch="sm_80").asm["ptx"]
    assert "cp.async.bulk" not in ptx and "fence.proxy" not in ptx
    positions(ptx, "st.global", "bar.sync", "st.release.sys.global")


def test_wait_acquires_at_system_scope_and_fences_the_async_proxy_before_a_tma_load():
    tile = TensorDescriptor.from_tensor(X, [64, 64])
    ptx = compiled(wait_then_tma_load, tile, tile, SIGNALS, a_view(), arch="sm_90").asm["ptx"]
    positions(ptx, "ld.global.sys.acquire", "bar.sync", "fence.proxy.async", "cp.async.bulk.tensor.2d.shared")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_stores_to_a_peer_are_16_bytes_wide(dtype):
    x = torch.zeros(4096, dtype=dtype)
    ptx = compiled(push_tile, x, x, a_view(), 4096, arch="sm_90").asm["ptx"]
    stores = [line for line in ptx.splitlines() if "st.global" in line]
    assert stores and all("st.global.v4.b32" in line for line in stores)


def test_a_debug_wait_knows_its_kernel_and_traps():
    tile = TensorDescriptor.from_tensor(X, [64, 64])
    ptx = compiled(wait_then_tma_load, tile, tile, SIGNALS, a_view(patience_us=5), arch="sm_90").asm["ptx"]
    name = int.from_bytes(b"wait_the", "little", signed=True)
    assert "trap;" in ptx and (str(name) in ptx or f"{name:#x}" in ptx.lower())


@triton.jit
def clear(x, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    wl.lamport_clear(x + offsets, offsets < BLOCK)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, 0x80008000), (torch.float16, 0x80008000), (torch.float32, 1 << 31)]
)
def test_clearing_writes_the_bits_of_minus_zero(dtype, bits):
    ptx = compiled(clear, torch.zeros(1024, dtype=dtype), 1024, arch="sm_90").asm["ptx"]
    assert "st.global.v4.b32" in ptx
    assert str(bits) in ptx or str(bits - (1 << 32)) in ptx or "-32768" in ptx


def test_multimem_without_multicast_is_a_compile_time_error_that_says_so():
    with pytest.raises(triton.CompilationError) as caught:
        compiled(sum_to_all, X, a_view(), 64, arch="sm_90")
    assert "multimem_load_reduce needs NVLink multicast" in _whole_story(caught.value)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("dtype", "sum_of"),
    [
        (torch.bfloat16, "add.acc::f32.v4.bf16x2"),
        (torch.float16, "add.acc::f32.v4.f16x2"),
        (torch.float32, "add.v4.f32"),
    ],
)
def test_multimem_loads_and_stores_16_bytes(dtype, sum_of, arch):
    """ptxas takes it too: a thread's word is loaded as a sum and stored to all ranks, each by one instruction."""
    made = compiled(sum_to_all, torch.zeros(1024, dtype=dtype), a_view(multicast=1), 128, arch=arch)
    assert made.asm["ptx"].count(f"multimem.ld_reduce.relaxed.sys.global.{sum_of}") == 1
    assert made.asm["ptx"].count("multimem.st.relaxed.sys.global.v4.f32") == 1
    assert made.asm["cubin"]


def _whole_story(error):
    story = ""
    while error is not None:
        story += str(error)
        error = error.__cause__ or error.__context__
    return story


def test_put_comes_after_what_the_program_stored_and_before_what_it_stores():
    """The threads that store are not those that copy."""
    ptx = compiled(put_between_stores, X, X, 1 << 10, a_view(), BLOCK=1024, arch="sm_90").asm["ptx"]
    positions(ptx, "st.global", "bar.sync", "ld.global", "st.global", "bar.sync", "st.global")


@triton.jit
def receive_in_turns(out, inbox, n, team, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for turn in tl.static_range(2):
        here, old = inbox + turn * BLOCK + at, inbox + (1 - turn) * BLOCK + at
        tl.store(out + turn * BLOCK + at, wl.lamport_receive(here, old, at < n, team, False), mask=at < n)


@pytest.mark.parametrize("block", [1, 32, 64])
def test_no_warp_clears_a_small_block_that_another_still_loads(block):
    x = torch.zeros(256)
    ptx = compiled(receive_in_turns, x, x, 4096, a_view(), block, arch="sm_90", num_warps=4).asm["ptx"]
    # Stored are a clearing, what was received, then the next clearing.
    _, received, _, _ = (match.start() for match in re.finditer(r"st\.global", ptx))
    seen = ptx.rindex("ld.volatile.global", 0, received)
    # All load it after each element has been seen, and go on after all have.
    assert "bar.sync" in ptx[ptx.rindex("ld.volatile.global", 0, seen) : seen]
    assert "bar.sync" in ptx[seen:received]


def test_one_warp_receives_a_small_block_without_a_barrier():
    x = torch.zeros(256)
    assert "bar.sync" not in compiled(receive_in_turns, x, x, 4096, a_view(), 16, arch="sm_90", num_warps=1).asm["ptx"]


@triton.jit
def send_and_receive(x, out, inbox, team, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    wl.lamport_store(wl.symm_at(inbox, 1 - wl.rank(team), team) + at, tl.load(x + at), at < BLOCK)
    tl.store(out + at, wl.lamport_load(inbox + at, at < BLOCK, team))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_rounds_to_minus_zero_arrives_as_zero(dtype):
    sent = torch.tensor([-0.0, -1e-12, -1e-45, 1e-12, -1.0, -3e-8, 0.0, 2.0])

    def main(team):
        inbox = team.empty((8,), dtype)
        inbox.copy_(torch.full((8,), -0.0))
        team.barrier()
        out = torch.empty(8, dtype=dtype)
        send_and_receive[(1,)](sent, out, inbox, team.view, BLOCK=8)
        return out

    for out in weft.simulate(main, 2):
        assert torch.equal(out, sent.to(dtype)) and not torch.signbit(out[out == 0]).any()
