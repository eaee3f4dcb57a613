"""The gated delta rule: sizes, arguments and plain-torch reference that its two ops share.

S = S * exp(g);  S = S + k (beta (v - S.T k)).T;  out = S.T q / sqrt(K)        S [K, V], of each value head, token by token

q and k are divided by their lengths (L2, epsilon 1e-6); g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.arguments import quoted
from weft.ops.linear_attention.sequence_chunks import check_columns
from weft.ops.local import check_like
from weft.ops.registration import FLOATS

L2_EPS = tl.constexpr(1e-6)
HEAD_DIMS = (16, 32, 64, 128)


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta rule, a compile-time constant.

    key_heads, value_heads  the latter a multiple of the former: neighbours share a key head
    K, V                    elements of a head of q and k, and of v
    """

    key_heads: int
    value_heads: int
    K: int
    V: int

    @property
    def columns(self) -> int:
        """Columns of q, k and v of a token."""
        return 2 * self.key_heads * self.K + self.value_heads * self.V


class Gates(NamedTuple):
    """Decays and learning rates of all tokens before their functions.

    a, b            [T, value heads] of the dtype of q, k and v; they may be columns of a wider tensor
    A_log, dt_bias  [value heads] fp32
    """

    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def rows(self, rows: slice) -> Gates:
        """The same of these tokens."""
        return self._replace(a=self.a[rows], b=self.b[rows])


@triton.jit
def softplus(x):
    return tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20))))


@triton.jit
def decay_and_rate(gates, strides, row, exists, head):
    """(g, beta) of rows of tokens, fp32; zeros where none ``exists``. strides: of a and b."""
    a = tl.load(gates.a + row * strides[0] + head, mask=exists, other=0).to(tl.float32) + tl.load(gates.dt_bias + head)
    b = tl.load(gates.b + row * strides[1] + head, mask=exists, other=0).to(tl.float32)
    g = -tl.exp(tl.load(gates.A_log + head)) * softplus(a)
    return tl.where(exists, g, 0.0), tl.where(exists, tl.sigmoid(b), 0.0)


def check_delta_rule(op: str, qkv: torch.Tensor, gates: Gates, state: torch.Tensor) -> DeltaSizes:
    """Sizes of a call. ValueError for tensors that do not fit each other."""
    check_like(op, "qkv", qkv, None, FLOATS)
    check_columns(op, "qkv", qkv)
    check_like(op, "state", state, qkv.device, (torch.float32,), ("slots", "value heads", "K", "V"))
    if not state.is_contiguous():
        raise ValueError(f"{op}: state has strides {state.stride()}; it is written in place, so pass it contiguous")
    _, heads, K, V = state.shape
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        raise ValueError(f"{op}: state has heads of {K} x {V}; kernels take {', '.join(map(str, HEAD_DIMS))}")
    of_keys = qkv.shape[1] - heads * V
    if of_keys <= 0 or of_keys % (2 * K) or heads % (of_keys // (2 * K)):
        raise ValueError(
            f"{op}: qkv has {qkv.shape[1]} columns; {heads} value heads of {V} have {heads * V}, and each key "
            f"head 2 * {K}, where their number divides that of value heads"
        )
    if not isinstance(gates, Gates):
        raise ValueError(f"{op}: gates={quoted(gates)} are not Gates; pass Gates(a, b, A_log, dt_bias)")
    for name in ("a", "b"):
        tensor = getattr(gates, name)
        check_like(op, f"gates.{name}", tensor, qkv.device, (qkv.dtype,), (qkv.shape[0], heads))
        check_columns(op, f"gates.{name}", tensor)
    for name in ("A_log", "dt_bias"):
        tensor = getattr(gates, name)
        check_like(op, f"gates.{name}", tensor, qkv.device, (torch.float32,), (heads,))
    return sizes_of(qkv, state)


def check_head_dims(K: int, V: int, taps: int) -> None:
    """ValueError unless kernels take a model's heads, and its convolution."""
    if K not in HEAD_DIMS or V not in HEAD_DIMS or not 2 <= taps <= 4:
        raise ValueError(
            f"linear_key_head_dim={K}, linear_value_head_dim={V}, linear_conv_kernel_dim={taps}: weft's kernels take heads of "
            f"{', '.join(map(str, HEAD_DIMS))} and a convolution of 2 to 4; pass fused=False"
        )


def sizes_of(qkv: torch.Tensor, state: torch.Tensor) -> DeltaSizes:
    _, heads, K, V = state.shape
    return DeltaSizes((qkv.shape[1] - heads * V) // (2 * K), heads, K, V)


def kernel_gates(gates: Gates) -> tuple[Gates, tuple[int, int]]:
    """Gates as kernels take them, and the strides of a and b."""
    return gates._replace(A_log=gates.A_log.contiguous(), dt_bias=gates.dt_bias.contiguous()), (
        gates.a.stride(0),
        gates.b.stride(0),
    )


class Recurrence(NamedTuple):
    """Inputs of the recurrence after their functions, one row a token.

    q, k [T, value heads, K], q over the root of K; v [T, value heads, V]; decay = exp(g), beta [T, value heads]
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def of(cls, qkv: torch.Tensor, gates: Gates, sizes: DeltaSizes) -> Recurrence:
        """In plain torch, in qkv's dtype."""
        keys, group = sizes.key_heads * sizes.K, sizes.value_heads // sizes.key_heads
        q, k, v = qkv.split([keys, keys, sizes.value_heads * sizes.V], dim=1)
        q, k = (x.unflatten(1, (sizes.key_heads, sizes.K)) for x in (q, k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, k = (x.repeat_interleave(group, dim=1) for x in (q * sizes.K**-0.5, k))
        softplus = torch.nn.functional.softplus(gates.a + gates.dt_bias)
        decay = (-gates.A_log.exp() * softplus).exp()
        return cls(q, k, v.unflatten(1, (sizes.value_heads, sizes.V)), decay, gates.b.sigmoid())

    def steps(self, state: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(out, state) after each token; of several sequences where there are dimensions after that of tokens."""
        for q, k, v, decay, beta in zip(*self, strict=True):
            state = state * decay[..., None, None]
            delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
            state = state + k[..., None] * delta[..., None, :]
            yield (state * q[..., None]).sum(-2), state

    def run(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T, value heads, V], states [T, value heads, K, V] after tokens) of one sequence."""
        outs, states = [], []
        for out, after in self.steps(state):
            outs.append(out)
            states.append(after)
        empty = self.v.new_empty
        return (
            torch.stack(outs) if outs else empty(self.v.shape),
            torch.stack(states) if states else empty(0, *state.shape),
        )

    def rows(self, first: int, count: int) -> Recurrence:
        return Recurrence(*(x[first : first + count] for x in self))
