"""A peer outside of the team, such as a rank of another node, is refused wherever it can be known."""

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from tests.compiling import a_view, compiled
from weft.errors import NotAPeer
from weft.runtime.wait_record import raise_from_record

SIGNAL = torch.zeros(4, dtype=torch.int32)


@triton.jit
def notify_one(signal, peer, team):
    wl.notify(signal, peer, 1, team)


@triton.jit
def notify_constant(signal, team, PEER: tl.constexpr):
    wl.notify(signal, PEER, 1, team)


@triton.jit
def store_to_all(x, team):
    peers = tl.arange(0, 4)
    tl.store(wl.symm_at(x, peers, team), 1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_a_constant_is_refused_when_the_kernel_is_compiled(arch):
    compiled(notify_constant, SIGNAL, a_view(), 3, arch=arch)
    with pytest.raises(triton.CompilationError) as caught:
        compiled(notify_constant, SIGNAL, a_view(), 4, arch=arch)
    cause = caught.value
    while cause.__cause__ is not None:
        cause = cause.__cause__
    assert "symm_at: peer=4 is no rank of this team of 4; pass one in 0 .. 3" in str(cause)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_debug_builds_alone_trap_for_a_scalar(arch):
    ptx = {us: compiled(notify_one, SIGNAL, 7, a_view(patience_us=us), arch=arch).asm["ptx"] for us in (0, 9)}
    assert "trap;" in ptx[9] and "trap;" not in ptx[0] and "setp" not in ptx[0].replace("setp.eq.u32 one", "")
    assert "trap;" not in compiled(store_to_all, SIGNAL, a_view(patience_us=9), arch=arch).asm["ptx"]


def test_the_record_names_rank_and_peer():
    name = int.from_bytes(b"reach".ljust(8, b"\0"), "little")
    record = torch.tensor([5, 3, 0, 41, 16, 6, 4, 0, name, *[0] * 7])
    with pytest.raises(
        NotAPeer, match=r"rank 3: kernel reach, program 0, line 41, pointer to at16: peer=6 is no rank"
    ) as caught:
        raise_from_record(record, lambda address: f"at{address}", lambda text: None)
    assert (caught.value.peer, caught.value.size) == (6, 4)


def reach(team):
    team = weft.init(node_size=2)
    signal = team.node.signals(1)
    notify_one[(1,)](signal, team.rank, team.node.view)  # the rank in the whole team, not in the node


def test_the_simulator_names_the_line_that_reaches_another_node():
    said = r"rank [23] kernel notify_one program 0 \(test_peers.py:19\): peer=[23] is no rank of this team of 2; .*team.node"
    with pytest.raises(NotAPeer, match=said):
        weft.simulate(reach, 4)
