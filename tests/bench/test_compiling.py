"""Compiling in place of launching: nothing runs, every failure shows, and the host code goes to its end."""

import types

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from tests.compiling import compiling_for
from weft.bench.harness.compiling import compile_only, compile_shares

TEAM = types.SimpleNamespace(is_simulated=False, device=torch.device("cpu"))


@triton.jit
def fill_kernel(x, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 64, "SIZE is too large")
    tl.store(x + tl.arange(0, SIZE), 1.0)


@pytest.mark.triton_internals
def test_kernels_are_compiled_and_loaded_and_none_is_launched(monkeypatch):
    loaded = []
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda kernel: loaded.append(kernel.name))
    x, done, launch = torch.zeros(64), [], JITFunction.run

    def action(*sizes):
        for size in sizes:
            fill_kernel[(1,)](x, SIZE=size, num_warps=1)
            done.append(size)

    with compiling_for("sm_90"):
        compile_only(lambda: action(16, 32), TEAM)
        with pytest.raises(Exception, match="SIZE is too large"):
            compile_only(lambda: action(64, 16), TEAM)
        with pytest.raises(ZeroDivisionError):
            compile_only(lambda: 1 // 0, TEAM)
    assert loaded == ["fill_kernel"] * 3
    assert done == [16, 32, 64, 16]
    assert not x.any()
    assert JITFunction.run is launch


def test_a_kernel_that_does_not_fit_the_gpu_is_a_failure(monkeypatch):
    def refuse(kernel):
        raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(CompiledKernel, "_init_handles", refuse)
    with compiling_for("sm_90"), pytest.raises(triton.runtime.errors.OutOfResources, match="shared memory"):
        compile_only(lambda: fill_kernel[(1,)](torch.zeros(64), SIZE=8, num_warps=1), TEAM)


@pytest.mark.triton_internals
def test_each_rank_compiles_its_share_and_goes_on_after_a_failure(monkeypatch):
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda kernel: None)
    compiled, met, x, launch = [], [], torch.zeros(64), JITFunction.run
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **found: compiled.append(found["key"]) or False
    )
    team = types.SimpleNamespace(
        is_simulated=False, device=x.device, rank=1, size=2, barrier=lambda: met.append("barrier")
    )
    sizes = (1, 2, 4, 64, 32, 4)  # rank 1 has 2, 64, which does not compile, and 4
    actions = [lambda size=size: fill_kernel[(1,)](x, SIZE=size, num_warps=2) for size in sizes]
    with compiling_for("sm_90"):
        compile_shares([*actions, lambda: met.append("host code of all")], team)
    assert len(compiled) == 2
    assert met == ["host code of all", "barrier"]
    assert not x.any()
    assert JITFunction.run is launch
