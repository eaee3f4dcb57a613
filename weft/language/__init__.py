"""Device primitives of kernels: ``import weft.language as wl``.

Each primitive states what it guarantees. Memory order belongs to the verb (``notify`` releases, ``wait`` acquires); no flag
weakens it. ``weft.language.shmem`` offers the same primitives under OpenSHMEM's names.
"""

from weft.language import shmem
from weft.language.bulk import get, get_nbi, put, put_nbi, put_signal, put_signal_nbi
from weft.language.channels import advance_call, chunk_notify, chunk_wait, current_call, next_call
from weft.language.coordinates import num_ranks, rank, symm_at
from weft.language.documenting import document as _document
from weft.language.epochs import advance_epoch, next_epoch
from weft.language.grid import grid_barrier
from weft.language.hints import prefetch, zero_here
from weft.language.lamport import (
    lamport_clear,
    lamport_load,
    lamport_load_keyed,
    lamport_receive,
    lamport_receive_keyed,
    lamport_store,
)
from weft.language.lowering import simulated as _simulated  # noqa: F401  (registers the primitives that the simulator runs)
from weft.language.multimem import multimem_load_reduce, multimem_store
from weft.language.ordering import (
    fence,
    follow_previous_kernel,
    gather_stores,
    let_next_kernel_start,
    quiet,
    wait_for_previous_kernel,
)
from weft.language.signals import barrier, consume_token, notify, wait
from weft.language.spans import begin_put, begin_tile, end_put, end_tile
from weft.language.waits import wait_all, wait_any

__all__ = [
    "advance_call", "advance_epoch", "barrier", "begin_put", "begin_tile", "chunk_notify", "chunk_wait", "consume_token",
    "current_call", "end_put", "end_tile", "fence", "follow_previous_kernel", "gather_stores", "get", "get_nbi", "grid_barrier",
    "lamport_clear", "lamport_load", "lamport_load_keyed", "lamport_receive", "lamport_receive_keyed", "lamport_store",
    "let_next_kernel_start", "multimem_load_reduce", "multimem_store", "next_call", "next_epoch", "notify", "num_ranks",
    "prefetch", "put", "put_nbi", "put_signal", "put_signal_nbi", "quiet", "rank", "shmem", "symm_at", "wait",
    "wait_all", "wait_any", "wait_for_previous_kernel", "zero_here",
]  # fmt: skip

_document(globals()[name] for name in __all__)
_document(vars(shmem).values())
