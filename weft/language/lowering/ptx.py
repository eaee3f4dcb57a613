"""All assembly for NVIDIA GPUs. Each function names its instruction and why stock Triton lacks it.

All threads of the program run each function; where one thread must act, the predicate is inside.
"""

import triton
import triton.language as tl


@triton.jit
def store_release_sys(ptr, value):
    """``st.release.sys`` by one thread.

    Stock Triton has release atomics only, whose result would cross the link back.
    """
    if ptr.dtype.element_ty.primitive_bitwidth == 64:
        tl.inline_asm_elementwise(
            "{ .reg .pred one; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 one, t, 0; "
            "@one st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l", [ptr, tl.cast(value, tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred one; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 one, t, 0; "
            "@one st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r", [ptr, tl.cast(value, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def drain_bulk_stores():
    """``cp.async.bulk.wait_group 0``: this thread's bulk stores are complete and visible.

    Stock Triton emits the ``.read`` form, after which shared memory may be reused but the data need not have landed.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fence_proxy_async():
    """``fence.proxy.async.global``: later bulk (TMA) loads of this thread see what generic loads may see."""
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fence_acq_rel_sys():
    """``fence.acq_rel.sys`` in every thread (``__threadfence_system``)."""
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_bulk_l2(ptr, nbytes):
    """``cp.async.bulk.prefetch.L2`` of ``nbytes`` from ``ptr`` on, for each element of both.

    None where ``nbytes`` is 0. Stock Triton has no prefetch.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.ne.u32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [ptr, nbytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def zero():
    """Zero from a volatile ``mov``: code that depends on it is not moved before it or out of a loop."""
    return tl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def globaltimer_us():
    """Microseconds of the GPU's global clock, int64."""
    ns = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    return ns // 1000


@triton.jit
def trap():
    """End the kernel with an error that the host sees at its next call."""
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
