"""Log-probabilities that depend on a row's logits alone, on virtual ranks."""

from types import SimpleNamespace

import pytest
import torch

import weft
from tests.compiling import compiled
from tests.ops.test_compile_layer_kernels import caps_of
from weft.engine import sampling
from weft.engine.params import MOST_LOGPROBS
from weft.engine.sampling import WIDTH, token_logprobs
from weft.ops.vocab.log_sums import join_kernel, join_log_sums, log_sums, log_sums_kernel
from weft.runtime.capabilities import launch_options

VOCABULARY, ROWS = 3000, 9


def whole_logits(dtype=torch.bfloat16, rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    logits = 6 * torch.randn(rows, 8 * -(-VOCABULARY // 8), generator=generator)
    logits[:, VOCABULARY:] = -torch.inf
    return logits.to(dtype)


def rows_of(team, logits, tokens):
    size = logits.shape[1] // team.size
    head = SimpleNamespace(team=team, mode="invariant", start=team.rank * size, local_size=size)
    return token_logprobs(head, logits[:, head.start : head.start + size], tokens)


def by_ranks(world_size, logits, tokens):
    by_rank = weft.simulate(rows_of, world_size, args=(logits, tokens))
    assert all(torch.equal(rows, by_rank[0]) for rows in by_rank)
    return by_rank[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_have_the_same_bits_at_every_world_size_and_beside_any_rows(dtype):
    logits, tokens = whole_logits(dtype), torch.arange(ROWS) * 331
    rows = by_ranks(1, logits, tokens)
    expected = logits.double().log_softmax(-1)
    assert (rows[:, 0] - expected.gather(1, tokens[:, None])[:, 0]).abs().max() < 1e-5
    top, ids = expected.sort(dim=1, descending=True, stable=True)
    assert torch.equal(rows[:, 2 + MOST_LOGPROBS : WIDTH].long(), ids[:, :MOST_LOGPROBS])
    assert (rows[:, 2 : 2 + MOST_LOGPROBS] - top[:, :MOST_LOGPROBS]).abs().max() < 1e-5
    for world_size in (2, 4, 8):
        assert torch.equal(by_ranks(world_size, logits, tokens), rows), world_size
    for some in (slice(4, 5), slice(2, 9)):
        assert torch.equal(by_ranks(2, logits[some], tokens[some]), rows[some]), some


def test_equal_logits_come_in_the_order_of_their_ids():
    logits = whole_logits().round()  # of which many are equal
    rows = by_ranks(2, logits, torch.zeros(ROWS, dtype=torch.int64))
    ids = logits.float().sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(rows[:, 2 + MOST_LOGPROBS : WIDTH].long(), ids[:, :MOST_LOGPROBS])


def test_small_vocabularies():
    logits = torch.randn(2, 16)
    for world_size in (1, 8):
        rows = by_ranks(world_size, logits, torch.tensor([3, 15]))
        expected = logits.log_softmax(-1).sort(dim=1, descending=True, stable=True)
        assert torch.allclose(rows[:, 2:18], expected.values, atol=1e-6) and rows[:, 18].isinf().all()
        assert torch.equal(rows[:, 2 + MOST_LOGPROBS : 18 + MOST_LOGPROBS].long(), expected.indices)


@pytest.mark.parametrize("planted", ["one slice a rank", "a tree over ranks in another order"])
def test_planted_orders_are_caught(planted, monkeypatch):
    def wrong_sums(logits, slices):
        if planted.startswith("one"):
            pairs = log_sums(logits, 1)
            nothing = torch.tensor([-3.0e38, 0.0]).expand(len(logits), slices - 1, 2)
            return torch.cat((pairs, nothing), 1)
        return log_sums(logits, slices)

    def wrong_join(pairs):
        return join_log_sums(pairs.roll(1, 1) if planted.startswith("a tree") else pairs)

    monkeypatch.setattr(sampling, "log_sums", wrong_sums)
    logits, tokens = whole_logits(torch.float32, 64), torch.arange(64)
    right = by_ranks(1, logits, tokens) if planted.startswith("one") else None
    if right is None:
        right = by_ranks(2, logits, tokens)
        monkeypatch.setattr(sampling, "join_log_sums", wrong_join)
    assert not torch.equal(by_ranks(2, logits, tokens), right)


def test_slices_that_do_not_divide_a_row_are_refused():
    def main(team):
        log_sums(torch.zeros(2, 30), 8)

    with pytest.raises(ValueError, match="30 logits of a row are not 8 equal slices; pad the vocabulary"):
        weft.simulate(main, 1)


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile(arch):
    logits, sums = torch.zeros(16, dtype=torch.bfloat16), torch.zeros(16)
    options = launch_options(caps_of(arch))
    compiled(log_sums_kernel, logits, 18992, sums, 18992, arch=arch, num_warps=4, **options)
    compiled(join_kernel, sums, sums, arch=arch, num_warps=1, **options)
