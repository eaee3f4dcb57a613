"""Attention with a bias, with a window and without norms: what is not loaded, mutants, refusals, and all combinations."""

import dataclasses
import importlib
import inspect
import itertools

import pytest
import torch

import weft
from tests.ops.checking import assert_identical, check, run_cases
from tests.ops.layer_cases import check_refused, layer_arguments, mutated
from weft import ops
from weft.kernels import online_softmax, rotary, split_kv
from weft.ops.attention import cases
from weft.ops.attention import decoding as plans
from weft.ops.case import Draw
from weft.ops.op import find_op

MODULES = {
    name: importlib.import_module(f"weft.ops.attention.{name}")
    for name in ("qk_norm_rope", "decode_attention", "paged_attention", "paged_prefill_attention")
}
SPLIT = MODULES["paged_attention"].SplitKV(block_n=16, least=16, splits=8, num_warps=1)
BLOCKS = MODULES["paged_prefill_attention"].KeyBlocks(block_n=16, num_warps=1)
EVERYTHING = {"norms": False, "bias": True, "squares": 3}


def decoding(**fields):
    op = "decode_attention" if "positions" in fields else "paged_attention"
    return cases.case_of(op, cases.SMALL, SPLIT, lengths=(130, 47), **fields)


def prefill(window=None, **fields):
    return cases.case_of(
        "paged_prefill_attention", cases.SMALL, BLOCKS, chunks=((1, 40, 160),), window=window, block_m=16, **fields
    )


def verifying(**fields):
    return cases.case_of("paged_attention", cases.SMALL, SPLIT, lengths=(100, 101, 102), queries=3, **fields)


def rotating(**fields):
    return cases.case_of("qk_norm_rope", cases.SMALL, tokens=5, **fields)


# Case, the module of device code that is changed (None: the op's), its text, and the replacement.
NORMED = "scale = inverse_rms(squares_of(x), norms.eps, D)[:, None]\n        return scale * (x * cos + partner * sin)"
MASKED = 'score = tl.where(seen, score, float("-inf"))\n        new = tl.maximum(largest, tl.'
MUTATIONS = {
    "decode: window a token longer": (
        decoding(window=40), online_softmax, "length - TILE.window - start", "length - TILE.window - 1 - start",
    ),
    "decode: window a token shorter": (
        decoding(window=40), online_softmax, "length - TILE.window - start", "length - TILE.window + 1 - start",
    ),
    "decode: window ignored": (decoding(window=40), plans, "window=window,\n        queries", "window=None,\n        queries"),
    "decode: first block skipped": (
        decoding(window=40), split_kv, "TILE.block_n * TILE.block_n", "TILE.block_n * TILE.block_n + TILE.block_n",
    ),
    "decode: bias before the deferred scale": (
        decoding(positions=131, **EVERYTHING), rotary, "x + bias[0], partner + bias[1]",
        "x + bias[0] * factor, partner + bias[1] * factor",
    ),
    "decode: no bias on values": (
        decoding(positions=131, **EVERYTHING), None, "new_value += load_bias(", "new_value += 0 * load_bias(",
    ),
    "decode: no bias on partners": (
        decoding(positions=131, **EVERYTHING), rotary, "partner + bias[1]", "partner",
    ),
    "decode: normalised without a norm": (
        decoding(positions=131, norms=False), rotary, "return x * cos + partner * sin", NORMED,
    ),
    "prefill: window a token longer": (prefill(110), online_softmax, "> position[:, None] - T", ">= position[:, None] - T"),
    "prefill: window a token shorter": (prefill(110), online_softmax, "> position[:, None] - T", "> position[:, None] + 1 - T"),
    "prefill: window ignored": (prefill(110), None, "design.block_n, given.window)", "design.block_n)"),
    "prefill: first block skipped": (
        prefill(110), online_softmax, "first = start // BLOCK_N * BLOCK_N", "first = start // BLOCK_N * BLOCK_N + BLOCK_N",
    ),
    "prefill: a block too few masked": (
        prefill(110), None, "tl.maximum(end - TILE.window, 0)", "tl.maximum(end - TILE.window - BLOCK_N, 0)",
    ),
    "prefill: values before the window loaded": (prefill(110), online_softmax, "local >= start - at", "local >= 0"),
    "decode: a sink in each partial": (
        decoding(sinks=True), None, "TILE.group + row, (row < TILE.group) & (split == 0)", "TILE.group + row, row < TILE.group",
    ),
    "verify: a sink in each partial": (
        verifying(sinks=True), None, "row % HEADS, (row < TILE.group) & (split == 0)", "row % HEADS, row < TILE.group",
    ),
    "verify: sinks of neighbours": (
        verifying(sinks=True), None, "head * HEADS + row % HEADS,", "head * HEADS + row // HEADS,",
    ),
    "decode: a sink with the new token": (
        decoding(positions=131, sinks=True), None, "(row < TILE.group) & (split == 0)", "row < TILE.group",
    ),
    "decode: a sink in each way": (
        dataclasses.replace(decoding(sinks=True), design=dataclasses.replace(SPLIT, block_n=32, least=32, num_warps=2)),
        online_softmax, "first_way = tl.arange(0, WAYS)[:, None] == 0", "first_way = tl.arange(0, WAYS)[:, None] >= 0",
    ),
    "decode: soft cap after the mask": (
        decoding(softcap=1.5), online_softmax, MASKED + "max(score, axis=TOKENS))", MASKED.replace('float("-inf")', "-scale")
        + "max(score, axis=TOKENS))",
    ),
    "decode: no soft cap": (
        decoding(softcap=1.5), online_softmax, "score = capped(score * inner)\n        score *= scale",
        "score *= inner\n        score *= scale",
    ),
    "decode: scale twice": (
        decoding(softcap=1.5), online_softmax, "        score *= scale\n", "        score *= scale * scale\n",
    ),
    "prefill: no soft cap": (
        prefill(softcap=1.5), online_softmax, "score = capped(score * inner)\n        if MASKED",
        "score *= inner\n        if MASKED",
    ),
    "prefill: soft cap of masked keys alone": (
        prefill(softcap=1.5), None, "head, 0, whole, scale, state, False, SIZES, TILE, inner)",
        "head, 0, whole, scale, state, False, SIZES, TILE)",
    ),
    "prefill: sinks of neighbours": (
        prefill(sinks=True), None, "head * GROUP + row % GROUP, row >= 0", "head * GROUP + (row + 1) % GROUP, row >= 0",
    ),
    "prefill: a sink without weight": (prefill(sinks=True), None, "largest, total = before_keys(", "largest, _ = before_keys("),
    "rotating: bias before the deferred scale": (
        rotating(**EVERYTHING), None, "a += load_bias(projected, at, exists[:, None])",
        "a += factor * load_bias(projected, at, exists[:, None])",
    ),
    "rotating: no bias on values": (
        rotating(**EVERYTHING), None, "exists[:, None])\n        low, high = a, b", "exists[:, None])",
    ),
    "rotating: normalised without a norm": (
        rotating(norms=False), None, "turned_low, turned_high = (a * cos",
        "a *= inverse_rms(squares_of(a) + squares_of(b), norms.eps, D)[:, None]\n        turned_low, turned_high = (a * cos",
    ),
}  # fmt: skip


def run_mutant(case, device_code, old, new, name, directory):
    """The case's result and inputs, by the op's module with ``old`` replaced in it, or in the device code it imports."""
    module = MODULES[case.op]
    if device_code is not None:
        kernels = mutated(device_code, old, new, f"{name}_kernels", directory)
        old, new = f"from {device_code.__name__} ", f"from {kernels.__name__} "
    mutant = mutated(module, old, new, name, directory)
    if not isinstance(case.design, str):
        kind = getattr(mutant, type(case.design).__name__)
        case = dataclasses.replace(case, design=kind(**dataclasses.asdict(case.design)))
    op = getattr(mutant, case.op.upper())
    inputs = weft.simulate(lambda team: op.inputs(case, 0, Draw(case, 0)), 1)[0]
    drawn = [x.clone() for x in inputs]
    return weft.simulate(lambda team: op.call(case, None, *inputs), 1)[0], drawn


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutant_is_caught(mutation, tmp_path):
    case, device_code, old, new = MUTATIONS[mutation]
    name = f"options_mutant_{list(MUTATIONS).index(mutation)}"
    result, inputs = run_mutant(case, device_code, old, new, name, tmp_path)
    with pytest.raises(AssertionError):
        check(case, 0, [inputs], result)


@pytest.mark.parametrize("case", {str(case): case for case, *_ in MUTATIONS.values()}.values(), ids=str)
def test_cases_of_mutants_hold_without_them(case):
    weft.simulate(run_cases, 1, args=([case], 1))


@pytest.mark.parametrize(
    "case", [decoding(window=40), decoding(window=40, positions=131), prefill(110)], ids=lambda c: c.op
)
def test_pages_before_a_window_are_not_loaded(case):
    """Where a block lies in one page: their entries of the page table may name pages that do not exist."""
    op = find_op(case.op)
    first = [first for first, _ in ((90, 130), (7, 47))] if "chunks" not in dict(case.fields) else [160 + 1 - 110]

    def main(team):
        results = []
        for lost in (False, True):
            inputs = op.inputs(case, 0, Draw(case, 0))
            pages = next(x for x in inputs if x.dtype == torch.int32 and x.dim() == 2)
            for row, seen in zip(pages, first, strict=True):
                row[: seen // case.sizes[3]] += (1 << 24) * lost
            results.append(op.call(case, None, *inputs))
        return results

    [(found, lost)] = weft.simulate(main, 1)
    for x, y in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, lost)), strict=True):
        assert_identical(x.nan_to_num(7.0), y.nan_to_num(7.0))


def test_a_plan_counts_no_more_tokens_than_the_window():
    keys, pages = torch.empty(40, 1, 16, 64), torch.zeros(1, 2048, dtype=torch.int32)
    op = find_op("paged_attention")

    def main(team):
        return [op.plan_of(keys, pages, window).splits for window in (None, 4096, 100)], op.plan_of(
            keys, pages[:, :256]
        )

    [((whole, some, few), short)] = weft.simulate(main, 1)
    assert whole > few == 1 and some == short.splits


def test_a_window_that_holds_every_sequence_is_none():
    _, (q, keys, values, pages, lengths, *_) = layer_arguments()

    def main(team):
        return [ops.paged_attention(q, keys, values, pages, lengths, window=window) for window in (None, 320, 1 << 40)]

    [(without, *others)] = weft.simulate(main, 1)
    for other in others:
        assert_identical(other, without)


def calls():
    """Public functions and their arguments by name."""
    (qkv, weight, _, eps, angles, positions, slots, keys, values), (q, *_) = layer_arguments()
    pages, lengths = torch.arange(39, dtype=torch.int32).view(3, 13), torch.full((3,), 5, dtype=torch.int32)
    cache, sequences = {"keys": keys, "values": values}, {"pages": pages, "lengths": lengths}
    heads = {"qkv": qkv, "q_weight": weight, "k_weight": weight, "eps": eps, "angles": angles, **cache}
    spans = {"pages": pages, "spans": [(0, 1)]}
    return {
        ops.qk_norm_rope: {**heads, "positions": positions, "slots": slots},
        ops.decode_attention: {**heads, **sequences},
        ops.paged_attention: {"q": q.expand(3, -1, -1), **cache, **sequences},
        ops.paged_prefill_attention: {"q": q, **cache, **spans},
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q_weight": None}, "q_weight is None and k_weight is not; pass both, or None for both"),
        ({"k_weight": None}, "k_weight is None and q_weight is not; pass both, or None for both"),
        ({"bias": torch.ones(383)}, "bias has shape (383,); it must be (384,)"),
        ({"bias": torch.ones(3, 384)}, "bias has shape (3, 384); it must be (384,)"),
        ({"bias": torch.ones(384).bfloat16()}, "bias.dtype=torch.bfloat16 is not one of float32"),
        ({"bias": 1.0}, "bias=1.0 is not a tensor"),
        ({"window": 0}, "window=0 is not a positive integer; pass 1 or more tokens, or None for no window"),
        ({"window": -1}, "window=-1 is not a positive integer"),
        ({"window": True}, "window=True is not a positive integer"),
        ({"window": 2.5}, "window=2.5 is not a positive integer"),
        ({"softcap": 0.0}, "softcap=0.0 is not positive; pass None for scores without a cap"),
        ({"softcap": -30.0}, "softcap=-30.0 is not positive"),
        ({"softcap": "30"}, "softcap='30' is not a"),
        ({"sinks": torch.ones(3)}, "sinks has shape (3,); it must be (4,)"),
        ({"sinks": torch.ones(4).double()}, "sinks.dtype=torch.float64 is not one of"),
        ({"sinks": torch.ones(8)[::2]}, "sinks has strides (2,); pass a contiguous row"),
        ({"sinks": [0.0] * 4}, "sinks=[0.0, 0.0, 0.0, 0.0] is not a tensor"),
    ],
)
def test_wrong_options_are_refused(changed, message):
    [name] = changed
    taken = 0
    for function, arguments in calls().items():
        if name in inspect.signature(function).parameters:
            taken += 1
            check_refused(lambda f=function, a=arguments: f(**{**a, **changed}), (), f"{function.__name__}: {message}")
    assert taken == (3 if name in ("window", "softcap", "sinks") else 2)


def combinations(*choices):
    """One mapping for each combination of ``choices``, each mappings one of which is taken."""
    for taken in itertools.product(*choices):
        yield {name: value for fields in taken for name, value in fields.items()}


GIVEN = ({}, {"partials": 1}, {"partials": 3}, {"squares": 20}, {"strided": True})
NORMS, BIAS = ({}, {"norms": False}), ({}, {"bias": True})


@pytest.mark.sweep
@pytest.mark.parametrize("heads", cases.HEADS, ids=str)
def test_every_combination(heads):
    windows = [{}, *({"window": window} for window in (1, 9, 16, 48, 63, 100, 300))]
    lengths, found = (0, 1, 16, 50, 77, 200), []
    for fields in combinations(GIVEN, NORMS, BIAS, ({}, {"with_keys": True})):
        found.append(cases.case_of("qk_norm_rope", heads, tokens=9, padded=(4,), **fields))
    for design in (SPLIT, dataclasses.replace(SPLIT, block_n=64, least=64, splits=3, num_warps=4)):
        for fields in combinations(GIVEN, NORMS, BIAS, windows[1:]):
            found.append(cases.case_of("decode_attention", heads, design, lengths=lengths, positions=201, **fields))
        for window in windows:
            found.append(cases.case_of("paged_attention", heads, design, lengths=lengths, **window))
    for design in (BLOCKS, dataclasses.replace(BLOCKS, block_n=64, num_warps=4)):
        for chunks, window in itertools.product((((2, 21, 0),), ((1, 40, 160), (1, 5, 33))), windows):
            for block_m in (16, 64):
                fields = {"chunks": chunks, "block_m": block_m, **window}
                found.append(cases.case_of("paged_prefill_attention", heads, design, **fields))
    weft.simulate(run_cases, 1, args=(found, 1))
