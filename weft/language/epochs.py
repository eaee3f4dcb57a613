"""Device-side epochs: a kernel learns which call it is from device memory, so a captured CUDA graph replays correctly.

``epoch`` points to two int32 words of this rank, both 0 at first: the epochs that have ended, and how many programs of the
current one have. Kernels that share the words must be ordered by a stream.
"""

import triton
import triton.language as tl

from weft.language.arguments import check_epoch


@triton.jit
def next_epoch(epoch):
    """The number of this launch, 1 at the first. The same in all its programs."""
    check_epoch("next_epoch", epoch)
    return tl.load(epoch) + 1


@triton.jit
def advance_epoch(epoch, now):
    """Called once by every program of the grid at its end; the last one makes ``now`` the epoch that has ended."""
    check_epoch("advance_epoch", epoch)
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    # acq_rel: every program's read of the epoch, before its own ticket, comes before the last one's store.
    tl.debug_barrier()
    ended = tl.atomic_add(epoch + 1, 1, sem="acq_rel", scope="gpu") + 1
    if ended == programs:
        tl.store(epoch + 1, 0)
        tl.store(epoch, now)
