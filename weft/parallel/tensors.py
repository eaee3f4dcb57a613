"""Types of tensors between two launches by their meaning, and of a rank's weights.

Rows that are still to be divided by their root mean squares are a ``DeferredNorm`` (weft.kernels.deferred_norm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import Fp8
from weft.ops.linear_attention.delta_rule import DeltaSizes
from weft.ops.moe.routing import ClampedSwiGLU, Experts, Gating, Routing, Schedule

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

Matrix = Tensor | Fp8 | FourBit
"""A weight of 16 or 32 bits, or quantized."""


@dataclass(frozen=True, slots=True)
class SplitK:
    """Split-K partials of one rank's GEMM, fp32 [parts, M, N], for the next kernel to add in this order."""

    parts: Tensor


@dataclass(frozen=True, slots=True)
class SliceNodes:
    """This rank's nodes of a sum over all ranks, [count, M, N], for the next kernel (weft.kernels.slices)."""

    nodes: Tensor

    def rows(self, rows: Tensor) -> SliceNodes:
        """The nodes of these rows of the sum."""
        return SliceNodes(self.nodes[:, rows])


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows h of this rank's experts before their second GEMM, which the next norm's op computes.

    shared, gate  of ``weft.ops.moe_sum``; bias of ``weft.ops.grouped_matmul``
    """

    h: Tensor | Fp8
    down: Matrix
    schedule: Schedule
    routing: Routing
    experts: Experts
    shared: Tensor | None
    gate: Tensor | None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PartialSum:
    """This rank's summand of a sum over all ranks, [M, N], or what the next kernels make it of."""

    summand: Tensor | SplitK | ExpertRows

    def rows(self, rows: Tensor) -> PartialSum:
        """The summand of these rows of the sum."""
        if isinstance(self.summand, SplitK):
            return PartialSum(SplitK(self.summand.parts[:, rows]))
        return PartialSum(self.summand[rows])


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """This rank's [M/W, N] of M rows, in rank order; padding to a multiple of W after the tokens."""

    rows: Tensor


def tensor_of(x: Tensor | SplitK | PartialSum | SequenceShard) -> Tensor:
    """The tensor inside, for a kernel or a caller that knows what it means."""
    if isinstance(x, PartialSum):
        x = x.summand
    if isinstance(x, SplitK):
        return x.parts
    return x.rows if isinstance(x, SequenceShard) else x


def rows_of(x: Tensor | PartialSum | SliceNodes, rows: Tensor) -> Tensor | PartialSum | SliceNodes:
    """These rows of ``x``, by its meaning."""
    return x[rows] if isinstance(x, Tensor) else x.rows(rows)


def own_rows(x: Tensor, team: Team) -> Tensor:
    """This rank's [ceil(M / W), N] of rows [M, N] that all ranks hold, padded as in a ``SequenceShard``."""
    count = -(-len(x) // team.size)
    rows = x[team.rank * count : (team.rank + 1) * count]
    return F.pad(rows, (0, 0, 0, count - len(rows))) if len(rows) < count else rows


class NormWeights(NamedTuple):
    """RMSNorm: weight [H]."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, norm: nn.RMSNorm) -> NormWeights:
        return cls(norm.weight, norm.eps)


class Scores(NamedTuple):
    """How a score becomes a share of the softmax: softcap * tanh(scale * q @ k.T / softcap).

    window   a token attends to this many tokens, itself the last one; None: to all before it
    scale    None: head_dim ** -0.5
    softcap  None: scale * q @ k.T
    sinks    [heads]: scores beside a row's, without a value; None: there are none
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN_SCORES = Scores()


class Lora(NamedTuple):
    """Adapters of one matrix [N, K] of a rank: P matrices of a checkpoint, one below another.

    A      [adapters, P * R, K]: R rows for each of P matrices, zeros after an adapter's rank
    B      [adapters, N, R], zeros after it too
    scale  [adapters] fp32
    ends   of the P matrices among the N rows
    """

    A: Tensor
    B: Tensor
    scale: Tensor
    ends: tuple[int, ...]


class AttentionWeights(NamedTuple):
    """One rank's heads: qkv [(heads + 2 kv_heads) * head_dim, H], o [H, heads * head_dim].

    q_norm, k_norm  [head_dim], the RMSNorms of each head before the rotary embedding; None: there are none
    unrotated       these norms come after the rotary embedding: number of the step's table of angles that turns nothing
    norm_all_heads  q_norm [heads * head_dim] and k_norm [kv_heads * head_dim] are this rank's part of RMSNorms over all heads
                    of all ranks
    bias            [(heads + 2 kv_heads) * head_dim], added to x @ qkv.T; None: there is none
    window, scale, softcap, sinks  as of ``Scores``
    o_bias          [H], added to the sum over the ranks; None: there is none
    rotary          number of the step's table of angles
    gated           rows of gates [heads * head_dim] lie before the rows of q
    qkv_lora, o_lora  adapters of both matrices; None: there are none
    """

    qkv: Matrix
    o: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    bias: Tensor | None = None
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    o_bias: Tensor | None = None
    rotary: int = 0
    sinks: Tensor | None = None
    norm_all_heads: bool = False
    gated: bool = False
    unrotated: int | None = None
    qkv_lora: Lora | None = None
    o_lora: Lora | None = None

    @property
    def last_matrix(self) -> Matrix | None:
        """Weight of the only GEMM that takes the rows, after any gates; None: adapters take them too."""
        return None if self.o_lora is not None else self.o

    @property
    def scores(self) -> Scores:
        return Scores(self.window, self.scale, self.softcap, self.sinks)

    def with_o_bias(self, y: Tensor) -> Tensor:
        """Rows [M, H] of the sum over the ranks, with the bias."""
        return y if self.o_bias is None else y + self.o_bias


class DeltaWeights(NamedTuple):
    """One rank's heads of a gated delta net: qkv [columns of q, k, v, z, b and a, H], o [H, heads * V].

    conv           [columns of q, k and v, taps]
    A_log, dt_bias [value heads] fp32
    norm           of each head's values, times silu(z)
    rates          [2 * value heads of all ranks, H]: b and a, not quantized; None: qkv has this rank's
    first_head     number of this rank's first value head
    """

    qkv: Matrix
    o: Matrix
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: NormWeights
    sizes: DeltaSizes
    rates: Tensor | None = None
    first_head: int = 0

    norm_all_heads = False

    def with_o_bias(self, y: Tensor) -> Tensor:
        return y


class DeltaColumns(NamedTuple):
    """Rows times ``qkv`` of ``DeltaWeights``, and times its ``rates``: [T, columns] both."""

    qkv: Tensor
    rates: Tensor


class MLAWeights(NamedTuple):
    """One rank's heads of latent attention, which attend to one latent and one rotary key of a token.

    qkv      rows of queries of these heads, [heads * (nope + rope), H], or q_a [q_lora_rank, H], which every rank has whole;
             then kv_a [latent + rope, H], of every rank
    q_norm   [q_lora_rank], of the RMSNorm of what q_a gives; q_b [heads * (nope + rope), q_lora_rank]. None: no q_a
    kv_norm  [latent], of the latent's RMSNorm, with ``eps`` as of q_norm
    kv_b     [heads, nope + value, latent], not quantized: keys without rotation, then values, from the latent
    o        [H, heads * value]
    scale    of scores
    interleaved  partners of the rotary embedding are neighbours in qkv
    """

    qkv: Matrix
    o: Matrix
    q_norm: Tensor | None
    q_b: Matrix | None
    kv_norm: Tensor
    kv_b: Tensor
    eps: float
    heads: int
    nope: int
    rope: int
    scale: float
    interleaved: bool

    # As of ``AttentionWeights``: one latent for all heads, and none of its options.
    kv_heads = 1
    window = None
    norm_all_heads = False

    def with_o_bias(self, y: Tensor) -> Tensor:
        """``y``: there is no bias."""
        return y

    @property
    def latent(self) -> int:
        """Elements of a token's latent."""
        return self.kv_norm.shape[0]

    @property
    def head_dim(self) -> int:
        """Elements of an expanded query or key."""
        return self.nope + self.rope


class MLPWeights(NamedTuple):
    """One rank's N intermediate features: gate_up [2 N, H], the gate's rows first; down [H, N].

    activation  of the gate, a key of ``ACTIVATIONS`` in weft.parallel.plain; or a key of ``UNGATED``, of an MLP without a gate,
                whose gate_up is up alone, [N, H]
    activation_weights  further arguments of an activation of ``UNGATED``
    gate_up_lora, down_lora  adapters of both matrices; None: there are none
    """

    gate_up: Matrix
    down: Matrix
    activation: str = "silu"
    gate_up_lora: Lora | None = None
    down_lora: Lora | None = None
    activation_weights: tuple[Tensor, ...] = ()

    @property
    def last_matrix(self) -> Matrix | None:
        """Weight of the only GEMM that takes the gated rows; None: adapters take them too."""
        return self.down if self.down_lora is None else None


class MoEWeights(NamedTuple):
    """The router, and one rank's experts or slices of experts, with N intermediate features each.

    router   [E, H], of all experts; a row more is that of the shared expert's gate. bias: fp32 [E], added to their scores for
             the choice, or None
    gate_up  [experts.count, 2 N, H], the gate's rows first; down [experts.count, H, N]
    shared   this rank's features of an MLP of all tokens, its result times the sigmoid of its gate if there is one; None: there
             is no such MLP
    tickets  int32 [1] zeros: arrival counter of ops.matmul_route_schedule and ops.moe_schedule; None: each call makes one,
             by a launch more
    logit_bias                 [E], added to the experts' logits
    gate_up_bias, down_bias    [experts.count, 2 N] and [experts.count, H]; of slices, only the first rank's down_bias is not 0
    swiglu                     None: silu(gate) * up
    slices                     ranks hold slices of all experts, also where there is one rank
    """

    router: Tensor
    bias: Tensor | None
    gate_up: Matrix
    down: Matrix
    experts: Experts
    gating: Gating
    shared: MLPWeights | None = None
    tickets: Tensor | None = None
    logit_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    swiglu: ClampedSwiGLU | None = None
    slices: bool = False

    @property
    def of_first(self) -> dict[str, Tensor | ClampedSwiGLU | None]:
        """Options of ``weft.ops.grouped_matmul_silu_mul`` that these experts ask for."""
        return {"bias": self.gate_up_bias, "swiglu": self.swiglu}

    def logits(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """(the experts' logits [T, E], the logits of the shared expert's gate [T] or None) of x @ router.T"""
        E = self.experts.total
        logits = scores[:, :E] if self.logit_bias is None else scores[:, :E] + self.logit_bias
        return logits, scores[:, E] if scores.shape[1] > E else None


NextWeights = Matrix | MoEWeights | DeltaWeights | None
"""Weights that the rows of a norm are for: experts have a router beside, a delta net ``rates``. None: rows of 16 bits."""


class LayerWeights(NamedTuple):
    """One rank's share of a decoder layer.

    input_norm, post_norm  of the rows that attention and MLP take; None: there is no norm before them
    attention_out_norm, mlp_out_norm  of the rows that attention and MLP give, before they are added to the residual; None:
               there is no norm after them
    residual_scale  factor of these rows, after the norm; None: 1
    """

    input_norm: NormWeights | None
    attention: AttentionWeights | DeltaWeights | MLAWeights
    post_norm: NormWeights | None
    mlp: MLPWeights | MoEWeights
    attention_out_norm: NormWeights | None = None
    mlp_out_norm: NormWeights | None = None
    residual_scale: float | None = None

    @property
    def attention_matrix(self) -> Matrix | None:
        """Weight of the only GEMM that takes the rows after ``input_norm``; None: not the only one."""
        attention, beside = self.attention, None
        if isinstance(attention, AttentionWeights):
            beside = attention.qkv_lora
        elif isinstance(attention, DeltaWeights):
            beside = attention.rates
        return attention.qkv if beside is None else None

    @property
    def before_attention(self) -> NextWeights:
        """Weights that rows after ``input_norm`` are for: ``attention_matrix``, or a net's with ``rates``."""
        attention = self.attention
        beside = isinstance(attention, DeltaWeights) and attention.rates is not None
        return attention if beside else self.attention_matrix

    @property
    def first_matrix(self) -> Matrix | None:
        """Weight of the only GEMM that takes the rows after ``post_norm``; None: not the only one."""
        return self.mlp.gate_up if isinstance(self.mlp, MLPWeights) and self.mlp.gate_up_lora is None else None

    @property
    def before_mlp(self) -> NextWeights:
        """Weights that the rows after ``post_norm`` are for: ``first_matrix``, or experts with their router."""
        return self.mlp if isinstance(self.mlp, MoEWeights) else self.first_matrix


class VocabWeights(NamedTuple):
    """One rank's rows of an embedding or a head: ids from ``start`` on, padding from row ``real`` on.

    scale             factor of an embedding's rows; None: 1
    divisor, softcap  of a head's logits: softcap * tanh(logits / divisor / softcap); None: without
    """

    weight: Matrix
    start: int
    real: int
    scale: float | None = None
    divisor: float | None = None
    softcap: float | None = None
