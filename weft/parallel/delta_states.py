"""States of gated delta nets: inputs of the last tokens, and the rule's matrices in fp32.

    index         state of
    b             batch slot b
    slots + i     snapshot i: of a prompt's first tokens, for prefix caching
    padding       no sequence: padding of prompts in CUDA graphs has it

A step with drafts leaves a state as it is after the first of its tokens, and the inputs of all. ``pending`` counts the
accepted ones that the state does not have yet: the next step begins with their updates. Inputs of rejected tokens are never
read, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.linear_attention.delta_rule import DeltaSizes
from weft.ops.linear_attention.gated_delta_net_step import DeltaSlots


class DeltaStates:
    """States of the layers that have one, by index.

    kept     ``DeltaSlots`` with the layers as a first dimension; its rings hold the inputs of the convolution, of a step's
             tokens and of the pending ones
    slots    batch slots; pending: int32 [slots]; drafts: of a slot in a step at most
    number of a layer among the layers with a state, or with pages, by its index; has_state: which it is
    """

    def __init__(
        self,
        has_state: Sequence[bool],
        slots: int,
        sizes: DeltaSizes,
        taps: int,
        *,
        drafts: int = 0,
        snapshots: int = 0,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.padding = slots + snapshots
        size, ring, heads = (sum(has_state), self.padding + 1), taps + 2 * drafts, sizes.value_heads
        self.kept = DeltaSlots(
            torch.zeros(*size, ring, sizes.columns, dtype=dtype, device=device),
            torch.zeros(*size, ring, 2 * heads, dtype=dtype, device=device),
            torch.zeros(*size, heads, sizes.K, sizes.V, device=device),
        )
        self.slots, self.drafts, self.pending = slots, drafts, torch.zeros(slots, dtype=torch.int32, device=device)
        self._numbers = torch.arange(slots, dtype=torch.int32, device=device)
        self.has_state = tuple(has_state)
        self.number = tuple(sum(one == has for one in has_state[:index]) for index, has in enumerate(has_state))

    @property
    def nbytes_of_one(self) -> int:
        """Bytes of a sequence's states, of all layers."""
        return sum(part.nbytes for part in self.kept) // self.kept.state.shape[1]

    def check_holds(self, slots: Tensor) -> None:
        """ValueError for more sequences than there are slots.

        Values of ``slots`` may be on a device, and are not read.
        """
        if len(slots) > self.slots:
            raise ValueError(
                f"{len(slots)} sequences of a step, and a cache with states of {self.slots}; make it with "
                f"new_cache(pages, slots={len(slots)}) or more"
            )

    def layer(self, index: int) -> DeltaSlots | None:
        """States of a layer; None: it has pages."""
        number = self.number[index]
        return DeltaSlots(*(part[number] for part in self.kept)) if self.has_state[index] else None

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the states of slots ``sources`` to slots ``targets`` [n] int64."""
        self._copy(sources, targets)
        self.pending.index_copy_(0, targets, self.pending[sources])

    def restore(self, snapshots: Tensor, slots: Tensor) -> None:
        """Copy snapshots to slots, for chunks of prompts; both [n] int64."""
        self._copy(self.slots + snapshots, slots)

    def save(self, slots: Tensor, snapshots: Tensor) -> None:
        """Copy to snapshots what prompts, or steps without drafts, have left in slots; both [n] int64."""
        self._copy(slots, self.slots + snapshots)

    def begin(self, slots: Tensor) -> None:
        """Have slots [n] int64 go on from what chunks of prompts have left there: no token is pending."""
        self.pending.index_fill_(0, slots, 0)

    def verified(self, batch: int) -> tuple[Tensor, Tensor]:
        """(state_slots, state_pending) of a Step with drafts of slots 0 .. batch - 1."""
        return self._numbers[:batch], self.pending[:batch]

    def accept(self, counts: Tensor) -> None:
        """Have slot b go on after the first counts[b] tokens of the step; 0: it had none."""
        pending = self.pending[: len(counts)]
        pending.copy_(torch.where(counts > 0, counts - 1, pending))

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy states by their indices [n] int64."""
        for part in self.kept:
            part.index_copy_(1, targets, part[:, sources])
