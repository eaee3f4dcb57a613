"""Sizes, data and checks that the tests of attention, elementwise and vocabulary ops share."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import weft
from weft.kernels.deferred_norm import DeferredNorm
from weft.ops.case import BF16, FP16, FP32

EPS = 1e-6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]


def everywhere(check, device, *args):
    """Run ``check(device, *args)``, on a virtual rank where the device is the CPU."""
    if device == "cpu":
        weft.simulate(lambda team: check(device, *args), 1)
    else:
        check(device, *args)


def random(shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def deferred(x, parts):
    """``x`` with a deferred RMS scale in ``parts``, and that scale in fp64."""
    generator = torch.Generator().manual_seed(parts)
    squares = (10 ** (2 * torch.rand((x.shape[0], parts), generator=generator))).to(x.device)
    return DeferredNorm(x, squares, EPS), (squares.double().sum(-1, keepdim=True) + EPS).rsqrt()


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


def layer_arguments(heads=SMALL, tokens=3):
    """Arguments of a qk_norm_rope, and of a paged_attention that is split."""
    D, dtype = heads.D, heads.dtype
    keys, values = heads.cache(40, "cpu")
    qkv = random((tokens, (heads.q_heads + 2 * heads.kv_heads) * D), dtype, "cpu")
    weight, angles = torch.ones(D, dtype=dtype), random((9, D), FP32, "cpu")
    positions, slots = torch.arange(tokens), torch.arange(tokens) * 17
    pages, lengths = torch.arange(20, dtype=torch.int32)[None], torch.full((1,), 300, dtype=torch.int32)
    tickets = torch.zeros(heads.kv_heads, dtype=torch.int32)
    return (
        [qkv, weight, weight, EPS, angles, positions, slots, keys, values],
        [qkv.view(tokens, -1, D)[:1, : heads.q_heads].contiguous(), keys, values, pages, lengths, 0.125, tickets],
    )


def changed(position, value, arguments):
    """``arguments`` with another value at ``position``."""
    return tuple(value if at == position else argument for at, argument in enumerate(arguments))


def check_refused(op, arguments, message):
    """``op`` refuses ``arguments`` in one line that says ``message``."""
    with pytest.raises(ValueError) as refused:
        op(*arguments)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def mutated(module, old, new, name, directory):
    """A copy of ``module`` under another name with ``old`` replaced in its source, unless it is empty."""
    source = Path(module.__file__).read_text()
    assert old in source
    file = directory / f"{name}.py"
    # Registered ops stay one of a name.
    file.write_text(re.sub(r"(?m)^(\w+ = |)(register|define)\((.*)\)$", r"\1\3", source.replace(old, new or old)))
    spec = importlib.util.spec_from_file_location(name, file)
    mutant = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant
