"""All-gather: bits arrive as they were sent."""

import torch

import weft
from weft import ops


def test_every_bit_pattern_arrives():
    """Words that read as "unwritten", and the words that the keys of such tiles would make so."""

    def main(team):
        unwritten = torch.tensor([-(2**31), -(2**31) + 1, -(2**31) + 2, 0, 7], dtype=torch.int32)
        halves = torch.tensor([-(2**15), -(2**15) + 1, 5], dtype=torch.int16)
        byte = torch.arange(-128, 127, dtype=torch.int8)
        return [(x, ops.all_gather(x, team)) for x in (unwritten, halves, byte) for _ in range(3)]

    for results in weft.simulate(main, 2, seed=3):
        for x, gathered in results:
            assert torch.equal(gathered, torch.cat([x, x]))
