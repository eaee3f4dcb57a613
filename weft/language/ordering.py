"""``fence`` and ``quiet`` with their OpenSHMEM meaning, and the order of a kernel in its stream."""

import triton
import triton.language as tl

from weft.language.arguments import check_team
from weft.language.lowering import stock


@triton.jit
def gather_stores():
    """CTA barrier after which the release of one thread covers the stores of all threads.

    For releases other than ``notify``, such as atomic operations.
    """
    stock.complete_stores()
    tl.debug_barrier()


@triton.jit
def fence(team):
    """Order deliveries: puts and stores to any peer before it are delivered before later ones.

    This includes ``_nbi`` puts. It completes nothing: sources of ``put_nbi`` and targets of ``get_nbi`` belong to the copy
    until ``quiet``.
    """
    check_team("fence", team)
    stock.drain_tma_stores()
    gather_stores()
    stock.fence_system(team.barriers)
    tl.debug_barrier()


@triton.jit
def quiet(team):
    """Complete this program's earlier puts and gets, ``_nbi`` included: they are visible at their targets.

    Sources of puts may be overwritten and targets of gets may be read afterwards.
    """
    stock.complete_copies()
    fence(team)


@triton.jit
def wait_for_previous_kernel():
    """Wait until all earlier work of this kernel's stream has ended and is visible.

    A kernel launched with ``launch_pdl=True`` (programmatic dependent launch, sm_90 on) calls it before it touches memory
    that earlier kernels write, and before it writes memory that they read. Memory that they do not write, such as weights, may
    be loaded or prefetched before. Every program calls it, so that a kernel's end implies the end of all kernels before it.
    ``weft check`` finds accesses that come too early, and programs that do not call it. Elsewhere the kernels of a stream never
    overlap, and it does nothing.
    """
    stock.wait_for_previous_kernel()


@triton.jit
def let_next_kernel_start():
    """Hint that programs of the next kernel may start where this kernel's programs leave room.

    It takes effect once all programs of this kernel have called it or ended, so later programs never keep one of these from
    starting. The next kernel sees this kernel's stores after ``wait_for_previous_kernel``, wherever this is called. A next
    kernel launched without ``launch_pdl=True`` still waits for this one's end.
    """
    stock.let_next_kernel_start()


@triton.jit
def follow_previous_kernel():
    """``wait_for_previous_kernel``, then ``let_next_kernel_start``.

    The launch overlaps with the kernel before, which saves 0.36 of 2.7 us (H200, one-shot all-reduce of 4 KiB, W=2).
    """
    wait_for_previous_kernel()
    let_next_kernel_start()
