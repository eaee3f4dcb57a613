"""Stores and loads of the same bytes by different threads of one program."""

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.check

N = 32


@triton.jit
def read_back(x, got, WHAT: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    half = tl.arange(0, N // 2)
    tl.store(x + at, at.to(tl.float32))
    if WHAT == "same":
        y = tl.load(x + at)
    elif WHAT == "masked":
        y = tl.load(x + at, mask=at > 3, other=0.0)
    elif WHAT == "as a row":
        y = tl.reshape(tl.load(x + at[None, :]), (N,))
    elif WHAT == "other bytes":
        y = tl.load(x + N + at)
    elif WHAT == "behind a barrier":
        tl.debug_barrier()
        y = tl.load(x + (at ^ 1))
    elif WHAT == "volatile":
        y = tl.load(x + at, volatile=True)
    elif WHAT == "neighbours":
        y = tl.load(x + (at ^ 1))
    elif WHAT == "shifted":
        y = tl.load(x + at + 1)
    elif WHAT == "half":
        y = tl.join(tl.load(x + half), tl.load(x + half + N)).reshape((N,))
    elif WHAT == "one":
        y = at * 0.0 + tl.load(x + 3)
    else:
        tl.static_assert(WHAT == "bits")
        words = tl.load((x + N // 2).to(tl.pointer_type(tl.int64), bitcast=True) + half)
        y = tl.join(words, words).reshape((N,)).to(tl.float32)
    tl.store(got + at, y)


@pytest.mark.parametrize(
    ("what", "kinds"),
    [(what, set()) for what in ("same", "masked", "as a row", "other bytes", "behind a barrier", "volatile")]
    + [(what, {"cta-race"}) for what in ("neighbours", "shifted", "half", "one", "bits")],
)
def test_the_threads_that_read_back_a_program_s_stores(what, kinds):
    def main(team):
        read_back[(1,)](torch.zeros(2 * N), torch.zeros(N), what, N)

    report = weft.check(main, 1, schedules=1)
    assert {found.finding.kind for found in report.findings} == kinds, str(report)


@triton.jit
def many_rows(x, got, rows, N: tl.constexpr):
    at = tl.arange(0, N)
    for row in range(rows):
        tl.store(x + row * N + at, at.to(tl.float32))
    for row in range(rows):
        tl.store(got + row * N + at, tl.load(x + row * N + at))


def test_a_loop_of_blocks_is_read_back_by_the_threads_that_wrote_them():
    report = weft.check(lambda team: many_rows[(1,)](torch.zeros(80 * N), torch.zeros(80 * N), 80, N), 1, schedules=1)
    assert report.ok, str(report)
