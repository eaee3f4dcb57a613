"""Kernels that run in the simulator and that stock Triton refuses: findings of weft.check, errors of weft.simulate."""

import inspect

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.check
import weft.language as wl
from weft.errors import KernelRefused

SCALE = 3.0
LISTED = tl.constexpr(3.0)


@triton.jit
def of_a_global(x):
    tl.store(x, SCALE)  # refused: global variable SCALE


@triton.jit
def of_torch(x):
    y = torch.zeros(4)  # noqa: F841  # refused: cannot convert
    tl.store(x, 1.0)


@triton.jit
def of_a_file(x):
    with open("/dev/null"):  # refused: open is not defined
        tl.store(x, 1.0)


@triton.jit
def of_a_dictionary(x):
    table = {"a": 1.0}  # refused: Dict
    tl.store(x, table["a"])


@triton.jit
def of_try(x):
    try:  # refused: Try
        tl.store(x, 1.0)
    finally:
        tl.store(x, 2.0)


@triton.jit
def of_an_import(x):
    import math  # refused: Import

    tl.store(x, math.pi)


@triton.jit
def of_break(x):
    for i in range(4):
        tl.store(x, 1.0)
        if i == tl.program_id(0):
            break  # refused: Break


@triton.jit
def of_a_lambda(x):
    twice = lambda y: y + y  # noqa: E731  # refused: Lambda
    tl.store(x, twice(1.0))


@triton.jit
def of_two_types(x):
    if tl.program_id(0) == 0:  # refused: Mismatched type for y between then block (int32) and else block (fp32)
        y = 1
    else:
        y = 1.5
    tl.store(x, y)


@triton.jit
def of_a_called_function(x):
    of_a_dictionary(x)


@triton.jit
def of_a_python_number(x, rank):  # a host's 1 is a constant, which has no methods
    tl.store(x, rank.to(tl.float32))  # refused: 'int' object has no attribute 'to'


@triton.jit
def compiled(x, team, maybe, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(x + at, LISTED + wl.rank(team), mask=at < 4)
    if maybe is not None:
        tl.store(maybe, 2.0)


REFUSED = [kernel for name, kernel in globals().items() if name.startswith("of_")]


def refusal_of(kernel):
    """Line that ends in ``# refused: MESSAGE``, and MESSAGE."""
    of = of_a_dictionary if kernel is of_a_called_function else kernel
    source, first = inspect.getsourcelines(of.fn)
    return next(
        (first + i, line.split("# refused: ")[1].strip()) for i, line in enumerate(source) if "# refused" in line
    )


def launching(kernel):
    def main(team):
        x = team.local(4, torch.float32)
        kernel[(1,)](x, team.rank) if kernel is of_a_python_number else kernel[(1,)](x)

    return main


@pytest.mark.parametrize("kernel", REFUSED, ids=lambda kernel: kernel.__name__)
def test_a_kernel_that_triton_refuses_is_a_finding_with_its_line(kernel):
    line, message = refusal_of(kernel)
    (found,) = weft.check(launching(kernel), 2, schedules=2).findings
    assert (found.finding.kind, found.finding.lines) == ("compile-error", (line,))
    assert f"Triton does not compile kernel {kernel.__name__}: " in found.finding.message
    assert message in found.finding.message
    assert found.schedules == 2 and found.finding.sides[0].place.file == __file__
    assert weft.check(launching(kernel), 2, schedules=1, compile=False).ok


def test_simulate_raises_after_the_run():
    line, message = refusal_of(of_a_called_function)
    main = launching(of_a_called_function)
    assert weft.simulate(main, 2) == [None, None]
    with pytest.raises(KernelRefused) as error:
        weft.simulate(main, 2, compile=True)
    assert f"{__file__}:{line}: Triton does not compile kernel of_a_called_function: " in str(error.value)
    assert message in str(error.value) and len(error.value.refused) == 1


def test_each_rank_compiles_what_its_arguments_make_of_a_kernel():
    def main(team):
        of_a_python_number[(1,)](team.local(4, torch.float32), team.rank + 2)

    assert weft.check(main, 2, schedules=1).ok, "an integer other than 1 is a tensor, which has .to"


def test_kernels_that_triton_compiles_pass():
    def main(team):
        x = team.zeros(4, torch.float32)
        for maybe in (None, x):
            compiled[(1,)](team.local(4, torch.float32), team.view, maybe, block=8, num_warps=2, waves_per_eu=1)
        return weft.ops.all_reduce(x, team)

    weft.simulate(main, 3, compile=True)
    assert weft.check(main, 2, schedules=2).ok


SEEN = []


def kinds_of(value):
    is_tuple = isinstance(value, (tuple, list, tl.tuple))
    return type(value).__name__, *(map(kinds_of, value) if is_tuple else ())


@tl.core.builtin
def notes_its_arguments(shape, named=None, _semantic=None):
    SEEN.append((kinds_of(shape), kinds_of(named)))


def test_a_builtin_of_another_project_gets_what_triton_s_compiler_gives_it():
    @triton.jit
    def passes(x, N: tl.constexpr):
        shape = (4, N)
        notes_its_arguments((N, 2), named=[(1, 2.5), None, "a", tl.float32])
        notes_its_arguments([N, x], named=(shape, shape[0], (1, ())))

    SEEN.clear()
    weft.simulate(lambda team: passes[(1,)](team.local(4, torch.float32), 8), 1, compile=True)
    interpreted, compiled = SEEN[:2], SEEN[2:]
    assert interpreted == compiled and interpreted[0][0] == ("tuple", ("constexpr",), ("constexpr",))


def test_a_marker_with_a_reason_allows_a_refusal():
    @triton.jit
    def amd_only(x):
        tl.store(x, SCALE)  # weft: allow(compile-error) run with TRITON_ALLOW_NON_CONSTEXPR_GLOBALS

    report = weft.check(launching(amd_only), 1, schedules=1)
    assert report.ok and "allowed: compile-error" in report.summary
