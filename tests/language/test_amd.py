"""AMD's instructions of every primitive and of whole kernels, by LLVM's memory model of gfx942, which gfx950 shares.

A release at system scope is ``buffer_wbl2 sc0 sc1`` and ``s_waitcnt vmcnt(0)`` before the flag; an acquire is a load with
``sc0 sc1``, ``s_waitcnt vmcnt(0)`` and ``buffer_inv sc0 sc1`` (LLVM, AMDGPUUsage, "Memory Model GFX942"). None of it has run on
a GPU.
"""

import re

import pytest
import triton
import triton.language as tl

import weft
import weft.language as wl
from tests.compiling import a_view, compiled
from tests.documents import record_launches
from tests.language.test_lowering import COUNTER, SIGNALS, X, positions, store_then_release
from tests.ops.checking import call_op, inputs_of
from weft.ops.op import find_op

ARCHS = ("gfx942", "gfx950")
# Every wave waits for its stores, those in its L2 included, before the barrier after which one wave releases.
STORES_DONE = ("s_waitcnt vmcnt(0)", "buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "s_barrier")
# A poll of a signal, an atomic addition of 0: LLVM makes it a load under Triton 3.6.
POLL = r"global_(load_dword|atomic_add)\S* .*\bsc0 sc1$"
ACQUIRE = ("s_waitcnt vmcnt(0)", "buffer_inv sc0 sc1")


def instructions(kernel, *arguments, arch, **constants):
    return compiled(kernel, *arguments, arch=arch, **constants).asm["amdgcn"]


def memory_accesses(asm, kind):
    """Loads or stores of vector registers, a line each."""
    return [line.strip() for line in asm.splitlines() if re.match(rf"\s*(global|buffer|flat)_{kind}_", line)]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_wave_s_stores_are_in_memory_before_the_barrier_of_a_release(arch):
    """The wave that releases does not wait for the stores of other waves."""
    asm = instructions(store_then_release, X, SIGNALS, SIGNALS, a_view(), 4096, arch=arch, num_warps=4)
    found = positions(asm, *STORES_DONE, "global_atomic_swap", "s_barrier")
    assert asm.rindex("_store_dword", 0, found[3]) < found[0]
    positions(asm[found[4] :], "_store_dword", *STORES_DONE, "global_atomic_add")


@triton.jit
def wait_then_load(x, out, signals, team, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    wl.wait(signals, 1, team)
    tl.store(out + offsets, tl.load(x + offsets))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_wait_polls_memory_and_invalidates_the_caches(arch):
    asm = instructions(wait_then_load, X, X, SIGNALS, a_view(), 1024, arch=arch)
    positions(asm, re.search(POLL, asm, re.M)[0], *ACQUIRE)


@triton.jit
def fence_between_stores(x, team, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(wl.symm_at(x, 1, team) + offsets, 1.0)
    wl.fence(team)
    tl.store(wl.symm_at(x, 1, team) + BLOCK + offsets, 2.0)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_fence_writes_back_and_invalidates_at_system_scope(arch):
    asm = instructions(fence_between_stores, X, a_view(), 1024, arch=arch)
    release = ("buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "global_atomic_add")
    positions(asm, "_store_dword", *STORES_DONE, *release, *ACQUIRE, "s_barrier", "_store_dword")


@triton.jit
def meet(x, counter, team, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, 1.0)
    wl.grid_barrier(counter, team)
    tl.store(x + 2 * BLOCK + offsets, tl.load(x + BLOCK + offsets))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_grid_barrier_releases_to_the_gpu_and_acquires(arch):
    asm = instructions(meet, X, COUNTER, a_view(), 1024, arch=arch)
    positions(asm, "_store_dword", *STORES_DONE, "buffer_wbl2 sc1", "s_waitcnt vmcnt(0)", "global_atomic_add_x2")
    positions(asm, re.search(POLL, asm, re.M)[0], *ACQUIRE)


@triton.jit
def send_words(x, inbox, team, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    wl.lamport_store(wl.symm_at(inbox, 1, team) + offsets, tl.load(x + offsets), offsets < BLOCK)


@triton.jit
def receive_words(inbox, old, out, team, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out + offsets, wl.lamport_receive(inbox + offsets, old + offsets, offsets < BLOCK, team))


@pytest.mark.parametrize("arch", ARCHS)
def test_lamport_words_pass_every_cache(arch):
    """Triton drops ``volatile`` there: a poll of a cache would not end."""
    sent = memory_accesses(instructions(send_words, X, X, a_view(), 1024, arch=arch), "store")
    assert sent and all(line.endswith("sc0 sc1") for line in sent)
    asm = instructions(receive_words, X, X, X, a_view(), 1024, arch=arch)
    polled, stored = memory_accesses(asm, "load"), memory_accesses(asm, "store")
    assert len(polled) >= 2 and all(line.endswith("sc0 sc1") for line in polled)
    assert [line.endswith("sc0 sc1") for line in stored].count(False) == 1  # out; the clearing goes to memory


def launched(monkeypatch, op, design):
    """The kernels of an op's first case of a design on two virtual ranks, with their arguments."""
    kind = find_op(op).designs[design]
    cases = (case for case in find_op(op).cases() if case.world_size == 2)
    case = next(case for case in cases if case.design == design or isinstance(case.design, kind))

    def main(team):
        call_op(case, team, inputs_of(case, team.rank, 0, team.device))

    with monkeypatch.context() as patch:
        launches = record_launches(patch)
        weft.simulate(main, 2)
    return launches.values()


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("op", "design", "flags"),
    [("all_reduce", "one_shot", 0), ("matmul_reduce_scatter", "fused", 1)],
)
def test_whole_kernels_release_and_poll_at_system_scope(op, design, flags, arch, monkeypatch):
    """Each flag that a kernel sets follows the stores of all waves; what it polls comes from memory."""
    polled = set_flags = 0
    for kernel, arguments, constants in launched(monkeypatch, op, design):
        options = {
            name: value for name, value in constants.items() if name != "maxnreg" and not name.startswith("launch_")
        }
        asm = instructions(kernel, *arguments, arch=arch, **options)
        polled += sum(line.endswith("sc0 sc1") for line in memory_accesses(asm, "load")) + len(
            re.findall(POLL, asm, re.M)
        )
        done = STORES_DONE if options.get("num_warps", 4) > 1 else STORES_DONE[:-1]
        for swap in re.finditer("global_atomic_swap", asm):
            set_flags += 1
            end = asm.rindex(done[-1], 0, asm.rindex("buffer_wbl2 sc0 sc1", 0, swap.start()))
            released = asm.rindex("buffer_wbl2 sc0 sc1", 0, end)
            positions(asm[asm.rindex("s_waitcnt vmcnt(0)", 0, released) : swap.start()], *done)
    assert polled and (set_flags > 0) == (flags > 0)
