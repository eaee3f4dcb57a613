"""States of gated delta nets: last rows of the convolution, the rule's matrices in fp32.

    index                 state of
    b                     batch slot b, after a chunk of a prompt or after the first token of a step
    j * slots + b         batch slot b, after token j + 1 of a step with drafts, j = 1 … drafts
    (1 + drafts) * slots + i   snapshot i: of a prompt's first tokens, for prefix caching
    padding               no sequence: padding of prompts in CUDA graphs has it

A step with drafts reads a slot's newest state at ``current``, and writes a state after each of its tokens. The state after the
last accepted token becomes the newest: states of rejected tokens are never read, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.linear_attention.delta_rule import DeltaSizes


class DeltaStates:
    """States of the layers that have one, by index.

    conv   [layers, states, taps - 1, columns of q, k and v]; delta: fp32 [layers, states, value heads, K, V]
    slots  batch slots; current: int32 [slots], index of each slot's newest state
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
        """`drafts`: of a slot in a step at most."""
        self._first_snapshot = slots * (1 + drafts)
        self.padding = self._first_snapshot + snapshots
        layers, states = sum(has_state), self.padding + 1
        self.conv = torch.zeros(layers, states, taps - 1, sizes.columns, dtype=dtype, device=device)
        self.delta = torch.zeros(layers, states, sizes.value_heads, sizes.K, sizes.V, device=device)
        self.slots, self.current = slots, torch.arange(slots, dtype=torch.int32, device=device)
        self.has_state = tuple(has_state)
        self.number = tuple(sum(one == has for one in has_state[:index]) for index, has in enumerate(has_state))

    @property
    def nbytes_of_one(self) -> int:
        """Bytes of a sequence's states after one token, of all layers."""
        return (self.conv.nbytes + self.delta.nbytes) // self.conv.shape[1]

    def check_holds(self, slots: Tensor) -> None:
        """ValueError for more sequences than there are slots.

        Values of ``slots`` may be on a device, and are not read.
        """
        if len(slots) > self.slots:
            raise ValueError(
                f"{len(slots)} sequences of a step, and a cache with states of {self.slots}; make it with "
                f"new_cache(pages, slots={len(slots)}) or more"
            )

    def layer(self, index: int) -> tuple[Tensor, Tensor] | None:
        """conv and delta [states, …] of a layer; None: it has pages."""
        number = self.number[index]
        return (self.conv[number], self.delta[number]) if self.has_state[index] else None

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the newest states of slots ``sources`` to slots ``targets`` [n] int64."""
        self._copy(self.current[sources].long(), targets)
        self.begin(targets)

    def restore(self, snapshots: Tensor, slots: Tensor) -> None:
        """Copy snapshots to slots, for chunks of prompts; both [n] int64."""
        self._copy(self._first_snapshot + snapshots, slots)

    def save(self, slots: Tensor, snapshots: Tensor) -> None:
        """Copy to snapshots what chunks of prompts have left in slots; both [n] int64."""
        self._copy(slots, self._first_snapshot + snapshots)

    def begin(self, slots: Tensor) -> None:
        """Have slots [n] int64 go on from the states that chunks of prompts, or copies, have left there."""
        self.current.index_copy_(0, slots, slots.to(torch.int32))

    def verified(self, batch: int, queries: int) -> tuple[Tensor, Tensor]:
        """(state_slots [batch], state_after [batch * queries]) of a Step with drafts of slots 0 .. batch - 1."""
        slot = torch.arange(batch, dtype=torch.int32, device=self.current.device)
        token = torch.arange(queries, dtype=torch.int32, device=slot.device)
        return self.current[:batch], (slot[:, None] + token * self.slots).flatten()

    def accept(self, counts: Tensor) -> None:
        """Have slot b go on from the state after the first counts[b] tokens of the step; 0: it had none."""
        slot, now = torch.arange(len(counts), device=counts.device), self.current[: len(counts)]
        now.copy_(torch.where(counts > 0, slot + (counts - 1) * self.slots, now))

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy states by their indices [n] int64."""
        for states in (self.conv, self.delta):
            states.index_copy_(1, targets, states[:, sources])
