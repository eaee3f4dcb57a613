"""Rails: transfers between the ranks of equal local rank, one of each node.

Ranks of one node share memory; ranks of different nodes do not. What crosses goes over a rail: two-sided transfers of an
engine that exists (NCCL, gloo on CPUs) on a separate stream, with a flag of this rank's after each. Kernels know nothing
of it: they run within a node, on what has landed.

    rail.fork()                                       after the work that made the pieces' sources
    marks = rail.exchange(pieces, epoch)              on all ranks of the rail, in one order
    rail.after(marks[0])                              the current stream may read what piece 0 received
    rail.join()                                       and write the sources of all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weft.arguments import check_instance, check_int, quoted
from weft.runtime.dense import check_dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One transfer of this rank over its rail: a tensor that it sends, one that it receives, or both.

    send     contiguous tensor for node ``to``; None: nothing is sent
    receive  contiguous tensor, of the size and dtype that node ``source`` sends; None: nothing is received
    landed   int32 [1] of this rank, which gets the epoch after the received data; None: no flag
    """

    send: torch.Tensor | None = None
    to: int | None = None
    receive: torch.Tensor | None = None
    source: int | None = None
    landed: torch.Tensor | None = None


class RailEngine(Protocol):
    """Ordered two-sided transfers beside the compute stream."""

    def fork(self) -> None: ...

    def move(self, piece: Piece, epoch: torch.Tensor | None, number: int) -> Any:
        """Enqueue one piece. Returns a mark for ``after``."""

    def after(self, mark: Any) -> None: ...

    def join(self) -> None: ...


class Rail:
    """This rank's end of its rail.

    index       number of this rank's node
    size        number of nodes
    sent_bytes  that this rank has enqueued for other nodes so far; a replayed CUDA graph does not count

    A rail's transfers are made one after the other, in the order of the calls. The k-th piece that one rank sends to another
    is the k-th that this one receives from it. So all ranks of a rail make matching calls in the same order. Two-sided NCCL
    runs a kernel: no grid that fills the GPU may wait for a piece. Wait in stream order, by ``after`` or by one program.
    All of it may be captured in a CUDA graph with NCCL, after one run outside.
    """

    def __init__(self, engine: RailEngine, index: int, size: int) -> None:
        self._engine, self.index, self.size = engine, index, size
        self.sent_bytes = self._pieces = 0

    def __repr__(self) -> str:
        return f"Rail(index={self.index}, size={self.size})"

    def fork(self) -> None:
        """Have the rail wait for all work submitted to the current stream so far: the pieces' sources."""
        self._engine.fork()

    def exchange(self, pieces: Sequence[Piece], epoch: torch.Tensor | None = None) -> list[Any]:
        """Enqueue the pieces in this order. Returns a mark of each, for ``after``.

        epoch  int32 [1] of this rank, copied to each piece's ``landed`` after its data. Pairs with a kernel's
               ``wait(landed, epoch)``

        Between ``fork`` and ``after`` or ``join`` no source may be written, and nothing received be read. ValueError for
        pieces that are strided, name this node or no node, or have a flag without an epoch.
        """
        for number, piece in enumerate(pieces):
            self._check(f"pieces[{number}]", piece, epoch)
        marks = []
        for piece in pieces:
            marks.append(self._engine.move(piece, epoch, self._pieces))
            self._pieces += 1
            self.sent_bytes += piece.send.nbytes if piece.send is not None else 0
        return marks

    def after(self, mark: Any) -> None:
        """Have the current stream wait for one piece: what it received may be read, what it sent be written."""
        self._engine.after(mark)

    def join(self) -> None:
        """Have the current stream wait for all pieces so far."""
        self._engine.join()

    def _check(self, name: str, piece: Any, epoch: torch.Tensor | None) -> None:
        check_instance(name, piece, Piece, "a Piece of weft.Piece(send=, to=, receive=, source=)")
        ends = (("send", piece.send, "to", piece.to), ("receive", piece.receive, "source", piece.source))
        for what, tensor, which, node in ends:
            if (tensor is None) != (node is None):
                raise ValueError(f"{name}: {what} and {which} go together; pass both or neither")
            if tensor is None:
                continue
            check_dense(f"{name}.{what}", tensor)
            if not tensor.is_contiguous():
                raise ValueError(f"{name}.{what} has strides {tensor.stride()}; pass a contiguous tensor")
            if check_int(f"{name}.{which}", node, 0, self.size - 1) == self.index:
                raise ValueError(f"{name}.{which}={node} is this rank's own node; copy within the node instead")
        if piece.landed is not None and (piece.receive is None or epoch is None):
            raise ValueError(f"{name}: landed is a flag written after received data; pass receive= and the epoch")
        for what, flag in ((f"{name}.landed", piece.landed), ("epoch", epoch)):
            if flag is not None and (flag.dtype != torch.int32 or flag.numel() != 1):
                raise ValueError(f"{what}={quoted(flag)} is not an int32 tensor of one element")
