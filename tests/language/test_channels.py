"""Channels: the code of signals by hand, and refusal of misuse. tests/runtime/behaviour.py runs them."""

import difflib
import re

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from tests.compiling import TARGETS, a_view, compiled
from tests.runtime import behaviour
from weft.errors import WeftError
from weft.language.channels import ChannelCall
from weft.runtime.team.channel import ChannelView


def a_channel_view(chunks=8):
    return ChannelView(
        torch.zeros(4, chunks, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), tl.constexpr(chunks)
    )


@triton.jit
def by_channel(landed, x, parts, team):
    call = wl.current_call(landed)
    for part in range(parts):
        wl.chunk_wait(call, part % 4, part // 4, team)
        tl.store(x + part, tl.load(x + part) + 1)
    wl.chunk_notify(call, 3, parts, team)


@triton.jit
def by_hand(landed, epoch, x, parts, team, CHUNKS: tl.constexpr):
    now = tl.load(epoch)
    for part in range(parts):
        wl.wait(landed + part % 4 * CHUNKS + part // 4, now, team)
        tl.store(x + part, tl.load(x + part) + 1)
    wl.notify(landed + wl.rank(team) * CHUNKS + parts, 3, now, team)


def instructions(kernel) -> list[str]:
    """The PTX of a kernel without debug information and names."""
    code = kernel.asm["ptx"].partition(".entry")[2].partition("{")[2].partition("\n}")[0]
    code = re.sub(r"//.*|\.loc.*|\$L__tmp\d+:", "", code)
    return [line for line in re.sub(r"\w+_param_\d+|\$L__\w+", "", code).splitlines() if line.strip()]


def test_a_channel_costs_no_instruction_more_than_signals_by_hand():
    landed, x = a_channel_view(), torch.zeros(64)
    ours = instructions(compiled(by_channel, landed, x, 30, a_view(), arch="sm_90"))
    hands = instructions(compiled(by_hand, landed.signals, landed.epoch, x, 30, a_view(), 8, arch="sm_90"))
    assert len(ours) > 50 and "\n".join(difflib.unified_diff(hands, ours, lineterm="", n=1)) == ""


@pytest.mark.parametrize("arch", TARGETS)
def test_every_primitive_of_a_channel_compiles(arch):
    assert compiled(behaviour.push_chunks, torch.zeros(64), torch.zeros(64), torch.zeros(64), a_channel_view(), a_view(),
                    16, arch=arch).asm  # fmt: skip


@triton.jit
def misuses(landed, x, n, team, CASE: tl.constexpr):
    call = wl.next_call(landed)
    if CASE == "chunk_wait: call is a tuple (signals, epoch, chunks); pass what wl.next_call(channel) or":
        wl.chunk_wait(landed, 0, 0, team)
    if CASE == "chunk_notify: call is a pointer to int32; pass what wl.next_call":
        wl.chunk_notify(landed.signals, 0, 0, team)
    if CASE == "advance_call: call is a tuple (signals, epoch, chunks)":
        wl.advance_call(landed)
    if (
        CASE
        == "next_call: channel is a tuple (signals, epoch, chunks, now); pass the kernel's argument that was channel.view"
    ):
        wl.next_call(call)
    if CASE == "current_call: channel is a pointer to fp32":
        wl.current_call(x)
    if CASE == "chunk_notify: peer is 1.0":
        wl.chunk_notify(call, 1.0, 0, team)
    if CASE == "chunk_wait: source is a block of shape [4] of int32":
        wl.chunk_wait(call, tl.arange(0, 4), 0, team)
    if CASE == "chunk_wait: team is 1; pass the kernel's argument that was team.view":
        wl.chunk_wait(call, 0, 0, 1)


MISUSES = re.findall(r'CASE == "(.*)"', misuses.src)


@pytest.mark.parametrize("case", MISUSES)
def test_compiler_and_simulator_refuse_a_misuse_in_the_same_words(case):
    def main(team):
        misuses[(1,)](team.channel(8).view, torch.zeros(4), 3, team.view, case)

    for run in (
        lambda: compiled(misuses, a_channel_view(), torch.zeros(4), 3, a_view(), case, arch="sm_90"),
        lambda: weft.simulate(main, 1),
    ):
        with pytest.raises(Exception) as caught:
            run()
        story, error = "", caught.value
        while error is not None:
            story, error = story + str(error), error.__cause__ or error.__context__
        assert case in story


@triton.jit
def waits_for(landed, source, chunk, team):
    wl.chunk_wait(wl.current_call(landed), source, chunk, team)


@pytest.mark.parametrize(("source", "chunk"), [(2, 0), (-1, 0), (0, 8), (1, -1)])
def test_the_simulator_refuses_chunks_that_a_channel_has_not(source, chunk):
    def main(team):
        waits_for[(1,)](team.channel(8).view, source, chunk, team.view)

    message = (
        f"rank={source}, chunk={chunk} of a channel of 2 ranks and 8 chunks; pass a rank in 0 .. 1 and a chunk in 0"
    )
    with pytest.raises(WeftError, match=re.escape(message)):
        weft.simulate(main, 2)


def test_bad_arguments_on_the_host():
    def main(team):
        for chunks in (0, -1, 1.0, "8", None, True):
            with pytest.raises(ValueError, match=r"chunks=.* is not a positive integer"):
                team.channel(chunks)
        channel, x = team.channel(4), team.zeros(4)
        for chunk in (4, -1, 1.0):
            with pytest.raises(ValueError, match=rf"chunk={chunk} is not an integer in 0 .. 3"):
                channel.send(x, x.clone(), 0, chunk)
        with pytest.raises(
            TypeError, match="a kernel takes a channel's view, not the Channel itself: pass channel.view"
        ):
            waits_for[(1,)](channel, 0, 0, team.view)
        team.close()
        with pytest.raises(weft.errors.TeamClosed):
            channel.send(x, x.clone(), 0, 0)

    weft.simulate(main, 1)


def test_a_call_is_a_named_tuple_for_kernels_only():
    assert ChannelCall._fields == (*ChannelView._fields, "now")
