"""paged_prefill_attention: ranges of rows, tiles, races and refused arguments; its cases run with all others."""

import random as random_module

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_close, assert_identical
from tests.ops.layer_cases import DEVICES, SMALL, everywhere, random
from tests.sampled import sampled
from weft import ops
from weft.ops import SequenceRanges
from weft.ops.attention.cases import attended
from weft.ops.attention.paged_prefill_attention import PAGED_PREFILL_ATTENTION as OP
from weft.ops.case import FP32, Draw

# Of cases that differ in their heads alone, every second one.
RANGED = [case for case in OP.cases() if case.field("room") or len(case.field("chunks")) > 2]
HEADS_ALONE = [case for case in RANGED if case.field("room") == (33, 1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case", sampled(((case,) for case in RANGED), lambda case: case not in HEADS_ALONE[1::2]), ids=str
)
def test_each_range_is_as_exact_as_its_keys_allow(case, device):
    """Rows that see few keys are larger: from one doubling to the next, each by its own RMS."""

    def check(device):
        tensors = OP.inputs(case, 0, Draw(case, 0, 0, device))
        found, expected = OP.call(case, None, *tensors), OP.reference(case, 0, [tensors])
        assert_identical(OP.call(case, None, *tensors), found, what="another call")
        first = 0
        for batch, length, before in case.field("chunks"):
            for _ in range(batch):
                ends = sorted({min(length, 1 << bits) for bits in range(length.bit_length() + 1)})
                for start, end in zip([0, *ends], ends, strict=False):
                    rows, what = slice(first + start, first + end), f"{case} from row {first + start}"
                    terms = before + end + case.sizes[2]
                    assert_close(found[rows], expected[rows], terms, partials=1, what=what)
                first += length
        assert not found[first:].any(), "padding becomes 0"

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
def test_paged_prefill_attention_by_its_public_name(device):
    """A scale, strided queries, spans of the host, and such on the device with room for a token more."""

    def check(device):
        keys, values = SMALL.cache(4, device)
        q = random((SMALL.q_heads, 9, SMALL.D), FP32, device, 7).transpose(0, 1)
        pages = torch.tensor([[0, 0], [3, 1]], dtype=torch.int32, device=device)
        spans, scale = [(0, 2), (14, 6)], 2 * SMALL.D**-0.5
        out = ops.paged_prefill_attention(q[:8], keys, values, pages, spans, scale=scale)
        k, v = (cache[pages[1].long(), 0].flatten(0, 1)[:, None] for cache in (keys, values))
        assert_close(out[2:], attended(2 * q[2:8], k, v, 14), 20 + SMALL.D, what="rows 2 to 7")
        made = SequenceRanges.make(spans, SMALL.q_heads, FP32, tokens=9, batch=2).to(q.device)
        again = ops.paged_prefill_attention(q, keys, values, pages, made, scale=scale)
        assert torch.equal(again[:8], out) and not again[8].any()

    everywhere(check, device)


def test_no_races():
    def main(team):
        keys, values = SMALL.cache(9, "cpu")
        q = random((40, SMALL.q_heads, SMALL.D), FP32, "cpu", 2)
        pages = torch.arange(8, dtype=torch.int32).view(2, 4)
        return ops.paged_prefill_attention(q, keys, values, pages, [(30, 20)] * 2)

    report = weft.check.check(main, 1, schedules=5)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"spans": [(-1, 4), (0, 4)]},
            r"sequences=\[\(-1, 4\), \(0, 4\)\] are not all \(before, length\), integers and none negative",
        ),
        ({"spans": [(2, 4, 0, 0, 0)]}, r"sequences=\[\(2, 4, 0, 0, 0\)\] are not all \(before, length\)"),
        ({"spans": [(0, 4)]}, r"spans are of 4 tokens, which q must have, and not 8"),
        ({"spans": [(0, 3)] * 2 + [(1, 2)]}, r"spans have 3 sequences, and pages room for 2"),
        ({"spans": [(61, 4), (0, 4)]}, r"spans have 65 tokens of a sequence, and pages room for 64"),
        (
            {"spans": SequenceRanges.make([(0, 8)], 3, FP32)},
            r"spans are of 3 query heads of a KV head, which q must have",
        ),
        ({"scale": 0.0}, r"scale=0.0 is not positive"),
        ({"q": torch.zeros(8, 4, 32)}, r"q has shape \(8, 4, 32\)"),
        ({"pages": torch.zeros(2, 4)}, r"pages.dtype=torch.float32 is not one of int32"),
    ],
)
def test_what_does_not_fit_is_refused(changed, words):
    keys, values = SMALL.cache(9, "cpu")
    arguments = {
        "q": torch.zeros(8, SMALL.q_heads, SMALL.D), "keys": keys, "values": values,
        "pages": torch.zeros(2, 4, dtype=torch.int32), "spans": [(0, 4)] * 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        ops.paged_prefill_attention(**arguments | changed)


@pytest.mark.parametrize(("sizes", "words"), [
    ({"tokens": 7}, "2 sequences of 8 tokens are more than 2 of 7"),
    ({"batch": 1}, "2 sequences of 8 tokens are more than 1 of 8"),
    ({"block_m": 24}, "block_m=24 is not a power of two of at least 16"),
])  # fmt: skip
def test_spans_for_which_there_is_no_room_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        SequenceRanges.make([(0, 4)] * 2, 4, FP32, **sizes)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_spans_have_the_same_sizes_whatever_the_sequences(group):
    """Sizes that a graph has captured; and every row of every sequence in one tile."""
    draw = random_module.Random(group)
    for _ in range(200):
        spans = [
            (draw.choice([0, draw.randrange(500)]), draw.choice([1, draw.randrange(90)]))
            for _ in range(draw.randrange(9))
        ]
        if len(spans) == 8:
            spans[0] = spans[0][0], 800 - sum(length for _, length in spans[1:])  # nothing left over
        made = SequenceRanges.make(spans, group, torch.bfloat16, tokens=800, batch=8)
        assert made.spans.shape == (10, 3) and made.tiles.shape == (-(-800 * group // 64) + 8, 2)
        # Rows of all tiles as numbers, sequence * 2**20 + row; those behind a sequence's end are padding.
        sequence, tile = made.tiles.long().unbind(1)
        row = tile[:, None] * 64 + torch.arange(64)
        real = (sequence[:, None] * (1 << 20) + row)[row < made.spans[sequence, 1:2] * group]
        lengths = [length for _, length in spans] + [800 - sum(length for _, length in spans)]
        expected = [b * (1 << 20) + torch.arange(length * group) for b, length in enumerate(lengths)]
        assert torch.equal(real.sort().values, torch.cat(expected))
