"""Sums of partial results in a fixed order, in fp32."""

import triton
import triton.language as tl


@triton.jit
def sum_of_partials(source, mask, stride, PARTIALS: tl.constexpr):
    """Sum of PARTIALS values, ``stride`` elements apart from ``source`` on, in this order, fp32."""
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    for partial in tl.static_range(1, PARTIALS):
        x += tl.load(source + partial * tl.cast(stride, tl.int64), mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def rounded_sum(source, mask, stride, PARTIALS: tl.constexpr, dtype: tl.constexpr):
    """``sum_of_partials`` rounded to ``dtype``, as ``matmul`` rounds its result; one value is not summed."""
    if PARTIALS == 1:
        return tl.load(source, mask=mask, other=0.0).to(dtype)
    else:
        return sum_of_partials(source, mask, stride, PARTIALS).to(dtype)


@triton.jit
def added(own, received, stride, at, n, BUFFERS: tl.constexpr):
    """own[at] + the sum of received[BUFFERS, stride][:, at], in order, in fp32; 0 from n on."""
    x = tl.load(own + at, mask=at < n, other=0.0).to(tl.float32)
    for buffer in tl.static_range(0, BUFFERS):
        source = received + tl.cast(buffer, tl.int64) * stride
        x += tl.load(source + at, mask=at < n, other=0.0).to(tl.float32)
    return x
