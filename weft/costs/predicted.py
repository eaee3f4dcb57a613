"""Predicted time of a call of an op, in seconds, with an error bar.

    predict("matmul_reduce_scatter", (8192, 5120, 12800), world_size=2, gpu="h200").seconds

Times are of a call in a row of a CUDA graph, as in a model's step: a call alone takes some 5 µs more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from weft.arguments import did_you_mean, quoted
from weft.costs import attention, exchanges, fitted, gemms, grouped, pushes
from weft.costs.gpu import Gpu, named
from weft.plan.memo import remembered
from weft.runtime.arithmetic import next_power_of_2

# Errors on committed rows: op -> world size -> (rows, mean absolute error of those that the fit has seen, of the others,
# largest); where the fit has seen all or none, both means are of all.
ERRORS = Path(__file__).parent / "errors.json"
# Error bars of what no committed row shows: of an op, of a world size of a known op, and of a GPU without rows, which adds.
UNKNOWN_OP, UNKNOWN_SIZE, UNKNOWN_GPU = 0.25, 0.15, 0.2
# GPUs of the committed rows.
MEASURED = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
# Variants of quantized weights -> bytes of a weight with its share of a scale. "four_bit": MXFP4.
WEIGHTS = {"block_fp8": 1.0, "channel_fp8": 1.0, "four_bit": 0.53, "int4": 0.53}
# µs that a norm takes longer where it writes fp8, and bytes of each element that it moves besides, as it were: one H200, 128
# and 4,096 rows of 5,120 columns 3.5 and 55.3 us, in 16 bits 2.5 and 43.3 (benchmarks/lab/h200-fp8-rows.json).
ROUNDING, ROUNDED = 0.9, 2.4
# Bytes that a norm moves for each element.
NORMED = 8
# Router, choice and schedule, by one H200 (benchmarks/lab/h200-route-parts.json, h200-route.json). Three launches: time besides
# theirs. One launch: its time, and factor of the time in which it reads the router, of one token and of more; its last program
# takes 1 us for 1,450 logits and 4 for twice as many.
SEQUENTIAL_ROUTING, FUSED_ONE, FUSED_ROUTING, FUSED_PACE = 1.1, (3.5, 4.2), (6.2, 2.7), 1450.0
# Most logits of one launch, tokens and experts rounded up to powers of two: its last program holds 32 a thread of 8 warps.
FUSED_LOGITS = 8192
# Suffix of an op whose rows are in the order of arrival.
LOCAL_FIRST, FP8_WIRE = "local_first", "fp8_wire"
# Bytes of an element of rows that are sent to experts in fp8, with its share of a scale.
SENT = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Time of a call.

    seconds  by the fastest design, or by the one that was asked for
    error    relative: about two thirds of calls are expected within seconds * (1 ± error)
    design   of ``seconds``; "" for an op with one
    by_design  seconds of each design
    """

    seconds: float
    error: float
    design: str
    by_design: Mapping[str, float]


def predict(
    op: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    world_size: int = 1,
    gpu: str = "NVIDIA H200",
    design: str = "auto",
) -> Predicted:
    """Predicted time of a call of ``op``.

    op      name in weft.ops, with a variant as ``weft bench`` names it: moe_dispatch+fp8, matmul+block_fp8, matmul+four_bit;
            rows beside weights in fp8 are in fp8. Also matmul+int4, all_reduce_rms_norm+fp8 with a norm that writes fp8.
            Of ops with a GEMM and a collective further "+local_first": all ranks' rows begin with this rank's; of ops that
            add up over the ranks "+fp8_wire": sums travel in fp8.
            Also "memory", a kernel that reads and writes (bytes,), such as a norm
    shape   as ``weft bench`` has it for the op:
            (M, N, K) of a GEMM, M rows of the whole GEMM, N and K of one rank's; (bytes,) of a collective's whole tensor;
            (M, H) of all_reduce_rms_norm; (tokens, k, experts, held, hidden, features) of a mixture of experts, tokens of a
            rank where rows are sent and of all ranks elsewhere; (sequences times KV heads, tokens, head_dim) of decode
            attention; (sequences, q_heads, kv_heads, head_dim, context) of sharded_decode_attention; (tokens, q_heads,
            kv_heads, head_dim) of a prompt's attention, of this rank's heads or, gathered, of all ranks'
    gpu     a shipped GPU ("h200", "b200"), or a driver's name; constants of another GPU are the nearest shipped one's
    design  "auto": the fastest

    ValueError for an op, a shape or a design that there is not.
    """
    name, variant, _ = _named(op)
    times = times_of(op, tuple(shape), dtype.itemsize, world_size, named(gpu))
    if design != "auto" and design not in times:
        raise ValueError(f"design={quoted(design)} of {name} has no costs; pass one of auto, {', '.join(times)}")
    chosen = min(times, key=lambda one: times[one]) if design == "auto" else design
    by_design = {one: us * 1e-6 for one, us in times.items()}
    error = error_of(f"{name}+{variant}", world_size, named(gpu).gpu)
    return Predicted(seconds=by_design[chosen], error=error, design=chosen, by_design=by_design)


def error_of(op: str, world_size: int, gpu: str) -> float:
    """Relative error bar of an op's predicted times; of a variant without rows, the one of the op."""
    known = errors().get(op) or errors().get(op.partition("+")[0], {})
    if str(world_size) in known:
        error = max(known[str(world_size)][1:3])
    else:
        error = UNKNOWN_SIZE + min((row[2] for row in known.values()), default=UNKNOWN_OP - UNKNOWN_SIZE)
    return error if gpu in MEASURED else error + UNKNOWN_GPU


def _named(op: str) -> tuple[str, str, list[str]]:
    """(name, variant of weights or rows, further fields of ``Asked``) of an op as ``predict`` takes it."""
    name, *variants = op.replace("-", "_").split("+")
    further = [one for one in (LOCAL_FIRST, FP8_WIRE) if one in variants]
    return name, "".join(one for one in variants if one not in further), further


@lru_cache
def errors(file: Path = ERRORS) -> dict[str, dict[str, tuple[int, float, float, float]]]:
    """Errors of the shipped constants on committed rows; none where the file is missing."""
    return json.loads(file.read_text()) if file.is_file() else {}


@remembered
def times_of(op: str, shape: tuple[int, ...], item: int, world_size: int, gpu: Gpu) -> Mapping[str, float]:
    """µs by design, of elements of ``item`` bytes; else as of ``predict``."""
    name, variant, further = _named(op)
    if name not in OPS:
        raise ValueError(f"op={quoted(op)} has no costs; pass one of {', '.join(OPS)}{did_you_mean(name, OPS)}")
    known = VARIANTS.get(name, ())
    for one in (variant, *further):
        if one and one not in known:
            rest = f"after a + pass one of {', '.join(known)}{did_you_mean(one, known)}" if known else "leave it out"
            raise ValueError(f"op={quoted(op)}: {name} has no costs as {quoted(one)}; {rest}")
    count, _ = OPS[name]
    if len(shape) < count:
        raise ValueError(f"shape={shape} of {name} has {len(shape)} sizes; pass {count}")
    asked = Asked(variant, shape, item, world_size, **dict.fromkeys(further, True))
    times = OPS[name][1](gpu, fitted.shipped(variant), asked)
    if name != AG_MOE or world_size == 1:
        return times
    # Plans go by bytes, and so does what is predicted.
    planned = "sequential" if grouped.gathers_first(asked.every) else "fused"
    return {planned: times[planned]}


def costs(gpu: Gpu, of: fitted.Fitted, name: str, asked: Asked) -> dict[str, float]:
    """µs by design of a call of the op of this name, by these constants."""
    return OPS[name][1](gpu, of.of_variant(asked.variant), asked)


@dataclass(frozen=True, slots=True)
class Asked:
    """One call. item: bytes of an element of the rows; local_first, fp8_wire: as of ``gemms.Size``."""

    variant: str
    shape: tuple[int, ...]
    item: int
    world_size: int
    local_first: bool = False
    fp8_wire: bool = False

    @property
    def fp8(self) -> bool:
        """True for weights and rows in fp8."""
        return self.variant in fitted.FP8_VARIANTS

    @property
    def weight(self) -> float:
        return WEIGHTS.get(self.variant, float(self.item))

    @property
    def gemm(self) -> gemms.Size:
        return gemms.Size(
            *self.shape[:3],
            self.item,
            self.weight,
            self.fp8,
            self.variant == "block_fp8",
            self.local_first,
            self.fp8_wire,
        )

    @property
    def experts(self) -> grouped.Experts:
        """Experts, with ``tokens`` of the shape."""
        ranks = self.world_size if self.shape[3] < self.shape[2] else 1
        sent = SENT if self.variant in ("fp8", "block_fp8") else float(self.item)
        return grouped.Experts(*self.shape[:6], self.item, self.weight, ranks, sent, self.fp8)

    @property
    def of_16_bits(self) -> Asked:
        """The same call with weights of 16 bits."""
        return replace(self, variant="")

    @property
    def every(self) -> grouped.Experts:
        """Experts, with the tokens of all ranks where the shape has one rank's."""
        experts = self.experts
        return experts._replace(tokens=experts.tokens * self.world_size)

    @property
    def rows(self) -> exchanges.Rows:
        tokens, k, _, _, hidden, *_ = self.shape
        return exchanges.Rows(tokens, k, hidden, self.item, self.world_size, fp8=self.variant == "fp8")


Costs = Callable[[Gpu, fitted.Fitted, Asked], dict[str, float]]
"""µs of a call by design."""


def _one(us: float) -> dict[str, float]:
    return {"": us}


def _overlapped(time: Callable[..., dict[str, float]], *, gathers: bool = False) -> Costs:
    def by_design(gpu: Gpu, of: fitted.Fitted, asked: Asked) -> dict[str, float]:
        if asked.world_size == 1:
            return {"sequential": _gemm(gpu, of, asked, asked.shape[1])}
        if (form := of.four_bit(asked.variant)) is not None:
            # A kernel writes the weight in 16 bits.
            numbers = asked.shape[1] * asked.shape[2]
            first = gemms.widened(gpu, form, numbers * asked.weight, numbers)
            return {name: first + us for name, us in by_design(gpu, of, asked.of_16_bits).items()}
        made = time(gpu, of.gemms, of.pushes, asked.gemm, asked.world_size)
        if not asked.fp8 or asked.fp8_wire:
            return made
        # Designs that a plan may take: none is fused.
        few = gemms.follows(asked.shape[0], gemms.LONG if gathers else asked.shape[1] * asked.item, asked.world_size)
        return {name: made[name] for name in ("pipelined", "sequential")[: 1 + few]}

    return by_design


def _gemm(gpu: Gpu, of: fitted.Fitted, asked: Asked, N: int) -> float:
    size, form = asked.gemm._replace(N=N), of.four_bit(asked.variant)
    return gemms.gemm(gpu, of.gemms, size) if form is None else gemms.four_bit(gpu, of.gemms, form, size)


def _experts(gpu: Gpu, of: fitted.Fitted, asked: Asked, gated: bool) -> dict[str, float]:
    """Grouped GEMM by itself."""
    experts, form = asked.experts, of.four_bit(asked.variant)
    if form is None:
        return _one(grouped.gate_up(gpu, of, experts) if gated else grouped.down(gpu, of, experts))
    return _one(grouped.four_bit(gpu, of, form, experts, gated))


def _moved(time: Costs, gated: bool) -> Costs:
    """Grouped GEMM with a collective, which takes no weight in 4 bits: a kernel writes it in 16 first."""

    def by_design(gpu: Gpu, of: fitted.Fitted, asked: Asked) -> dict[str, float]:
        if (form := of.four_bit(asked.variant)) is None:
            return time(gpu, of, asked)
        first = grouped.widened(gpu, form, asked.experts, *asked.experts.matrix(gated))
        return {name: first + us for name, us in time(gpu, of, asked.of_16_bits).items()}

    return by_design


def _exchanged(adds: bool = False) -> Costs:
    return lambda gpu, of, asked: pushes.exchange(gpu, of.pushes, asked.shape[0], asked.world_size, adds)


def _norm(gpu: Gpu, of: fitted.Fitted, asked: Asked, rows: int, width: int) -> dict[str, float]:
    times = pushes.all_reduce_rms_norm(gpu, of, rows, width, asked.item, asked.world_size, asked.fp8_wire)
    more = ROUNDING + ROUNDED * rows * width / gpu.memory if asked.variant == "fp8" else 0.0
    return {name: us + more for name, us in times.items()}


def _all_reduced(gpu: Gpu, of: fitted.Fitted, asked: Asked) -> dict[str, float]:
    time = pushes.fp8_all_reduce if asked.fp8_wire else pushes.all_reduce
    return time(gpu, of.pushes, asked.shape[0], asked.world_size)


def _moe_norm(gpu: Gpu, of: fitted.Fitted, asked: Asked) -> dict[str, float]:
    tokens, _, _, _, hidden, *_ = asked.shape
    norm = min(_norm(gpu, of, asked, tokens, hidden).values())
    work = grouped.down(gpu, of, asked.experts)
    read = asked.experts.pairs * hidden * asked.item / gpu.memory
    return {"in_norm": work + norm + read, "sequential": work + norm + read + gpu.launch}


def _memory(gpu: Gpu, of: fitted.Fitted, asked: Asked) -> dict[str, float]:
    rounding = ROUNDING + ROUNDED * asked.shape[0] / NORMED / gpu.memory if asked.variant == "fp8" else 0.0
    return _one(gpu.launch + 0.8 + asked.shape[0] / gpu.memory + rounding)


def _route(gpu: Gpu, tokens: int) -> float:
    return gpu.launch + 3.1 + tokens * 0.66e-3


def _sum(gpu: Gpu, of: fitted.Fitted, asked: Asked) -> dict[str, float]:
    tokens, k, _, _, hidden, *_ = asked.shape
    return _one(gpu.launch + 1.2 + (tokens * k + tokens) * hidden * asked.item / gpu.memory)


def _routing(gpu: Gpu, of: fitted.Fitted, asked: Asked) -> dict[str, float]:
    """Router's GEMM, choice and schedule."""
    tokens, _, experts, _, hidden, *_ = asked.shape
    router = gemms.gemm(gpu, of.gemms, gemms.Size(tokens, experts, hidden, asked.item, float(asked.item)))
    times = {
        "sequential": router + SEQUENTIAL_ROUTING + _route(gpu, tokens) + grouped.schedule(gpu, tokens),
        "split": router + _route(gpu, tokens),
    }
    logits = next_power_of_2(tokens) * next_power_of_2(experts)
    if logits <= FUSED_LOGITS:
        read = experts * hidden * asked.item / gpu.memory
        begin, share = FUSED_ONE if tokens == 1 else FUSED_ROUTING
        times["fused"] = gpu.launch + begin + share * read + (logits / FUSED_PACE) ** 2
    return times


def _decode(gpu: Gpu, of: fitted.Fitted, asked: Asked) -> dict[str, float]:
    pairs, tokens, dim = asked.shape[:3]
    return _one(attention.decode(gpu, of, 2 * pairs * tokens * dim * asked.item))


def _sharded(gpu: Gpu, of: fitted.Fitted, asked: Asked) -> dict[str, float]:
    batch, q_heads, kv_heads, dim, context = asked.shape[:5]
    cached = 2 * batch * context * kv_heads * dim * asked.item / asked.world_size
    part = 4 * batch * q_heads / asked.world_size * (dim + 1)
    return _one(attention.sharded_decode(gpu, of, cached, part, asked.world_size))


def _prefill(gpu: Gpu, of: fitted.Fitted, asked: Asked) -> float:
    tokens, q_heads, _, dim = asked.shape[:4]
    return attention.prefill(gpu, of, tokens, q_heads, dim)


def _gathered_prefill(gpu: Gpu, of: fitted.Fitted, asked: Asked) -> dict[str, float]:
    """The gathered design: a rank's share of the attention, under which peers' copies come in turn."""
    tokens, q_heads, kv_heads, dim = asked.shape[:4]
    W, started = asked.world_size, attention.prefill(gpu, of, 0, q_heads, dim)
    alone = _prefill(gpu, of, asked)
    if W == 1:
        return {"gathered": alone}
    keys = 2 * tokens * kv_heads * dim * asked.item / W
    part, copied = (alone - started) / W, (W - 1) * (2 * gpu.copy + keys / gpu.link)
    return {"gathered": started + max(part, copied) + min(part, copied) / W}


AG_MOE = "all_gather_grouped_matmul_silu_mul"
# Name -> (number of sizes, costs). N of a GEMM with silu counts results, of gate and up each.
OPS: dict[str, tuple[int, Costs]] = {
    "matmul": (3, lambda gpu, of, asked: _one(_gemm(gpu, of, asked, asked.shape[1]))),
    "matmul_silu_mul": (3, lambda gpu, of, asked: _one(_gemm(gpu, of, asked, 2 * asked.shape[1]))),
    "all_gather_matmul": (3, _overlapped(gemms.ag_gemm, gathers=True)),
    "matmul_reduce_scatter": (3, _overlapped(gemms.gemm_rs)),
    "matmul_all_reduce": (3, _overlapped(gemms.gemm_ar)),
    "all_reduce": (1, _all_reduced),
    "all_gather": (1, _exchanged()),
    "reduce_scatter": (1, _exchanged(adds=True)),
    "all_to_all": (1, _exchanged()),
    "sequence_to_heads": (1, _exchanged()),
    "heads_to_sequence": (1, _exchanged()),
    "all_reduce_rms_norm": (2, lambda gpu, of, asked: _norm(gpu, of, asked, *asked.shape[:2])),
    "moe_dispatch": (6, lambda gpu, of, asked: exchanges.dispatch(gpu, of.exchanges, of.pushes, asked.rows)),
    "moe_combine": (6, lambda gpu, of, asked: exchanges.combine(gpu, of.exchanges, of.pushes, asked.rows)),
    "grouped_matmul": (6, lambda gpu, of, asked: _experts(gpu, of, asked, gated=False)),
    "grouped_matmul_silu_mul": (6, lambda gpu, of, asked: _experts(gpu, of, asked, gated=True)),
    AG_MOE: (
        6, _moved(lambda gpu, of, asked: grouped.ag_moe(gpu, of, asked.every, asked.world_size), gated=True),
    ),
    "grouped_matmul_reduce_scatter": (
        6, _moved(lambda gpu, of, asked: grouped.moe_rs(gpu, of, asked.every, asked.world_size), gated=False),
    ),
    "grouped_matmul_all_reduce_rms_norm": (6, _moved(_moe_norm, gated=False)),
    "route": (6, lambda gpu, of, asked: _one(_route(gpu, asked.shape[0]))),
    "moe_schedule": (6, lambda gpu, of, asked: _one(grouped.schedule(gpu, asked.shape[0]))),
    "moe_sum": (6, _sum),
    "matmul_route_schedule": (6, _routing),
    "decode_attention": (3, _decode),
    "paged_attention": (3, _decode),
    "sharded_decode_attention": (5, _sharded),
    "paged_prefill_attention": (4, lambda gpu, of, asked: _one(_prefill(gpu, of, asked))),
    "gathered_prefill_attention": (4, _gathered_prefill),
    "memory": (1, _memory),
}  # fmt: skip
# Op -> variants with costs of their own.
VARIANTS: dict[str, tuple[str, ...]] = {
    "all_gather_matmul": (*WEIGHTS, LOCAL_FIRST),
    **dict.fromkeys(("matmul_reduce_scatter", "matmul_all_reduce"), (*WEIGHTS, LOCAL_FIRST, FP8_WIRE)),
    **dict.fromkeys(("matmul", "matmul_silu_mul", "grouped_matmul", "grouped_matmul_silu_mul"), tuple(WEIGHTS)),
    **dict.fromkeys(("grouped_matmul_reduce_scatter", "grouped_matmul_all_reduce_rms_norm"), tuple(WEIGHTS)),
    **dict.fromkeys(("moe_dispatch", "memory"), ("fp8",)),
    "all_reduce": (FP8_WIRE,),
    "all_reduce_rms_norm": ("fp8", FP8_WIRE),
    AG_MOE: (*WEIGHTS, "fp8"),
}
