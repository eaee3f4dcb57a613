"""Model of one-sided transfers between nodes, for transports to come: a put, with or without a signal.

ncclPutSignal, NCCL's device API and NVSHMEM deliver so. weft has no such transport yet: this runs on virtual ranks only, where
``weft check`` shows where a protocol on it relies on more than it promises.

    put(target, source, to, flag, epoch)   chunks in any order; the flag after the chunks of this put alone (a weak signal)
    signal(flag, epoch, to)                after nothing;  strong=True: after all earlier puts to that node
    fence(to)                              later puts and signals to that node come after all earlier ones
    quiet()                                all have arrived everywhere: sources may be written

What has arrived at one node says nothing about another.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from weft.arguments import check_int
from weft.errors import Unsupported
from weft.runtime.platforms.platform import address_of
from weft.runtime.platforms.virtual import Mark, VirtualPlatform, copy_in_pieces
from weft.simulator.machine.tasks import Waiting

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Chunks of a put, each delivered by itself.
_CHUNKS = 3


class PutLink:
    """One-sided transfers of this rank to the ranks of equal local rank in other nodes.

    Targets and flags are symmetric tensors of ``team.node``, allocated alike in all nodes.
    """

    def __init__(self, team: Team) -> None:
        platform = team._platform
        if not isinstance(platform, VirtualPlatform) or team.rail is None:
            raise Unsupported("puts between nodes are a model, for several nodes of virtual ranks; use team.rail")
        self._platform, self._machine, self._rail, self._node = platform, platform._machine, team.rail, team.node
        self._number = 0
        self._sent: defaultdict[int, list[Mark]] = defaultdict(list)  # by node: of all puts
        self._fenced: defaultdict[int, list[Mark]] = defaultdict(list)  # what later puts come after
        self._streams: list[str] = []

    def put(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        to: int,
        flag: torch.Tensor | None = None,
        epoch: torch.Tensor | None = None,
    ) -> None:
        """Write ``source`` to ``target`` at node ``to``; then ``epoch`` to ``flag`` there."""
        remote, marks = self._at(target, to), []
        for into, part in zip(remote.view(-1).chunk(_CHUNKS), source.view(-1).chunk(_CHUNKS), strict=True):
            marks.append(self._deliver(into, part, self._fenced[to]))
        self._sent[to] += marks
        if flag is not None:
            self._deliver(self._at(flag, to), epoch, [*self._fenced[to], *marks], signal=True)

    def signal(self, flag: torch.Tensor, epoch: torch.Tensor, to: int, *, strong: bool = False) -> None:
        """Write ``epoch`` to ``flag`` at node ``to``."""
        earlier = self._sent[to] if strong else self._fenced[to]
        self._deliver(self._at(flag, to), epoch, list(earlier), signal=True)

    def fence(self, to: int) -> None:
        """Order what follows to node ``to`` after all puts there so far."""
        self._fenced[to] = list(self._sent[to])

    def quiet(self) -> None:
        """Have the current stream wait until all has arrived."""
        for stream in self._streams:
            self._machine.join(stream)
        self._streams.clear()

    def _at(self, tensor: torch.Tensor, to: int) -> torch.Tensor:
        """The symmetric ``tensor`` of this node's team as the rank of equal local rank in node ``to`` has it."""
        if check_int("to", to, 0, self._rail.size - 1) == self._rail.index:
            raise ValueError(f"to={to} is this rank's own node; store within the node instead")
        heap = self._platform.heap_of_node(to)
        offset = address_of(tensor) - self._node._platform.heap.data_ptr()
        return heap[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _deliver(self, target: torch.Tensor, source: torch.Tensor, earlier: list[Mark], signal: bool = False) -> Mark:
        """Copy on a stream of its own, as soon as all of ``earlier`` have arrived."""
        machine, mark, label = self._machine, Mark(), f"transfer {self._number}"
        stream = f"put {self._number}"
        self._number += 1
        self._streams.append(stream)
        machine.settle()
        machine.observer.fork(stream)
        begin = machine.observer.enqueued(stream, label, [source, target])

        def run() -> None:
            begin()
            for before in earlier:
                machine.scheduler.block(Waiting(lambda b=before: b.is_reached, lambda: "comes after an earlier put"))
                machine.observer.learned(before.known)
            copy_in_pieces(machine, label, target, source, signal)
            mark.known, mark.is_reached = machine.observer.published(), True
            machine.scheduler.recheck()

        machine.enqueue(stream, label, run)
        return mark
