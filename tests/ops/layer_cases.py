"""What the tests of a decode layer's own kernels share: sizes, data, and where a check runs."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import weft
from tests.ops.cases import BF16, FP16, FP32
from weft.kernels.deferred_norm import DeferredNorm

NORM_EPS = 1e-6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]


def everywhere(check, device, *args):
    """``check(device, *args)``: of CPU tensors on a virtual rank."""
    if device == "cpu":
        weft.simulate(lambda team: check(device, *args), 1)
    else:
        check(device, *args)


def random(shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def undivided(x, parts):
    """``x`` as a product of a factored norm, in so many parts; and what its rows are to be multiplied by, in fp64."""
    generator = torch.Generator().manual_seed(parts)
    squares = (10 ** (2 * torch.rand((x.shape[0], parts), generator=generator))).to(x.device)
    return DeferredNorm(x, squares, NORM_EPS), (squares.double().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The sizes of an attention and its cache."""

    q_heads: int
    kv_heads: int
    D: int = 128
    page_size: int = 64
    dtype: torch.dtype = BF16

    def __str__(self):
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.q_heads}-{self.kv_heads}-{self.D}-{self.page_size}-{dtype}"

    def cache(self, pages, device, seed=0):
        shape = (pages, self.kv_heads, self.page_size, self.D)
        return random(shape, self.dtype, device, seed), random(shape, self.dtype, device, seed + 1)


HEADS = [
    Heads(q_heads=16, kv_heads=2),
    Heads(q_heads=4, kv_heads=4, D=64, page_size=16, dtype=FP16),
    Heads(q_heads=2, kv_heads=1, D=64, dtype=FP32),
    Heads(q_heads=12, kv_heads=3, D=64, page_size=16),
    Heads(q_heads=8, kv_heads=1, D=128, page_size=16, dtype=FP32),
    Heads(q_heads=6, kv_heads=2, D=16, page_size=32),
    Heads(q_heads=3, kv_heads=1, D=256, page_size=128, dtype=FP16),
]
SMALL = Heads(q_heads=4, kv_heads=1, D=64, page_size=16, dtype=FP32)


def mutated(module, old, new, name, directory):
    """``module`` with ``old`` replaced in its source, under another name; as it is where ``old`` is empty."""
    source = Path(module.__file__).read_text()
    assert old in source
    file = directory / f"{name}.py"
    file.write_text(source.replace(old, new or old).replace('custom_op("', f'custom_op("{name}_'))
    spec = importlib.util.spec_from_file_location(name, file)
    mutant = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant
