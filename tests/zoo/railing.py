"""Bugs of transfers between nodes: sources, arrivals, order, and what only reaches a node."""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from tests.zoo.exhibit import N, exhibit
from weft import Piece
from weft.runtime.platforms.virtual_put import PutLink


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


@exhibit("race", "pieces", "a kernel waits for the flag of the piece before the one it reads", read_behind_flag)
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


@exhibit("race", "tensor of the rail", "a stage writes a microbatch over one that has not left", swap)
def microbatch_written_over(team, bug):
    team, rail, x, received = alone_in_a_node(team)
    for microbatch in range(2):
        x.fill_(microbatch + 1.0)  # here
        rail.fork()
        marks = swap(rail, x, received)
        if not bug:
            rail.after(marks[0])
    rail.join()
    return received


@exhibit("deadlock", "", "the last stage sends tokens before it has received all microbatches")
def tokens_before_microbatches(team, bug):
    team, rail, x, received = alone_in_a_node(team)
    first, last = Piece(send=x, to=1), Piece(receive=received, source=0)
    tokens = Piece(receive=received, source=1) if rail.index == 0 else Piece(send=x, to=0)
    order = [first, first, tokens] if rail.index == 0 else [last, tokens, last] if bug else [last, last, tokens]
    rail.fork()
    rail.exchange(order)
    rail.join()
    return received


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


@triton.jit
def fan_out(pieces, piece, counted, count, team, N: tl.constexpr):
    at = piece * N + tl.arange(0, N)
    peer = 1 - wl.rank(team)
    tl.store(wl.symm_at(pieces, peer, team) + at, tl.load(pieces + at))  # here
    wl.notify(counted, peer, count, team, "add")


@triton.jit
def read_when_counted(pieces, counted, got, count, team, N: tl.constexpr):
    at = tl.arange(0, 2 * N)
    wl.wait(counted, count, team)
    tl.store(got + at, tl.load(pieces + at))  # here


def pieces_of_a_rail(team):
    """Two pieces for each local rank 0, which forwards them to local rank 1 of its node."""
    node = team.node
    pieces, counted = node.zeros((2, N), torch.float32, name="pieces"), node.signals(1, name="counted")
    return node, pieces, counted, team.local(2 * N, torch.float32)


def received(team, pieces):
    rail, other = team.rail, 1 - team.rail.index
    sent = [torch.full((N,), team.rank + 1.0 + k) for k in range(2)]
    rail.fork()
    return rail.exchange([Piece(send=sent[k], to=other, receive=pieces[k], source=other) for k in range(2)])


@exhibit("race", "pieces", "a piece is counted twice", fan_out, read_when_counted, world_size=4)
def piece_counted_twice(team, bug):
    team = weft.init(node_size=2)
    node, pieces, counted, got = pieces_of_a_rail(team)
    if node.rank == 0:
        marks = received(team, pieces)
        for k in range(2):
            team.rail.after(marks[k])
            fan_out[(1,)](pieces, k, counted, 2 if bug and k == 0 else 1, node.view, N)
        team.rail.join()
    else:
        read_when_counted[(1,)](pieces, counted, got, 2, node.view, N)
    team.barrier()
    return got


@triton.jit
def tell(counted, team):
    wl.notify(counted, 1 - wl.rank(team), 1, team)


@exhibit("race", "pieces", "the flag of a piece is set before it is fanned out", read_when_counted, world_size=4)
def flag_before_fan_out(team, bug):
    team = weft.init(node_size=2)
    node, pieces, counted, got = pieces_of_a_rail(team)
    if node.rank == 0:
        marks = received(team, pieces)
        for mark in marks:
            team.rail.after(mark)
        if bug:
            tell[(1,)](counted, node.view)
        node.copy_engine.fork()
        node.copy_engine.put(pieces, pieces, 1)  # here
        node.copy_engine.join()
        if not bug:
            tell[(1,)](counted, node.view)
        team.rail.join()
    else:
        read_when_counted[(1,)](pieces, counted, got, 1, node.view, N)
    team.barrier()
    return got


def puts_of_a_rail(team):
    team = weft.init(node_size=1)
    link, node = PutLink(team), team.node
    pieces, landed = node.zeros((2, N), torch.float32, name="pieces"), node.signals(1, name="landed")
    epoch, got = team.local(1, torch.int32).fill_(1), team.local(2 * N, torch.float32)
    sources = torch.full((2, N), team.rank + 1.0)
    team.barrier()
    return link, node, pieces, landed, epoch, got, sources


@exhibit("race", "pieces", "a signal is sent before the fence after the puts", read_when_counted)
def signal_before_fence(team, bug):
    link, node, pieces, landed, epoch, got, sources = puts_of_a_rail(team)
    other = 1 - team.rank
    link.put(pieces, sources, other)  # here
    if not bug:
        link.fence(other)
    link.signal(landed, epoch, other)
    link.fence(other)
    read_when_counted[(1,)](pieces, landed, got, 1, node.view, N)
    link.quiet()
    return got


@exhibit("race", "pieces", "a weak signal, of one put, is taken for a strong one, of all before", read_when_counted)
def weak_signal_taken_for_strong(team, bug):
    link, node, pieces, landed, epoch, got, sources = puts_of_a_rail(team)
    other = 1 - team.rank
    link.put(pieces[0], sources[0], other)  # here
    if bug:
        link.put(pieces[1], sources[1], other, landed, epoch)
    else:
        link.put(pieces[1], sources[1], other)
        link.signal(landed, epoch, other, strong=True)
    read_when_counted[(1,)](pieces, landed, got, 1, node.view, N)
    link.quiet()
    return got
