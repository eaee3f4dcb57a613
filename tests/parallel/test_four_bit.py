"""Scales of a layer in 4 bits, as kernels read them fastest: again after they are written anew."""

import pytest
import torch

from weft.kernels.four_bit import narrow
from weft.parallel.four_bit import MADE, Cut, FourBitScales
from weft.parallel.sharding import Shard

N, K = 4, 256


def scales_of(kind, device="cpu"):
    return FourBitScales(Cut.of(MADE[kind], K, []), N, device=torch.device(device))


def with_scales(scales, value):
    scales.load_state_dict({"scales": torch.full_like(scales.scales, value, dtype=scales.scales.dtype)})
    return scales.matrix(torch.zeros(N, K // 2, dtype=torch.uint8)).scales


def test_scales_of_mxfp4_are_small_until_larger_ones_are_loaded():
    scales = scales_of("mxfp4")
    assert with_scales(scales, 128).dtype == torch.int8
    assert with_scales(scales, 129).dtype == torch.uint8 and with_scales(scales, 1).dtype == torch.int8
    assert with_scales(scales, 255).dtype == torch.uint8  # NaN


@pytest.mark.parametrize("again", ["state dict", "shards"])
def test_scales_of_int4_are_narrow_until_others_are_loaded(again):
    scales = scales_of("int4")
    assert with_scales(scales, 0.25).dtype == torch.bfloat16
    value = torch.tensor(1.2345)
    assert narrow(value).dtype == torch.float32
    if again == "state dict":
        scales.load_state_dict({"scales": value.expand(N, K // 128)})
    else:
        weight = Shard(target=torch.zeros(N, K // 2, dtype=torch.uint8), dim=0, start=0, shape=(N, K))
        [of_scales] = [shard for shard in scales.shards("x", weight).values() if hasattr(shard, "scales")]
        of_scales.scales.fill_(value)
    read = scales.matrix(torch.zeros(N, K // 2, dtype=torch.uint8)).scales
    assert read.dtype == torch.float32 and (read == value).all()


def test_scales_without_values_stay_as_they_are():
    made = scales_of("int4", "meta").matrix(torch.zeros(N, K // 2, dtype=torch.uint8, device="meta"))
    assert made.scales.dtype == torch.float32
