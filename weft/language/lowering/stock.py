"""Leaves of the primitives, chosen by target at compile time: stock Triton, else assembly."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft.language.arguments import is_scalar
from weft.language.lowering import gcn, ptx
from weft.language.lowering.debug_site import kernel_line, kernel_name_int64
from weft.triton_api import builtin, target_info


@builtin
def is_sanitized(_semantic=None):
    """True in kernels that GSan instruments (``weft check --gpu``), a compile-time constant.

    GSan follows Triton's accesses, and no assembly.
    """
    mode = getattr(_semantic.builder.options, "instrumentation_mode", None) or ""
    return tl.constexpr("gsan" in mode.split(","))


@triton.jit
def load_acquire(ptr):
    """Load with acquire order at system scope, for all threads.

    ``ld.acquire.sys`` and a CTA barrier on NVIDIA. For GSan an atomic load, of Triton 3.9: to GSan an addition of 0 is a write,
    and each look of a wait would take one of its 65,535 clocks.
    """
    if is_sanitized():
        return tl.atomic_load(ptr, sem="acquire", scope="sys")
    else:
        return tl.atomic_add(ptr, 0, sem="acquire", scope="sys")


@triton.jit
def load_acquire_each(ptr, mask):
    """``load_acquire`` of a block where ``mask`` is true; undefined elsewhere.

    The caller adds a CTA barrier. Triton lets one thread load each element and gives the value to all that hold it. Loads by
    several threads could differ, and with them the program's scalars from warp to warp.
    """
    if is_sanitized():
        return tl.atomic_load(ptr, mask=mask, sem="acquire", scope="sys")
    else:
        return tl.atomic_add(ptr, tl.zeros(ptr.shape, ptr.dtype.element_ty), mask=mask, sem="acquire", scope="sys")


@triton.jit
def store_release(ptr, value):
    """Store with release order at system scope, by one thread, after ``gather_stores``."""
    if target_info.is_cuda() and not is_sanitized():
        ptx.store_release_sys(ptr, value)
    else:
        tl.atomic_xchg(ptr, tl.cast(value, ptr.dtype.element_ty), sem="release", scope="sys")


@triton.jit
def add_release(ptr, value):
    tl.atomic_add(ptr, tl.cast(value, ptr.dtype.element_ty), sem="release", scope="sys")


@triton.jit
def store_flagged(ptr, x, mask):
    """Store elements that are their own flag (lamport.py).

    On NVIDIA a plain store, on AMD one at system scope (``sc0 sc1``). The simulator's checker tells it from other stores.
    Assembly for GSan, which would take it for a race with the loads that wait for it.
    """
    if is_sanitized():
        ptx.store_unseen(ptr, x, mask)
    elif target_info.is_hip():
        tl.store(ptr, x, mask=mask, cache_modifier=".wt")
    else:
        tl.store(ptr, x, mask=mask)


@triton.jit
def load_volatile(ptr, mask=None, other=None):
    """Load from memory, and not from a cache that peers' stores do not reach.

    On AMD Triton drops ``volatile``; ``.cv`` is a load at system scope (``sc0 sc1``).
    """
    if target_info.is_hip():
        return tl.load(ptr, mask=mask, other=other, volatile=True, cache_modifier=".cv")
    else:
        return tl.load(ptr, mask=mask, other=other, volatile=True)


@triton.jit
def load_flagged(ptr, mask):
    """Load elements that are their own flag; 0 where masked off."""
    if is_sanitized():
        return ptx.load_unseen(ptr, mask)
    else:
        return load_volatile(ptr, mask, 0.0)


@triton.jit
def drain_tma_stores():
    """Wait for this thread's tensor-descriptor stores; nothing to do where they are ordinary stores."""
    if target_info.cuda_capability_geq(9, 0):
        ptx.drain_bulk_stores()


@triton.jit
def complete_stores():
    """Wait until a release by another thread after a barrier covers this thread's ordinary stores.

    Nothing to do on NVIDIA, where the barrier suffices.
    """
    if target_info.is_hip():
        tl.static_assert(
            target_info.is_hip_cdna3() or target_info.is_hip_cdna4(),
            "notify, fence and gather_stores are not written for this AMD GPU, only for gfx942 and gfx950",
        )
        gcn.complete_stores()


@triton.jit
def complete_copies():
    """Complete copies that may last until ``quiet``; nothing to do, as they are made in order."""
    pass


@triton.jit
def fence_before_tma_loads():
    """Let tensor-descriptor loads see what an acquire made visible; nothing to do for ordinary loads."""
    if target_info.cuda_capability_geq(9, 0):
        ptx.fence_proxy_async()


@triton.jit
def fence_system(word):
    """System-scope fence in every thread.

    ``word``: any int32 of this rank, used where the target has no bare fence.
    """
    if target_info.is_cuda():
        ptx.fence_acq_rel_sys()
    else:
        tl.atomic_add(word, 0, sem="acq_rel", scope="sys")


@triton.jit
def wait_for_previous_kernel():
    """``griddepcontrol.wait``; nothing where kernels of a stream never overlap."""
    if target_info.cuda_capability_geq(9, 0):
        gdc_wait()


@triton.jit
def let_next_kernel_start():
    """``griddepcontrol.launch_dependents``; nothing where kernels of a stream never overlap."""
    if target_info.cuda_capability_geq(9, 0):
        gdc_launch_dependents()


@triton.jit
def zero_here():
    """Opaque 0 on NVIDIA, where it saves registers; a plain 0 elsewhere."""
    if target_info.is_cuda():
        return ptx.zero()
    else:
        return tl.full((), 0, tl.int32)


@triton.jit
def is_unwritten(x):
    """Mask of the elements of ``x`` with the bit pattern of -0.0 (lamport.py)."""
    if x.dtype.primitive_bitwidth == 32:
        return x.to(tl.int32, bitcast=True) == -2147483648
    else:
        tl.static_assert(x.dtype.primitive_bitwidth == 16, "Lamport data are fp16, bf16 or fp32")
        return x.to(tl.int16, bitcast=True) == -32768


@triton.jit
def reaches_peers(ptr, peer, team):
    """Mark the translation of a pointer to ``peer``'s memory; only the simulator checks the pointer.

    Debug builds trap for a scalar ``peer`` outside of the team: its delta would be read beyond the table's end.
    """
    DEBUG: tl.constexpr = team.patience_us > 0
    if DEBUG and is_scalar(peer):
        if (peer < 0) | (peer >= team.size):
            give_up(ptr, peer, "peer", team.size, team)


@triton.jit
def names_chunk(rank, chunk, chunks, team):
    """Mark the use of a channel's signal; only the simulator checks its rank and chunk."""


@triton.jit
def begins_epoch(epoch):
    """Mark the begin of an epoch; only the checker looks whether the one before has ended."""


@triton.jit
def ends_epoch(epoch):
    """Mark the end of this program's part of an epoch."""


@triton.jit
def meets_by_first_index():
    """Mark a barrier by ``tl.program_id(0)`` alone; only the simulator checks the grid."""


@triton.jit
def exact_dots():
    """Mark a program whose dots' bits depend on no block's shape; only the simulator needs it."""


@triton.jit
def prefetch(ptr, nbytes):
    """``cp.async.bulk.prefetch.L2``; nothing where the target has no bulk copies."""
    if target_info.cuda_capability_geq(9, 0):
        ptx.prefetch_bulk_l2(ptr, nbytes)


@triton.jit
def multiplies_bf16_in_pairs():
    """True where ``scaled_e2m1`` and ``scaled_int4`` are written for the target, a compile-time constant."""
    return target_info.cuda_capability_geq(8, 0)


@triton.jit
def scaled_e2m1(words, scales, PLACE: tl.constexpr, WHOLE: tl.constexpr):
    """bf16 of the e2m1 numbers at one PLACE of int16 ``words``, times bf16 powers of two.

    WHOLE  ``scales`` are 2**126 times these powers
    """
    return ptx.scaled_e2m1(words, scales, PLACE, WHOLE)


@triton.jit
def scaled_int4(words, scales, less, PLACE: tl.constexpr):
    """bf16 of the int4 numbers at one PLACE of int16 ``words`` + 128 + ``less``, times bf16 ``scales``."""
    return ptx.scaled_int4(words, scales, less, PLACE)


@triton.jit
def count_unwritten(x):
    return tl.sum(is_unwritten(x).to(tl.int32))


@triton.jit
def count_written(x, mask):
    return tl.sum((mask & (is_unwritten(x) == 0)).to(tl.int32))


@builtin
def is_loaded_by_several_warps(x, _semantic=None):
    """True if block ``x`` has fewer elements than there are threads, so that several warps load the same.

    A compile-time constant. The threads of one warp load together.
    """
    options = _semantic.builder.options
    return tl.constexpr(options.num_warps > 1 and x.numel.value < options.num_warps * options.warp_size)


@builtin
def is_counted_by_several_warps(x, _semantic=None):
    """True if several warps load the same elements of ``x`` and count them through shared memory.

    A compile-time constant. There the count of one of these warps stands for that of another, which may have loaded earlier.
    """
    options = _semantic.builder.options
    return tl.constexpr(options.warp_size < x.numel.value < options.num_warps * options.warp_size)


@triton.jit
def microseconds():
    """Each thread's clock for debug-mode waits; 0 where the target has none: they never give up."""
    if target_info.is_cuda():
        return ptx.globaltimer_us()
    else:
        return tl.full((), 0, tl.int64)


@triton.jit
def give_up(signal, wanted, comparison: tl.constexpr, seen, team):
    """Leave a record for the host and trap. The first thread to give up writes it.

    Threads of a program that give up need not be all: nothing here may wait for the rest, such as a reduction.

    record  int64: 0 state (1 claimed; written by a wait for 2 >=, 3 ==, 4 !=; 5 by symm_at, for a peer outside of the team:
            wanted is the peer, seen the team's size), 1 rank, 2 program, 3 line, 4 signal's
            address, 5 wanted, 6 seen, 7 patience in microseconds, 8..15 the kernel's name, 8 bytes each
    """
    if target_info.is_cuda():
        state: tl.constexpr = 3 if comparison == "==" else 4 if comparison == "!=" else 5 if comparison == "peer" else 2
        words = (
            tl.cast((team.coords >> 1) - 1, tl.int64),
            tl.program_id(0).to(tl.int64),
            tl.full((), kernel_line(), tl.int64),
            signal.to(tl.int64),
            tl.cast(wanted, tl.int64),
            tl.cast(seen, tl.int64),
            tl.full((), team.patience_us, tl.int64),
            tl.full((), kernel_name_int64(0), tl.int64),
            tl.full((), kernel_name_int64(1), tl.int64),
            tl.full((), kernel_name_int64(2), tl.int64),
            tl.full((), kernel_name_int64(3), tl.int64),
            tl.full((), kernel_name_int64(4), tl.int64),
            tl.full((), kernel_name_int64(5), tl.int64),
            tl.full((), kernel_name_int64(6), tl.int64),
            tl.full((), kernel_name_int64(7), tl.int64),
        )
        ptx.give_up(team.record, tl.full((), state, tl.int64), words)
