"""Launches in the simulator: refused arguments, and all ways to pass a team's view."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import native_specialize_impl

import weft
import weft.language as wl
from weft.errors import NotInterpretable, NotSymmetric, WeftError

pytestmark = pytest.mark.triton_internals


def simulate(main, world_size: int = 1):
    return weft.simulate(main, world_size, heap_bytes=1 << 16)


@triton.jit
def counting(out, extra=None):
    tl.atomic_add(out, 1)


@pytest.mark.parametrize(
    ("grid", "error", "text"),
    [
        (4, TypeError, r"grid=4 is not a tuple; launch it as counting\[\(4,\)\]"),
        ((-2,), ValueError, r"grid=\(-2,\) is negative in dimension 0"),
        ((-2, -2), ValueError, "is negative in dimension 0"),
        ((2, -1), ValueError, "is negative in dimension 1"),
        ((2.0,), TypeError, r"has 2.0 in dimension 0; pass integers \(triton.cdiv"),
        (("2",), TypeError, "has '2' in dimension 0"),
        ((1, 65536), ValueError, "more than 65,535 programs in dimension 1"),
        ((1, 1, 70000), ValueError, "more than 65,535 programs in dimension 2"),
        ((2**31,), ValueError, "more than 2,147,483,647 programs in dimension 0"),
        ((), ValueError, "has 0 dimensions"),
        ((1, 1, 1, 1), ValueError, "has 4 dimensions"),
        (lambda meta: (8 / 4,), TypeError, "has 2.0 in dimension 0"),
    ],
)
def test_a_grid_that_a_gpu_would_not_launch_is_refused_in_one_line(grid, error, text):
    with pytest.raises(error, match=text) as caught:
        simulate(lambda _: counting[grid](torch.zeros(1, dtype=torch.int32)))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("counting: ")


@pytest.mark.parametrize(
    ("grid", "programs"), [((0,), 0), ((3, 0), 0), ([2, 3], 6), ((np.int64(2),), 2), ((tl.constexpr(2), True), 2)]
)
def test_what_a_gpu_takes_for_a_grid_is_taken(grid, programs):
    def main(team):
        out = torch.zeros(1, dtype=torch.int32)
        counting[grid](out)
        return out.item()

    assert simulate(main) == [programs]


class NotATensor:
    pass


@pytest.mark.parametrize(
    "value",
    ["text", [1], {}, np.int32(3), np.zeros(2), torch.float32, 1j, NotATensor(), (1, "text"), torch.zeros(1) * 1j],
)
def test_an_argument_that_triton_has_no_type_for_is_refused_by_name(value):
    with pytest.raises((TypeError, KeyError)):
        native_specialize_impl(BaseBackend, value, False, True, True)
    with pytest.raises(TypeError, match=r"^counting: argument extra is a .*, which no kernel takes; pass a tensor"):
        simulate(lambda _: counting[(1,)](torch.zeros(1, dtype=torch.int32), value))


def test_a_kernel_that_is_called_without_a_grid_is_refused_in_one_line():
    with pytest.raises(
        TypeError, match=r"^counting: called on the host without a grid; launch it as counting\[\(1,\)\]\("
    ):
        simulate(lambda team: counting(team.zeros(1)))


def test_a_number_of_warps_is_a_power_of_2():
    with pytest.raises(ValueError, match="counting: num_warps=3 is not a power of 2"):
        simulate(lambda _: counting[(1,)](torch.zeros(1, dtype=torch.int32), num_warps=3))


# --- a team's view ---------------------------------------------------------------------------------------------------


@triton.jit
def push(x, out, landed, team):
    at = tl.arange(0, 8)
    peer = 1 - wl.rank(team)
    tl.store(wl.symm_at(out, peer, team) + at, tl.load(x + at))
    wl.notify(landed, peer, 1, team)
    wl.wait(landed, 1, team)


class Bundle(NamedTuple):
    team: tuple
    scale: int


@triton.jit
def push_of_a_bundle(x, out, landed, bundle):
    push(x, out, landed, bundle.team)


def pushes(launch):
    def main(team):
        out, landed = team.zeros((8,), torch.float32), team.signals(1)
        launch(torch.full((8,), team.rank + 1.0), out, landed, team)
        return out[0].item()

    return main


WAYS = {
    "by position": lambda x, out, landed, team: push[(1,)](x, out, landed, team.view),
    "by name": lambda x, out, landed, team: push[(1,)](x, out, landed, team=team.view),
    "all by name": lambda x, out, landed, team: push[(1,)](team=team.view, landed=landed, out=out, x=x),
    "in a tuple": lambda x, out, landed, team: push_of_a_bundle[(1,)](x, out, landed, Bundle(team.view, 2)),
    "in a tuple by name": lambda x, out, landed, team: push_of_a_bundle[(1,)](
        x, out, landed, bundle=Bundle(team.view, 2)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_view_is_known_however_it_is_passed(way):
    main = pushes(WAYS[way])
    report = weft.check(main, 2, schedules=2)
    assert report.ok, str(report)
    assert simulate(main, 2) == [2.0, 1.0]


@triton.jit
def first(landed, team):
    wl.wait(landed, 1, team)
    wl.notify(landed + 1, 1 - wl.rank(team), 1, team)


@triton.jit
def second(landed, team):
    wl.wait(landed + 1, 1, team)
    wl.notify(landed, 1 - wl.rank(team), 1, team)


def test_launches_in_different_orders_are_seen_with_views_by_name():
    def main(team):
        landed = team.signals(2)
        for kernel in (first, second) if team.rank else (second, first):
            kernel[(1,)](landed, team=team.view)

    report = weft.check(main, 2, schedules=1)
    assert [found.finding.kind for found in report.findings] == ["launch-mismatch"]


@pytest.mark.parametrize("pass_by", ["position", "name", "tuple"])
def test_a_team_in_place_of_its_view_is_refused_in_one_line_here_and_by_triton(pass_by):
    """The refusal is in the attribute that Triton reads for an argument's type, so it holds on GPUs too."""

    def main(team):
        with pytest.raises(TypeError) as by_triton:
            native_specialize_impl(BaseBackend, (1, team) if pass_by == "tuple" else team, False, True, True)
        assert str(by_triton.value) == "a kernel takes a team's view, not the Team itself: pass team.view, not team"
        out, landed = team.zeros((8,), torch.float32), team.signals(1)
        if pass_by == "position":
            push[(1,)](out, out, landed, team)
        elif pass_by == "name":
            push[(1,)](out, out, landed, team=team)
        else:
            push_of_a_bundle[(1,)](out, out, landed, Bundle(team, 2))

    with pytest.raises(
        TypeError, match=r"^a kernel takes a team's view, not the Team itself: pass team.view, not team$"
    ):
        simulate(main, 2)


def test_a_target_that_is_not_symmetric_is_refused_by_name():
    def plain_target(team):
        push[(1,)](torch.ones(8), torch.zeros(8), team.signals(1), team.view)

    def plain_signal(team):
        push[(1,)](torch.ones(8), team.zeros((8,), torch.float32), torch.zeros(1, dtype=torch.int32), team.view)

    for main, name in ((plain_target, "out"), (plain_signal, "landed")):
        with pytest.raises(NotSymmetric) as caught:
            simulate(main, 2)
        text = str(caught.value)
        assert (
            f"): {name}, argument of push does not lie in the team's symmetric heap" in text
            and "test_launching.py:" in text
        )
        assert "team.empty(), team.zeros() or team.signals()" in text and "\n" not in text
        report = weft.check(main, 2, schedules=1)
        assert any(f"{name}, argument of push does not lie" in found.finding.message for found in report.findings)


def test_a_tensor_of_another_team_and_a_pointer_that_was_translated_are_no_targets():
    def of_another_team(team):
        other = team.subset([0, 1], heap_bytes=1 << 16)
        push[(1,)](torch.ones(8), other.zeros((8,), torch.float32), team.signals(1), team.view)

    with pytest.raises(WeftError, match="is of another team's heap; pass the view of the team that made it"):
        simulate(of_another_team, 2)

    @triton.jit
    def twice(x, team):
        peer = 1 - wl.rank(team)
        tl.store(wl.symm_at(wl.symm_at(x, peer, team), peer, team), 1.0)

    with pytest.raises(WeftError, match=r"leads to rank \d's memory already; pass one of this rank's, translated once"):
        simulate(lambda team: twice[(1,)](team.zeros((8,), torch.float32), team.view), 2)


# --- refused kernels -------------------------------------------------------------------------------------------------


@triton.jit
def adds_to_half(out):
    tl.inline_asm_elementwise("red.async.global.add.f16 [$1], 1;", "=r,l", [out], tl.int32, False, 1)


@triton.jit
def releases_to_all(out):
    tl.inline_asm_elementwise(
        "multimem.st.release.sys.global.u32 [$1], 1; mov.u32 $0, 0;", "=r,l", [out], tl.int32, False, 1
    )


@triton.jit
def computes(out):
    tl.store(out, tl.inline_asm_elementwise("bfind.u32 $0, $1;", "=r,r", [tl.load(out)], tl.int32, True, 1))


@pytest.mark.parametrize(
    ("kernel", "instead"),
    [
        (adds_to_half, "write tl.atomic_add or another atomic, with sem= and scope="),
        (releases_to_all, "tl.store through wl.symm_at(ptr, peer, team) in a loop over wl.num_ranks(team)"),
        (computes, "write it in plain Triton"),
    ],
)
def test_inline_assembly_is_refused_with_what_to_write_instead(kernel, instead):
    with pytest.raises(NotInterpretable) as caught:
        simulate(lambda _: kernel[(1,)](torch.zeros(1, dtype=torch.int32)))
    text = str(caught.value)
    assert text.startswith(f"inline assembly in {kernel.__name__} (") and instead in text and "\n" not in text
    assert "under `if tl.target_info.is_cuda():` with a portable twin" in text


def main_of_a_user(team):
    counting[(1,)](torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize(
    "start",
    [
        lambda: weft.simulate(main_of_a_user, 1),
        lambda: weft.check(main_of_a_user, 1, schedules=1),
        lambda: weft.launch(main_of_a_user, 1, "sim"),
        lambda: weft.launch(main_of_a_user, 1, "cuda"),
        lambda: weft.init(),
    ],
    ids=["simulate", "check", "launch sim", "launch cuda", "init"],
)
def test_triton_s_own_interpreter_is_refused_in_one_line(start, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(WeftError, match=r"^TRITON_INTERPRET is set, .*; unset it: weft\.simulate") as caught:
        start()
    assert "\n" not in str(caught.value)


def test_a_kernel_that_was_made_for_triton_s_interpreter_is_refused_in_one_line():
    """The variable was set when the kernel was defined, and is no longer."""
    kernel = InterpretedFunction(counting.fn)
    with pytest.raises(RuntimeError, match="counting was defined while TRITON_INTERPRET was set") as caught:
        simulate(lambda _: kernel[(1,)](torch.zeros(1, dtype=torch.int32)))
    assert "\n" not in str(caught.value)
