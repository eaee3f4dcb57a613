"""``Launch``: a compiled kernel for each kind of arguments; simulated ranks go through Triton's own launch."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import BaseBackend
from triton.runtime import jit
from triton.runtime.jit import JITFunction

import weft
from weft.ops.local import capabilities_of
from weft.runtime import launching
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import Launch, launch_of, launch_on


@triton.jit
def scale_kernel(out, x, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def shift_kernel(out, x, BLOCK: tl.constexpr, DOUBLED: tl.constexpr = False, BY: tl.constexpr = 1):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) * (2 if DOUBLED else 1) + BY)


def kind_of(*arguments):
    kind = []
    launching._describe(arguments, kind)
    return tuple(kind)


X = torch.zeros(64, dtype=torch.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X,), (X.half(),)),  # dtypes
        ((X,), (X[1:],)),  # pointers on 16 bytes, or not
        ((1,), (3,)),  # 1 is a constant to Triton
        ((16,), (17,)),  # multiples of 16
        ((3,), (2**31,)),  # 64 bits
        ((3,), (-(2**31) - 1,)),
        ((2**62,), (2**63,)),  # unsigned
        ((True,), (False,)),
        ((True,), (1,)),  # i1, not an integer
        ((False,), (0,)),
        (((3, 16),), ((3, 17),)),  # within tuples
        (((3,),), ((3, 3),)),
        ((3, 16), (16, 3)),
        ((1, (3,)), ((1,), 3)),
        ((tl.constexpr(3),), (tl.constexpr(5),)),
        ((tl.constexpr(0),), (3,)),
        ((tl.constexpr(True),), (tl.constexpr(1),)),
        ((2.0,), (3,)),
    ],
)
def test_arguments_that_triton_compiles_apart_have_other_keys(one, other):
    assert kind_of(*one) != kind_of(*other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X,), (torch.ones(8),)),
        ((X,), (X[4:],)),
        ((3,), (7,)),
        ((16,), (1 << 20,)),
        ((2.0,), (3.5,)),
        ((2.0,), (np.float64(2.0),)),
        (((3, 16),), ((5, 32),)),
    ],
)
def test_arguments_of_one_kernel_share_a_key(one, other):
    assert kind_of(*one) == kind_of(*other)


@pytest.mark.triton_internals
def test_keys_differ_wherever_tritons_own_differ():
    values = [True, False, 0, 1, 3, 16, -1, -16, 1.0, 2.5, None, X, X[1:], X[4:], X.half()]
    values += [sign * (2**bits) + more for bits in (31, 40, 62) for sign in (1, -1) for more in (-1, 0, 1)]
    values += [2**63, 2**63 + 1, 2**64 - 1]
    own = [jit.native_specialize_impl(BaseBackend, x, False, True, True) for x in values]
    for (one, its), (other, others) in itertools.product(zip(values, own, strict=True), repeat=2):
        assert its == others or kind_of(one) != kind_of(other), (one, its, other, others)


def test_simulated_ranks_go_through_tritons_launch(monkeypatch):
    """Wherever ``JITFunction.run`` is not Triton's, every call goes through it, and none is kept."""

    def main(team):
        out, x = torch.zeros(10), torch.arange(10.0)
        launch = launch_of(team, scale_kernel, "a key", lambda: {"BLOCK": 4, "num_warps": 1})
        assert launch_of(team, scale_kernel, "a key", dict) is launch
        assert launch_of(team, scale_kernel, "another", lambda: {"BLOCK": 4}) is not launch
        for factor in (2.0, 3.0):
            launch(3, out, x, 10, factor)
            assert torch.equal(out, factor * x)
        assert not launch._compiled

    weft.simulate(main, 2)


class Compiled:
    """Stands for a CompiledKernel."""

    function = packed_metadata = None

    def __init__(self):
        self.ran = []

    def run(self, *arguments):
        self.ran.append(arguments)


@pytest.fixture
def made(monkeypatch):
    """Launches that went through Triton, with (grid, arguments, options) each, as if on a GPU."""
    made = []

    def run(self, *arguments, grid, warmup, **options):
        made.append((grid, arguments, options))
        return Compiled()

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launching, "_TRITON_RUN", run)
    monkeypatch.setattr(launching, "CompiledKernel", Compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return made


def test_a_kind_of_arguments_is_compiled_once(made):
    launch = Launch(scale_kernel, {"BLOCK": 4, "num_warps": 1}, fixed=(2.0,), before=3)
    for n, compiled in ((3, 1), (5, 1), (16, 2), (3, 2), (32, 2), (1, 3)):
        launch(n, X, X, n)
        assert len(made) == compiled == len(launch._compiled)
    assert made[0] == ((3,), (X, X, 3, 2.0), {"BLOCK": 4, "num_warps": 1})
    # The kept kernel gets the grid, the stream and all arguments, the constexpr ones at the end.
    ran = [arguments for kernel, *_ in launch._compiled.values() for arguments in kernel.ran]
    assert [(arguments[0], arguments[3], arguments[-3:]) for arguments in ran] == [
        (5, 7, (5, 2.0, 4)),
        (3, 7, (3, 2.0, 4)),
        (32, 7, (32, 2.0, 4)),
    ]


@pytest.mark.parametrize(
    ("constants", "given"), [({}, (4, False, 1)), ({"BY": 5}, (4, False, 5)), ({"DOUBLED": True}, (4, True, 1))]
)
def test_a_kept_kernel_is_given_the_defaults_that_no_constant_replaces(made, constants, given):
    launch = Launch(shift_kernel, {"BLOCK": 4, **constants, "num_warps": 1})
    for _ in range(2):
        launch(1, X, X)
    ((kernel, *_),) = launch._compiled.values()
    assert kernel.ran[-1][-5:] == (X.data_ptr(), X.data_ptr(), *given)


def test_tensors_are_passed_as_addresses(made):
    class View(NamedTuple):
        word: torch.Tensor
        count: int

    view = View(X[1:], 3)
    launch = Launch(scale_kernel, {"BLOCK": 4}, fixed=(X, view), before=1)
    for factor in (2.0, 3.0):
        launch((5, 6), X, factor)
    assert made == [((5, 6), (X, X, view, 2.0), {"BLOCK": 4})]
    ((kernel, *_),) = launch._compiled.values()
    (ran,) = kernel.ran
    assert (ran[:4], ran[-5:]) == ((5, 6, 1, 7), (X.data_ptr(), X.data_ptr(), (X.data_ptr() + 4, 3), 3.0, 4))


def test_launches_of_virtual_ranks_have_the_options_of_the_gpu_that_they_are_like():
    def main(team):
        options = launch_options(capabilities_of(torch.device("cpu")))
        launch = launch_on(torch.device("cpu"), scale_kernel, "a key", lambda: {"BLOCK": 16, **options})
        return launch._constants.get("launch_pdl", False)

    assert [weft.simulate(main, 1, like=like) for like in ("h200", "a100", "h200")] == [[True], [False], [True]]
