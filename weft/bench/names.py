"""Names of ops on the command line, for help and completion, which do not load the ops."""

from __future__ import annotations

from collections.abc import Sequence

from weft.arguments import did_you_mean, quoted, shortened
from weft.bench.models.names import LEVELS

# Name on the command line: name in weft.ops, which is understood as well.
OPS = {
    "all-reduce": "all_reduce",
    "all-reduce-rms-norm": "all_reduce_rms_norm",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "sequence-to-heads": "sequence_to_heads",
    "heads-to-sequence": "heads_to_sequence",
    "gemm": "matmul",
    "gemm-silu": "matmul_silu_mul",
    "ag-gemm": "all_gather_matmul",
    "gemm-rs": "matmul_reduce_scatter",
    "gemm-ar": "matmul_all_reduce",
    "decode-attention": "decode_attention",
    "paged-attention": "paged_attention",
    "sharded-decode-attention": "sharded_decode_attention",
    "paged-prefill-attention": "paged_prefill_attention",
    "gathered-prefill-attention": "gathered_prefill_attention",
    "route": "route",
    "moe-schedule": "moe_schedule",
    "moe-route": "matmul_route_schedule",
    "moe-dispatch": "moe_dispatch",
    "moe-combine": "moe_combine",
    "grouped-gemm": "grouped_matmul",
    "grouped-gemm-silu": "grouped_matmul_silu_mul",
    "moe-sum": "moe_sum",
    "ag-moe": "all_gather_grouped_matmul_silu_mul",
    "moe-rs": "grouped_matmul_reduce_scatter",
    "moe-ar-rms-norm": "grouped_matmul_all_reduce_rms_norm",
}
# Ops with fields of their calls (``Op.variants``) that are measured as ops of their own.
VARIED = (
    "moe-dispatch+fp8", "ag-moe+fp8", "ag-gemm+block_fp8", "ag-gemm+channel_fp8", "gemm-rs+block_fp8", "gemm-rs+channel_fp8",
    "gemm-ar+block_fp8", "gemm-ar+channel_fp8", "all-reduce+fp8_wire", "all-reduce-rms-norm+fp8_wire", "gemm-rs+fp8_wire",
    "gemm-rs+block_fp8+fp8_wire", "gemm-ar+fp8_wire", "gemm+block_fp8", "gemm+channel_fp8", "gemm+four_bit",
    "gemm-silu+block_fp8", "gemm-silu+channel_fp8", "gemm-silu+four_bit", "grouped-gemm+block_fp8",
    "grouped-gemm+channel_fp8", "grouped-gemm+four_bit", "grouped-gemm-silu+block_fp8", "grouped-gemm-silu+channel_fp8",
    "grouped-gemm-silu+four_bit",
)  # fmt: skip
TRAIN = "train"
# What `weft bench --eager` measures where no op is named, N and K of one of two ranks: eager calls from short to long.
EAGER = (
    "ag-gemm@512,2048,4096", "ag-gemm@4096,4096,4096", "ag-gemm@8192,7168,4096",
    "gemm-rs@512,4096,2048", "gemm-rs@4096,4096,4096", "gemm-rs@8192,4096,7168",
    "gemm-ar@512,4096,2048", "gemm-ar@4096,4096,4096", "gemm-ar@8192,4096,7168", "all-reduce@64KiB,4MiB,32MiB,64MiB",
)  # fmt: skip
# What `weft bench --regret` measures where no op is named, in turns: of one rank at W=1, collective ones beyond; first the ops
# whose rules are least certain.
REGRET = (
    "gemm", "grouped-gemm", "grouped-gemm-silu", "gemm-silu", "moe-route", "paged-attention", "decode-attention",
    "paged-prefill-attention", "moe-schedule", "gemm-rs", "ag-gemm", "gemm-ar", "moe-combine", "moe-rs", "ag-moe",
    "moe-dispatch", "moe-ar-rms-norm", "all-reduce-rms-norm", "all-reduce", "sharded-decode-attention",
    "gathered-prefill-attention", "moe-dispatch+fp8", "ag-moe+fp8", "gemm-rs+block_fp8", "ag-gemm+block_fp8",
    "gemm-ar+block_fp8", "gemm-rs+channel_fp8", "ag-gemm+channel_fp8", "gemm-ar+channel_fp8", "reduce-scatter", "all-gather",
    "all-to-all", "sequence-to-heads", "heads-to-sequence", "all-reduce-rms-norm+fp8_wire", "all-reduce+fp8_wire",
    "gemm-rs+block_fp8+fp8_wire", "gemm-rs+fp8_wire", "gemm-ar+fp8_wire", "gemm+block_fp8", "gemm-silu+block_fp8",
    "gemm+four_bit", "gemm-silu+four_bit", "grouped-gemm+four_bit", "grouped-gemm-silu+four_bit", "grouped-gemm+block_fp8",
    "grouped-gemm-silu+block_fp8", "gemm+channel_fp8", "gemm-silu+channel_fp8", "grouped-gemm+channel_fp8",
    "grouped-gemm-silu+channel_fp8",
)  # fmt: skip
# What `weft bench` measures.
MEASURED = (*OPS, *VARIED, *LEVELS, TRAIN)
DTYPES = ("bf16", "fp16", "fp32")
# Ops with one design, among which there is nothing to search.
NOT_TUNED = ("route", "moe-schedule", "moe-sum")


_ALIASES = {name.replace("-", "_"): alias for alias, own in OPS.items() for name in (alias, own)}


def alias_of(name: str) -> str:
    """The name of an op in commands and reports, by its name or alias; other names as they are."""
    op, *variants = name.split("+")
    return "+".join([_ALIASES.get(op.replace("-", "_"), op), *variants])


def shapes_by_op(words: Sequence[str], shapes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Shapes of each op of ``words``, OP or OP@SHAPES, in order. ``shapes``: of words without shapes.

    ValueError for a word that ends in @, and for ``shapes`` that no word takes.
    """
    by_op: dict[str, tuple[str, ...]] = {}
    if shapes and words and all("@" in word for word in words):
        given = shortened(",".join(shapes))
        raise ValueError(f"--shapes {given} has no effect, since each op has shapes after its @; leave it out")
    for word in words:
        op, at, own = word.partition("@")
        if at and not own.strip():
            raise ValueError(f"{quoted(word)} names no shape after the @; write {op}@SHAPES, or {op} for its first set")
        op = alias_of(op)
        by_op[op] = (*by_op.get(op, ()), *((own,) if own else shapes))
    return by_op


def unknown_op(name: str, known: Sequence[str]) -> ValueError:
    """Error for the name of an op that is none of `known`."""
    return ValueError(f"op {name!r} is unknown; choose one of {', '.join(known)}{did_you_mean(name, known)}")


def complete_op(incomplete: str) -> list[tuple[str, str]]:
    """Completions of what `weft bench` measures, each with its other name."""
    return _starting(incomplete, [*_ops(), *((name, "") for name in (*VARIED, *LEVELS, TRAIN, "serve"))])


def complete_tuned_op(incomplete: str) -> list[tuple[str, str]]:
    """Completions of what `weft tune` searches, each with its other name."""
    return _starting(incomplete, [pair for pair in _ops() if not {*pair} & {*NOT_TUNED}])


def _ops() -> list[tuple[str, str]]:
    return [*OPS.items(), *((name, alias) for alias, name in OPS.items() if name != alias)]


def _starting(incomplete: str, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [pair for pair in pairs if pair[0].startswith(incomplete)]
