"""Partial sums of one result: read and added up in a fixed order, in fp32."""

import triton
import triton.language as tl


@triton.jit
def sum_of_parts(source, mask, part_stride, PARTS: tl.constexpr):
    """``source`` and what lies part_stride, 2 part_stride, ... elements behind it, added up in this order, fp32: how a kernel
    reads them."""
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(source + part * tl.cast(part_stride, tl.int64), mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def product_of_parts(source, mask, part_stride, PARTS: tl.constexpr, dtype: tl.constexpr):
    """``sum_of_parts`` rounded to ``dtype``, as ``matmul`` rounds its result; a single part is loaded as it is."""
    if PARTS == 1:
        return tl.load(source, mask=mask, other=0.0).to(dtype)
    else:
        return sum_of_parts(source, mask, part_stride, PARTS).to(dtype)


@triton.jit
def added(own, slots, slot_size, at, n, SLOTS: tl.constexpr):
    """own[at] + slots[0, at] + slots[1, at] + …, in fp32; 0 from n on."""
    x = tl.load(own + at, mask=at < n, other=0.0).to(tl.float32)
    for slot in tl.static_range(0, SLOTS):
        from_slot = slots + tl.cast(slot, tl.int64) * slot_size
        x += tl.load(from_slot + at, mask=at < n, other=0.0).to(tl.float32)
    return x
