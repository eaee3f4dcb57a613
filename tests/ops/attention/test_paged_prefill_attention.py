"""paged_prefill_attention against plain PyTorch in double, on a virtual rank and on a GPU."""

import importlib
import random as random_module
from dataclasses import dataclass, fields

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_close, assert_identical
from tests.ops.layer_cases import DEVICES, HEADS, SMALL, Heads, everywhere, random
from weft import ops
from weft.kernels.paged_cache import PagedCache
from weft.ops import SequenceRanges
from weft.ops.case import FP32

prefill = importlib.import_module("weft.ops.attention.paged_prefill_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A case of sequences, one after the other.

    chunks  (batch, length, before) of each kind; spare: pages of the table that no sequence needs
    room    capacity for more tokens and sequences
    """

    heads: Heads
    chunks: tuple[tuple[int, int, int], ...]
    spare: int = 0
    room: tuple[int, int] = (0, 0)
    block_m: int | None = None
    config: tuple[tuple[str, int], ...] = ()

    def __str__(self):
        chunks = "_".join(f"{batch}x{length}after{before}" for batch, length, before in self.chunks)
        room = "" if self.room == (0, 0) else "-{}tokens{}sequences".format(*self.room)
        rows = "" if self.block_m is None else f"-rows={self.block_m}"
        return f"{self.heads}-{chunks}+{self.spare}{room}{rows}" + "".join(
            f"-{name}={value}" for name, value in self.config
        )


def config(**fields):
    return tuple(fields.items())


QWEN = Heads(q_heads=16, kv_heads=2)
FEW = {"block_m": 16, "config": config(block_n=16, num_warps=1)}
PROMPTS = [
    Prompts(heads=QWEN, chunks=((1, 1, 0),)),
    Prompts(heads=QWEN, chunks=((3, 17, 0),), spare=1),
    Prompts(heads=QWEN, chunks=((1, 70, 300),)),
    Prompts(heads=QWEN, chunks=((2, 40, 0), (1, 9, 64))),
    Prompts(heads=QWEN, chunks=((1, 33, 200),), block_m=128, config=config(block_n=32, num_warps=8, num_stages=2)),
    Prompts(heads=QWEN, chunks=((1, 130, 7),), spare=3, config=config(block_n=128, num_stages=2)),
    Prompts(heads=SMALL, chunks=((0, 5, 0), (2, 0, 3), (1, 3, 0))),
    Prompts(heads=SMALL, chunks=((2, 5, 0), (1, 1, 40), (2, 30, 19)), **FEW),
    Prompts(heads=SMALL, chunks=((1, 100, 0), (1, 16, 256), (3, 64, 1)), **FEW),
    Prompts(heads=QWEN, chunks=((9, 40, 0),), spare=1),
    Prompts(heads=QWEN, chunks=((1, 50, 0), (1, 3, 300), (1, 70, 11)), room=(5, 0)),
    Prompts(heads=QWEN, chunks=((1, 1, 0), (2, 30, 2)), room=(67, 5)),
    Prompts(heads=SMALL, chunks=((1, 20, 0), (1, 0, 30), (1, 9, 16)), room=(1, 2), **FEW),
    Prompts(heads=SMALL, chunks=(), room=(40, 3), **FEW),
    Prompts(heads=SMALL, chunks=()),
    Prompts(heads=SMALL, chunks=((2, 0, 3),)),
    *(Prompts(heads=heads, chunks=((2, 21, 0), (1, 50, 77)), **FEW) for heads in HEADS),
    *(Prompts(heads=heads, chunks=((1, 90, 130), (1, 7, 0)), spare=2) for heads in HEADS),
    *(Prompts(heads=heads, chunks=((1, 19, 130), (1, 30, 1)), room=(33, 1)) for heads in HEADS),
]


def attended(q, keys, values, before):
    """Attention of q [length, heads, D] after ``before`` tokens, in double; keys [tokens, kv_heads, D]."""
    length, group = q.shape[0], q.shape[1] // keys.shape[1]
    x = q.double().transpose(0, 1)
    k, v = (part.double()[: before + length].transpose(0, 1).repeat_interleave(group, 0) for part in (keys, values))
    position = before + torch.arange(length, device=q.device)
    seen = torch.arange(before + length, device=q.device) <= position[:, None]
    weights = (x @ k.transpose(1, 2) / q.shape[2] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1)


def check_prompts(device, case, calls=2):
    heads = case.heads
    S, D = heads.page_size, heads.D
    spans = [(before, length) for batch, length, before in case.chunks for _ in range(batch)]
    needed = [-(-(before + length) // S) for before, length in spans]
    total = sum(needed) + 2
    keys, values = heads.cache(total, device, 1)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(len(spans))).tolist()
    # Pages that no sequence owns must not be read, nor cells behind a sequence.
    pages = torch.full((len(spans) + case.room[1], max([*needed, 1]) + case.spare), 1 << 24, dtype=torch.int32)
    owned = torch.zeros((total, S), dtype=torch.bool)
    for b, (before, length) in enumerate(spans):
        for index in range(needed[b]):
            page = pages[b, index] = order.pop()
            owned[page, : before + length - index * S] = True
    for cache in (keys, values):
        cache[~owned[:, None, :, None].expand(cache.shape).to(device)] = torch.nan
    real = sum(length for _, length in spans)
    q = random((real + case.room[0], heads.q_heads, D), heads.dtype, device, 3)
    sizes = {"tokens": len(q), "batch": len(pages)} if any(case.room) else {}
    made = SequenceRanges.make(spans, heads.q_heads // heads.kv_heads, heads.dtype, block_m=case.block_m, **sizes).to(
        q.device
    )
    chosen = prefill.PrefillConfig(**dict(case.config)) if case.config else None
    arguments = pages.to(device), made.spans, made.tiles, made.block_m, D**-0.5, chosen
    results = [prefill.run(q, PagedCache(keys, values), *arguments) for _ in range(calls)]
    assert not results[0][real:].any(), "padding becomes 0"
    at = 0
    for b, (before, length) in enumerate(spans):
        mine = pages[b, : needed[b]].long().to(device)
        k, v = (cache[mine].transpose(1, 2).flatten(0, 1) for cache in (keys, values))
        expected = attended(q[at : at + length], k, v, before)
        # Rows that see few keys are larger: from one doubling to the next, each by its own RMS.
        ends = sorted({min(length, 1 << bits) for bits in range(length.bit_length() + 1)})
        for start, end in zip([0, *ends], ends, strict=False):
            found, what = results[0][at + start : at + end], f"{case}, {b}, from {start}"
            assert_close(found, expected[start:end], before + end + D, partials=1, what=what)
        at += length
    for result in results[1:]:
        assert_identical(result, results[0], what="another call")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_paged_prefill_attention(case, device):
    everywhere(check_prompts, device, case)


def test_every_field_of_the_config_moves():
    moved = {name for case in PROMPTS for name, _ in case.config}
    assert moved == {field.name for field in fields(prefill.PrefillConfig)}


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "chunks", [((1, 128, 0),), ((32, 128, 0),), ((1, 2048, 0),), ((1, 1000, 3001), (2, 77, 0))], ids=str
)
def test_paged_prefill_attention_of_a_model(chunks):
    for heads in (QWEN, Heads(q_heads=32, kv_heads=4)):
        check_prompts("cuda", Prompts(heads=heads, chunks=chunks))


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


def test_its_schema_and_fake_tell_the_truth():
    def main(team):
        keys, values = SMALL.cache(9, "cpu")
        args = (torch.ones(8, SMALL.q_heads, SMALL.D), keys, values, torch.zeros(2, 4, dtype=torch.int32))
        made = SequenceRanges.make([(0, 4)] * 2, SMALL.q_heads, FP32)
        torch.library.opcheck(
            torch.ops.weft.paged_prefill_attention.default, (*args, made.spans, made.tiles, 16, 0.1),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )  # fmt: skip

    weft.simulate(main, 1)
