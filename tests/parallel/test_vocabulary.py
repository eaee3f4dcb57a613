"""Embedding and head split over the ranks, against the whole ones."""

import pytest
import torch

import weft
from weft.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead

MODES = ["reference", "sequence_parallel", "replicated"]


def fill(layer, weight):
    layer.shards()["weight"].copy_from(weight)
    return layer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("vocab_size", "world_size"), [(10, 1), (11, 2), (9, 4), (5, 4)])
def test_a_split_embedding_looks_up_every_token_id(mode, vocab_size, world_size):
    weight, tokens = torch.randn(vocab_size, 8), torch.arange(vocab_size)

    def main(team):
        return fill(VocabParallelEmbedding(vocab_size, 8, team=team, mode=mode, dtype=torch.float32), weight)(tokens)

    found = weft.simulate(main, world_size)
    if mode == "sequence_parallel":
        found = [torch.cat(found)[:vocab_size]]
    assert all(torch.equal(rows, weight) for rows in found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("vocab_size", "world_size"), [(10, 1), (11, 2), (9, 4), (5, 4)])
def test_a_split_head_finds_the_largest_logit_and_of_equals_the_first(mode, vocab_size, world_size):
    weight = torch.eye(vocab_size, 16)
    x = torch.zeros(4, 16)
    x[0, vocab_size - 1] = 1.0
    x[1, 0] = 1.0
    x[2, 2] = x[2, vocab_size - 1] = 1.0
    x[3] = -1.0  # all real ids below the zero that unmasked padding would get

    def main(team):
        head = fill(VocabParallelHead(vocab_size, 16, team=team, mode=mode, dtype=torch.float32), weight)
        logits = head(x)
        return head.argmax(logits), head.gather(logits)

    for best, logits in weft.simulate(main, world_size):
        assert best.tolist() == [vocab_size - 1, 0, 2, 0]
        assert torch.equal(logits, x @ weight.T)
