"""States of gated delta nets by slot: last rows of the convolution, the rule's matrices in fp32.

``Step.state_slots`` says which slots the sequences of a step have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.linear_attention.delta_rule import DeltaSizes


class DeltaStates:
    """States of the layers that have one, by slot.

    conv   [layers, slots, taps - 1, columns of q, k and v]; delta: fp32 [layers, slots, value heads, K, V]
    number of a layer among the layers with a state, or with pages, by its index; has_state: which it is
    """

    def __init__(
        self,
        has_state: Sequence[bool],
        slots: int,
        sizes: DeltaSizes,
        taps: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        layers = sum(has_state)
        self.conv = torch.zeros(layers, slots, taps - 1, sizes.columns, dtype=dtype, device=device)
        self.delta = torch.zeros(layers, slots, sizes.value_heads, sizes.K, sizes.V, device=device)
        self.has_state = tuple(has_state)
        self.number = tuple(sum(one == has for one in has_state[:index]) for index, has in enumerate(has_state))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's states."""
        return (self.conv.nbytes + self.delta.nbytes) // self.conv.shape[1]

    def check_holds(self, slots: Tensor) -> None:
        """ValueError for more sequences than there are slots. Values of ``slots`` may be on a device, and are not read."""
        if len(slots) > self.conv.shape[1]:
            raise ValueError(
                f"{len(slots)} sequences of a step, and a cache with states of {self.conv.shape[1]}; make it with "
                f"new_cache(pages, slots={len(slots)}) or more"
            )

    def layer(self, index: int) -> tuple[Tensor, Tensor] | None:
        """conv and delta [slots, …] of a layer; None: it has pages."""
        number = self.number[index]
        return (self.conv[number], self.delta[number]) if self.has_state[index] else None

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the states of slots ``sources`` to slots ``targets`` [n] int64."""
        for states in (self.conv, self.delta):
            states.index_copy_(1, targets, states[:, sources])
