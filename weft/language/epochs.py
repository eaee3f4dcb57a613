"""Device-side epochs: the number of a call lies in device memory, for replays of CUDA graphs.

``epoch`` points to two int32 of this rank, both 0 at first: the number of epochs that have ended, and the number of programs of
the current epoch that have ended. Kernels that share them must be ordered by a stream.
"""

import triton
import triton.language as tl

from weft.language.arguments import check_epoch
from weft.language.lowering import stock


@triton.jit
def next_epoch(epoch):
    """Number of this launch, 1 at the first, the same in all its programs."""
    check_epoch("next_epoch", epoch)
    stock.begins_epoch(epoch)
    return tl.load(epoch) + 1


@triton.jit
def advance_epoch(epoch, now):
    """End this program's part of epoch ``now``; the last program of the grid ends the epoch.

    Every program calls it once, at its end.
    """
    check_epoch("advance_epoch", epoch)
    stock.ends_epoch(epoch)
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    # acq_rel: every program reads the epoch before it adds to the arrival counter, and so before the last one's store.
    tl.debug_barrier()
    ended = tl.atomic_add(epoch + 1, 1, sem="acq_rel", scope="gpu") + 1
    if ended == programs:
        tl.store(epoch + 1, 0)
        tl.store(epoch, now)
