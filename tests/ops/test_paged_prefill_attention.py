"""paged_prefill_attention against plain PyTorch in double, on a virtual rank and on a GPU."""

import importlib
from dataclasses import dataclass, fields

import pytest
import torch

import weft
import weft.check
from tests.ops.cases import FP32
from tests.ops.closeness import assert_close, assert_identical
from tests.ops.layer_cases import DEVICES, HEADS, SMALL, Heads, everywhere, random
from weft import ops

prefill = importlib.import_module("weft.ops.paged_prefill_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """chunks: (batch, length, before) of each, one after the other; spare: pages of the table that no sequence needs"""

    heads: Heads
    chunks: tuple[tuple[int, int, int], ...]
    spare: int = 0
    config: tuple[tuple[str, int], ...] = ()

    def __str__(self):
        chunks = "_".join(f"{batch}x{length}after{before}" for batch, length, before in self.chunks)
        return f"{self.heads}-{chunks}+{self.spare}" + "".join(f"-{name}={value}" for name, value in self.config)


def config(**fields):
    return tuple(fields.items())


QWEN = Heads(q_heads=16, kv_heads=2)
FEW = config(block_m=16, block_n=16, num_warps=1)
PROMPTS = [
    Prompts(heads=QWEN, chunks=((1, 1, 0),)),
    Prompts(heads=QWEN, chunks=((3, 17, 0),), spare=1),
    Prompts(heads=QWEN, chunks=((1, 70, 300),)),
    Prompts(heads=QWEN, chunks=((2, 40, 0), (1, 9, 64))),
    Prompts(heads=QWEN, chunks=((1, 33, 200),), config=config(block_m=128, block_n=32, num_warps=8, num_stages=2)),
    Prompts(heads=QWEN, chunks=((1, 130, 7),), spare=3, config=config(block_n=128, num_stages=2)),
    Prompts(heads=SMALL, chunks=((0, 5, 0), (2, 0, 3), (1, 3, 0))),
    Prompts(heads=SMALL, chunks=((2, 5, 0), (1, 1, 40), (2, 30, 19)), config=FEW),
    Prompts(heads=SMALL, chunks=((1, 100, 0), (1, 16, 256), (3, 64, 1)), config=FEW),
    Prompts(heads=QWEN, chunks=((9, 40, 0),), spare=1),
    *(Prompts(heads=heads, chunks=((2, 21, 0), (1, 50, 77)), config=FEW) for heads in HEADS),
    *(Prompts(heads=heads, chunks=((1, 90, 130), (1, 7, 0)), spare=2) for heads in HEADS),
]


def attended(q, keys, values, before):
    """In double: q [length, heads, D] after ``before`` tokens; keys, values [tokens, kv_heads, D]."""
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
    # What no sequence owns must not be read: neither such pages' ids, nor what lies in pages behind a sequence.
    pages = torch.full((len(spans), max(*needed, 1) + case.spare), 1 << 24, dtype=torch.int32)
    owned = torch.zeros((total, S), dtype=torch.bool)
    for b, (before, length) in enumerate(spans):
        for index in range(needed[b]):
            page = pages[b, index] = order.pop()
            owned[page, : before + length - index * S] = True
    for cache in (keys, values):
        cache[~owned[:, None, :, None].expand(cache.shape).to(device)] = torch.nan
    q = random((sum(length for _, length in spans), heads.q_heads, D), heads.dtype, device, 3)
    chunks, token, sequence = [], 0, 0
    for batch, length, before in case.chunks:
        chunks.append((batch, length, before, token, sequence))
        token, sequence = token + batch * length, sequence + batch

    chosen = prefill.PrefillConfig(**dict(case.config)) if case.config else None
    flat = [number for chunk in chunks for number in chunk]
    results = [prefill.run(q, keys, values, pages.to(device), flat, D**-0.5, chosen) for _ in range(calls)]
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
    """A scale, strided queries, and tokens of no chunk before and behind."""

    def check(device):
        keys, values = SMALL.cache(4, device)
        q = random((SMALL.q_heads, 9, SMALL.D), FP32, device, 7).transpose(0, 1)
        pages = torch.tensor([[0, 0], [3, 1]], dtype=torch.int32, device=device)
        out = ops.paged_prefill_attention(q, keys, values, pages, [(1, 6, 14, 2, 1)], scale=2 * SMALL.D**-0.5)
        k, v = (cache[pages[1].long(), 0].flatten(0, 1)[:, None] for cache in (keys, values))
        assert_close(out[2:8], attended(2 * q[2:8], k, v, 14), 20 + SMALL.D, what="rows 2 to 7")

    everywhere(check, device)


def test_no_races():
    def main(team):
        keys, values = SMALL.cache(9, "cpu")
        q = random((40, SMALL.q_heads, SMALL.D), FP32, "cpu", 2)
        pages = torch.arange(8, dtype=torch.int32).view(2, 4)
        return ops.paged_prefill_attention(q, keys, values, pages, [(2, 20, 30, 0, 0)])

    report = weft.check.check(main, 1, schedules=5)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"chunks": [(1, 4, 0, 0)]}, r"chunk \(1, 4, 0, 0\) is not \(batch, length, before"),
        ({"chunks": [(1, 4, -1, 0, 0)]}, r"none negative"),
        ({"chunks": [(2, 4, 0, 1, 0)]}, r"chunk \(2, 4, 0, 1, 0\) reaches to 9 of the 8 tokens of q"),
        ({"chunks": [(2, 4, 0, 0, 1)]}, r"reaches to 3 of the 2 rows of pages"),
        ({"chunks": [(2, 4, 61, 0, 0)]}, r"reaches to 65 of the 64 tokens that a row of pages holds"),
        ({"scale": 0.0}, r"scale=0.0 is not positive"),
        ({"q": torch.zeros(8, 4, 32)}, r"q has shape \(8, 4, 32\)"),
        ({"pages": torch.zeros(2, 4)}, r"pages.dtype=torch.float32 is not one of int32"),
    ],
)
def test_what_does_not_fit_is_refused(changed, words):
    keys, values = SMALL.cache(9, "cpu")
    arguments = {
        "q": torch.zeros(8, SMALL.q_heads, SMALL.D), "keys": keys, "values": values,
        "pages": torch.zeros(2, 4, dtype=torch.int32), "chunks": [(2, 4, 0, 0, 0)],
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        ops.paged_prefill_attention(**arguments | changed)


def test_its_schema_and_fake_tell_the_truth():
    def main(team):
        keys, values = SMALL.cache(9, "cpu")
        args = (torch.ones(8, SMALL.q_heads, SMALL.D), keys, values, torch.zeros(2, 4, dtype=torch.int32))
        torch.library.opcheck(
            torch.ops.weft.paged_prefill_attention.default, (*args, [2, 4, 0, 0, 0], 0.1),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )  # fmt: skip

    weft.simulate(main, 1)
