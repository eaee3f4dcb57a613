"""Kinds of links: what PCIe refuses, in kernels as they are compiled and as virtual ranks run them."""

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from tests.compiling import a_view, compiled
from weft import ops
from weft.errors import WeftError
from weft.runtime import capabilities, doctor

SIGNAL = torch.zeros(4, dtype=torch.int32)


@triton.jit
def count_at(signal, peer, team):
    wl.notify(signal, peer, 1, team, "add")


@triton.jit
def set_at(signal, peer, team):
    wl.notify(signal, peer, 1, team)
    wl.wait(signal, 1, team)


@triton.jit
def add_at(x, peer, team):
    tl.atomic_add(wl.symm_at(x, peer, team), 1)


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=pytest.mark.sweep)])
def test_an_addition_is_refused_when_the_kernel_is_compiled(arch):
    pcie = a_view()._replace(remote_atomics=tl.constexpr(0))
    with pytest.raises(triton.CompilationError) as caught:
        compiled(count_at, SIGNAL, 2, pcie, arch=arch)
    causes = [cause := caught.value]
    while (cause := cause.__cause__) is not None:
        causes.append(cause)
    assert any("pass op='set', with a signal for each sender" in str(cause) for cause in causes)


def on_peer(team, kernel):
    signal = team.signals(1)
    kernel[(1,)](signal, 1 - team.rank, team.view)
    team.barrier()
    return signal.item(), team.caps.links


def test_virtual_ranks_have_the_links_that_they_are_given():
    assert weft.simulate(on_peer, 2, link="pcie", args=(set_at,)) == [(1, ("pcie", "pcie"))] * 2
    assert weft.simulate(on_peer, 2, args=(add_at,)) == [(1, ())] * 2
    with pytest.raises(Exception, match="notify: op='add' needs atomics on a peer's memory"):
        weft.simulate(on_peer, 2, link="pcie", args=(count_at,))
    said = r"kernel add_at program 0 .*: atomic add on .* of rank [01]: the link is PCIe, which carries no atomics"
    with pytest.raises(WeftError, match=said):
        weft.simulate(on_peer, 2, link="pcie", args=(add_at,))
    with pytest.raises(ValueError, match="link='ethernet' is not one of"):
        weft.simulate(on_peer, 2, link="ethernet", args=(set_at,))


def test_ranks_of_other_nodes_are_reached_by_rail():
    def main(team):
        x = torch.full((6,), float(team.rank))
        return team.caps.links, team.node.caps.links, ops.all_reduce(x, team)[0].item()

    for rank, (links, within, total) in enumerate(weft.simulate(main, 4, node_size=2, link="pcie")):
        assert links == (("pcie", "pcie", "rail", "rail") if rank < 2 else ("rail", "rail", "pcie", "pcie"))
        assert within == ("pcie", "pcie") and total == 6.0


def test_the_driver_is_asked_for_atomics(monkeypatch):
    class Driver:
        def cuDeviceGetP2PAttribute(self, found, attribute, index, peer):
            found._obj.value = int((index, peer) != (0, 2))
            return attribute != 3

    monkeypatch.setattr(capabilities, "_cuda_driver", Driver)
    kinds = [capabilities.link_between(0, peer) for peer in range(3)]
    assert kinds == ["nvlink", "nvlink", "pcie"]
    finding = doctor._atomics([(1, 0)])
    assert finding.value == "not between 1-0" and "op='add' is refused" in finding.explanation
    assert doctor._atomics([]).status == "ok"
