"""The layer that benchmarks/mega_moe.py times: weft's answer is that of its dequantized reference, on virtual ranks."""

import torch

import weft
from benchmarks import mega_moe
from weft.bench.ops.moe_shapes import Mixture


def test_wefts_layer_is_the_dequantized_one(monkeypatch):
    monkeypatch.setattr(mega_moe, "gathered", lambda team, x: torch.cat(team.exchange(x)))
    monkeypatch.setattr(mega_moe, "summed", lambda team, x: sum(team.exchange(x)))
    mixture = Mixture(experts=4, k=2, hidden=256, features=128)

    def main(team):
        weights = [
            mega_moe.drawn(shape, torch.Generator().manual_seed(team.rank)) for shape in ((2, 256, 256), (2, 256, 128))
        ]
        layer = mega_moe.layer_of(team, mixture, 3, weights)
        return mega_moe.of_shape(team, layer, once=True)

    for rows in weft.simulate(main, 2):
        assert rows["weft"]["away"] < 0.06
        assert "No module named 'deep_gemm'" in rows["megamoe"]["failed"]
