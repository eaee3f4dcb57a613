"""Tensor descriptors (TMA): addresses and in-bounds mask of a block of a strided tensor."""

from __future__ import annotations

import numpy as np
import triton.language as tl

from weft.errors import Misaligned
from weft.simulator.interpreter.values import numpy_dtype
from weft.simulator.places import Box, Places, Scattered, indices


class Descriptor:
    """Handle of a tensor descriptor: plain Python numbers."""

    def __init__(
        self,
        base: int,
        element: tl.dtype,
        shape: list[int],
        strides: list[int],
        block_shape: tuple[int, ...],
        nan: bool,
    ) -> None:
        self.base, self.element, self.shape, self.strides = base, element, shape, strides
        self.block_shape, self.nan, self.round_to_tf32 = block_shape, nan, False
        self.dtype = numpy_dtype(element)
        self.itemsize = self.dtype.itemsize
        if base % 16:
            raise Misaligned(f"a tensor descriptor's base must be 16-byte aligned, got address {base % 2**48:#x}")
        for stride in strides[:-1]:
            if stride * self.itemsize % 16:
                raise Misaligned(f"a descriptor's strides must be multiples of 16 bytes, got {stride} of {element}")
        if strides[-1] != 1:
            raise ValueError(f"the last stride of a tensor descriptor must be 1, got {strides[-1]}")
        self._bytes = tuple(stride * self.itemsize for stride in strides)
        self._is_box = min(strides) >= 0
        # Greatest offsets of a block that is not cut off.
        self._whole = [length - size for length, size in zip(shape, block_shape, strict=True)]
        self._relative: np.ndarray | None = None

    def locate(self, offsets: list[int | np.ndarray]) -> Places:
        """Places of the block at ``offsets``, masked within bounds; all but the last may be arrays (gather)."""
        if offsets[-1] * self.itemsize % 16:
            raise Misaligned(
                f"a descriptor's block must start at a multiple of 16 bytes, got offset {offsets[-1]} of {self.element}"
            )
        if not self._is_box or np.ndarray in map(type, offsets):
            return self._scattered(offsets)
        start, is_whole = self.base, True
        for offset, stride, most in zip(offsets, self._bytes, self._whole, strict=True):
            start += offset * stride
            if not 0 <= offset <= most:
                is_whole = False
        inside = None
        if not is_whole:
            bounds = zip(offsets, self.block_shape, self.shape, strict=True)
            inside = tuple([(max(0, -offset), min(size, length - offset)) for offset, size, length in bounds])
        return Box(start, self.block_shape, self._bytes, inside, self.itemsize)

    def _scattered(self, offsets: list[int | np.ndarray]) -> Scattered:
        steps = indices(self.block_shape)
        if self._relative is None:
            self._relative = sum(step * by for step, by in zip(steps, self._bytes, strict=True)).view(np.uint64)
        start = sum(offset * by for offset, by in zip(offsets, self._bytes, strict=True)) + self.base
        start = start.view(np.uint64) if isinstance(start, np.ndarray) else np.uint64(start % 2**64)
        addresses, mask = self._relative + start, None
        for offset, step, size in zip(offsets, steps, self.shape, strict=True):
            at = step + offset
            inside = (at >= 0) & (at < size)
            mask = inside if mask is None else mask & inside
        return Scattered(addresses, np.broadcast_to(mask, addresses.shape), self.itemsize)
