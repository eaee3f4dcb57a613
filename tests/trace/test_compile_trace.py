"""Kernels of traced teams: without a trace the PTX is that of the source without records; with one, no barrier is added."""

import gc
import re

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import KernelInterface

import weft
import weft.language as wl
from tests.compiling import a_view, compiled
from tests.trace import kernels
from weft.language import bulk, lamport, signals, waits
from weft.ops.overlap import fused_reduce
from weft.runtime.launching import _describe
from weft.runtime.team.trace_rings import RING_BYTES
from weft.runtime.team.view import TeamView
from weft.trace import clocks
from weft.transport import copy_channel, push
from weft.transport.halves import Half, begin_kernel
from weft.triton_api import JITFunction

RINGS = torch.zeros((2, RING_BYTES), dtype=torch.uint8)
X = torch.zeros(64, dtype=torch.int32)
# Names that lead to records, and what only they use.
OF_RECORDS = re.compile(
    r"\b(tracing|begin_tile|end_tile|begin_put|end_put|end_put_heads|_record_put|_record_wait|words is not None|polls|rounds|"
    r"last = tl\.max|team\.trace)\b"
)


@triton.jit
def primitives(x, signal, team):
    token = wl.wait(signal, 3, team)
    wl.put(x, x + 100, 50, 1, team)
    wl.put_nbi(x, x + 100, 50, 1, team)
    wl.put_signal_nbi(x, x + 100, 50, signal, token, 2, team)
    wl.notify(signal, 2, 5, team, "add")
    wl.wait_all(signal, 4, 7, team)
    index, _ = wl.wait_any(signal, 4, 9, team)
    tl.store(x, index)


def of_primitives(view):
    return compiled(primitives, X, X, view, arch="sm_90")


def of_begin_kernel(view):
    channel = copy_channel.ChannelView(X, X, tl.constexpr(8))
    return compiled(begin_kernel, Half(channel, X, X), view, arch="sm_90", num_warps=1)


def of_matmul_reduce(view):
    """The fused kernel with small tiles, which compile fast."""
    from weft.kernels.gemm_tile import Sizes, SplitK
    from weft.kernels.tile_schedule import as_argument, make_tiles
    from weft.ops.gemm.tile import Tile

    a = torch.zeros((64, 64), dtype=torch.bfloat16)
    tile = Tile(block_m=64, block_n=32, block_k=32, group=2, num_warps=4, num_stages=2)
    tiles = as_argument(make_tiles(640, 256, panels=4, block_m=64, block_n=32, group=2))
    shared = SplitK(torch.zeros(8), X), 640, Sizes(256, 512, 512, 512), tiles, tile.block(False), view
    buffers = fused_reduce.Buffers(a, X, X, a, X, 1 << 20, 1 << 12)
    return compiled(
        fused_reduce.matmul_reduce_kernel, a, a, a, a, buffers, *shared, arch="sm_90", num_warps=4, LOCAL_FIRST=False,
        REPLICATE=False,
    )  # fmt: skip


# With their spans: wait, put_nbi and its like twice, put, notify, add, wait_all, wait_any; two puts and a wait for words.
SPANS = {of_primitives: 8, kernels.of_lamport: 3}
# A GEMM, five notifies and waits; entered and its wait.
MORE_SPANS = {
    of_matmul_reduce: 6, of_begin_kernel: 2, kernels.of_keyed: 3, kernels.of_dispatch: 11, kernels.of_combine: 12,
    kernels.of_grouped: 1, kernels.of_arriving: 2, kernels.of_small_m: 1, kernels.of_persistent: 1, kernels.of_sharded: 3,
    kernels.of_merge: 1, kernels.of_gathered: 3,
}  # fmt: skip


# A flattened loop begins its first tile before the loop.
FLATTENED = (kernels.of_grouped,)


def forget_compiled():
    """Have Triton look at the sources again."""
    gc.unfreeze()  # conftest.py froze what collection made
    for found in gc.get_objects():
        if issubclass(type(found), JITFunction):  # isinstance asks objects that warn when they are looked at
            found.hash = None
            found.device_caches.clear()
    gc.freeze()


@pytest.fixture
def without_records():
    """without_records(): from then on the sources lack each line that leads to records, blank lines in their place."""
    changed = {}

    def remove():
        modules = (signals, waits, bulk, lamport, push, fused_reduce, *kernels.MODULES)
        for found in {f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}:
            if OF_RECORDS.search(found.src):
                changed[found] = found.src
                found._unsafe_update_src(OF_RECORDS_LINES.sub("", found.src))
        forget_compiled()
        return changed

    yield remove
    for found, source in changed.items():
        found._unsafe_update_src(source)
    forget_compiled()


OF_RECORDS_LINES = re.compile(rf"(?m)^.*{OF_RECORDS.pattern}.*$")


def bare(kernel):
    """PTX as a whole but the lines of debug information."""
    return re.sub(r"(?m)^\s*(\.loc|\.file|//).*\n", "", kernel.asm["ptx"]).partition(".section")[0]


def check_without_a_trace(builders, without_records):
    given = [kernel(a_view()) for kernel in builders]
    without_records()
    for kernel, before in zip(builders, given, strict=True):
        after = kernel(a_view())
        assert bare(after) == bare(before) and "globaltimer" not in bare(before)
        assert after.hash != before.hash  # of its sources: it was compiled anew


@pytest.mark.triton_internals
def test_without_a_trace_the_ptx_is_that_of_kernels_without_records(without_records):
    check_without_a_trace(SPANS, without_records)


@pytest.mark.sweep
def test_so_it_is_for_other_kernels(without_records):
    check_without_a_trace(MORE_SPANS, without_records)


def check_with_a_trace(builders):
    for kernel, count in builders.items():
        ptx, plain = kernel(a_view()._replace(trace=RINGS)).asm["ptx"], kernel(a_view()).asm["ptx"]
        begins = count + (kernel in FLATTENED)
        assert (ptx.count("%globaltimer_lo"), ptx.count("%globaltimer;"), ptx.count("%smid")) == (begins, count, count)
        assert ptx.count("bar.sync") == plain.count("bar.sync")
        assert "atom.global.add.u32 place" in ptx and "atom.global.add.u32 place" not in plain


@pytest.mark.triton_internals
def test_with_a_trace_programs_write_records_and_meet_at_no_further_barrier():
    check_with_a_trace(SPANS)


@pytest.mark.sweep
def test_so_they_do_in_other_kernels():
    check_with_a_trace(MORE_SPANS)


def test_the_kernels_of_the_clocks_compile():
    stamps = torch.zeros(64, dtype=torch.int64)
    ptx = compiled(clocks.ping_pong_kernel, X, stamps, 0, 1, a_view(), 500, arch="sm_90", num_warps=1).asm["ptx"]
    assert ptx.count("%globaltimer;") == 3 and ptx.count("st.release.sys") == 2
    assert "%globaltimer;" in compiled(clocks.stamp_kernel, stamps, arch="sm_90", num_warps=1).asm["ptx"]


def test_a_launch_is_compiled_anew_for_a_traced_team():
    kinds = []
    for trace in (None, RINGS):
        _describe((a_view()._replace(trace=trace),), kind := [])
        kinds.append(kind)
    assert kinds[0] != kinds[1]


@pytest.mark.parametrize("op", [weft.ops.all_reduce, weft.ops.all_gather], ids=lambda op: op.__name__)
def test_kernels_with_records_are_launched_in_a_trace_only(op, monkeypatch):
    found, getitem = [], KernelInterface.__getitem__

    def record(kernel, grid):
        def launch(*arguments, **constants):
            found.extend(x.trace is not None for x in arguments if isinstance(x, TeamView))
            return getitem(kernel, grid)(*arguments, **constants)

        return launch

    def main(team):
        for rings in (None, RINGS, None):
            team.record_into(rings)
            op(torch.ones(16), team)

    monkeypatch.setattr(KernelInterface, "__getitem__", record)
    weft.simulate(main, 1 + 1)
    assert sorted(set(zip(found[:-1:2], found[1::2], strict=True))) == [(False, False), (True, True)]
    assert found.count(True) * 2 == found.count(False) > 0
