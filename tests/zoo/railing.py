"""Bugs of transfers between nodes: sources, arrivals, order, and what only reaches a node."""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from tests.zoo.exhibit import N, exhibit
from weft import Piece


def swap(rail, x, received, landed=None, epoch=None):
    other = 1 - rail.index
    return rail.exchange([Piece(send=x, to=other, receive=received, source=other, landed=landed)], epoch)  # here


def alone_in_a_node(team):
    team = weft.init(node_size=1)
    return team, team.rail, torch.full((N,), team.rank + 1.0), torch.zeros(N)


@exhibit("race", "tensor of the rail", "the source of a piece is written before the piece has left", swap)
def source_of_a_piece_written(team, bug):
    team, rail, x, received = alone_in_a_node(team)
    rail.fork()
    swap(rail, x, received)
    if not bug:
        rail.join()
    x.fill_(9.0)  # here
    rail.join()
    return received


@exhibit("race", "tensor of the rail", "a piece is read before it has landed", swap)
def piece_read_early(team, bug):
    team, rail, x, received = alone_in_a_node(team)
    rail.fork()
    marks = swap(rail, x, received)
    if not bug:
        rail.after(marks[0])
    got = received + 1  # here
    rail.join()
    return got


@triton.jit
def fill(x, value, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), value)  # here


@exhibit("race", "x", "a rail is forked before the kernel that makes the piece", fill, swap)
def rail_forked_early(team, bug):
    team, rail, _, received = alone_in_a_node(team)
    x = team.node.zeros(N, torch.float32, name="x")
    if bug:
        rail.fork()
    fill[(1,)](x, team.rank + 1.0, N)
    if not bug:
        rail.fork()
    swap(rail, x, received)
    rail.join()
    return received


@triton.jit
def read_behind_flag(pieces, landed, epoch, got, flag, team, N: tl.constexpr):
    at = N + tl.arange(0, N)
    wl.wait(landed + flag, tl.load(epoch), team)
    tl.store(got + tl.arange(0, N), tl.load(pieces + at))  # here


@exhibit("race", "pieces", "a kernel waits for the flag of the piece before its own", read_behind_flag)
def flag_of_another_piece(team, bug):
    team, rail, x, _ = alone_in_a_node(team)
    pieces, landed = team.node.zeros((2, N), torch.float32, name="pieces"), team.node.signals(2, name="landed")
    epoch, got, other = team.local(1, torch.int32).fill_(1), team.local(N, torch.float32), 1 - team.rank
    rail.fork()
    ends = {"send": x, "to": other, "source": other}
    rail.exchange([Piece(receive=pieces[k], landed=landed[k : k + 1], **ends) for k in range(2)], epoch)  # here
    read_behind_flag[(1,)](pieces, landed, epoch, got, 0 if bug else 1, team.node.view, N)
    rail.join()
    return got


@exhibit("race", "inbox", "a piece is forwarded within the node before it has landed", world_size=4)
def piece_forwarded_early(team, bug):
    team = weft.init(node_size=2)
    node, rail, other = team.node, team.rail, 1 - team.rail.index
    inbox = node.zeros((2, N), torch.float32, name="inbox")
    rail.fork()
    ends = {"send": torch.full((N,), team.rank + 1.0), "to": other, "source": other}
    marks = rail.exchange([Piece(receive=inbox[node.rank], **ends)])  # here
    if not bug:
        rail.after(marks[0])
    node.copy_engine.fork()
    node.copy_engine.put(inbox[node.rank], inbox[node.rank], 1 - node.rank)  # here
    rail.join()
    node.copy_engine.join()
    team.barrier()
    return inbox


@exhibit("error", "", "the pieces of two ranks are in different orders")
def pieces_out_of_order(team, bug):
    team, rail, x, _ = alone_in_a_node(team)
    sizes, other = (N, 2 * N), 1 - team.rank
    sent = [torch.full((size,), team.rank + 1.0) for size in sizes]
    got = [torch.zeros(size) for size in sizes]
    rail.fork()
    for k in range(2):
        mine = 1 - k if bug and team.rank == 0 else k
        rail.exchange([Piece(send=sent[mine], to=other, receive=got[mine], source=other)])
    rail.join()
    return got


@exhibit("deadlock", "", "a node sends nothing that another one waits for", world_size=3)
def node_left_out(team, bug):
    team = weft.init(node_size=1)
    rail, x, got = team.rail, torch.ones(N), torch.zeros((3, N))
    rail.fork()
    for step in (1, 2):
        to, source = (rail.index + step) % 3, (rail.index - step) % 3
        leaves_out = bug and rail.index == 2 and to == 0
        rail.exchange(
            [Piece(send=None if leaves_out else x, to=None if leaves_out else to, receive=got[source], source=source)]
        )
    rail.join()
    return got


@triton.jit
def store_to(x, peer, team, N: tl.constexpr):
    tl.store(wl.symm_at(x, peer, team) + tl.arange(0, N), 1.0)  # here


@exhibit("error", "", "a kernel reaches for a rank of another node", store_to, world_size=4)
def store_across_nodes(team, bug):
    team = weft.init(node_size=2)
    x = team.node.zeros(N, torch.float32, name="x")
    other = team.size - 1 - team.rank
    store_to[(1,)](x, other if bug else 1 - team.node.rank, team.node.view, N)
    team.barrier()
    return x
