"""Explanations of the kinds of findings, each with the smallest example and its mend."""

from __future__ import annotations

from dataclasses import dataclass

from weft.arguments import did_you_mean
from weft.check.detector.findings import OF_TORCH, REMEDIES


@dataclass(frozen=True, slots=True)
class Explanation:
    """Sentences about a kind, the smallest example of it, and the example mended. ``;`` separates lines."""

    what: str
    wrong: str
    mended: str


EXPLANATIONS = {
    "race": Explanation(
        "Two accesses touch the same memory, at least one writes, and nothing orders them: either may come first.",
        "rank 0: tl.store(peer_data + at, x); rank 1: y = tl.load(data + at)",
        "rank 0: tl.store(peer_data + at, x); rank 0: wl.notify(landed, 1, 1, team); rank 1: wl.wait(landed, 1, team); "
        "rank 1: y = tl.load(data + at)",
    ),
    "missing-barrier": Explanation(
        "A release by one thread covers what that thread did, and what all threads did before the last CTA barrier.",
        "tl.store(peer_data + at, x); tl.atomic_xchg(flag, 1, sem='release', scope='sys')",
        "tl.store(peer_data + at, x); tl.debug_barrier(); tl.atomic_xchg(flag, 1, sem='release', scope='sys')",
    ),
    "cta-race": Explanation(
        "A program loads in other threads than have stored: threads of one program run at different speeds.",
        "tl.store(p, 1); y = tl.load(p + tl.zeros((64,), tl.int32))",
        "tl.store(p, 1); tl.debug_barrier(); y = tl.load(p + tl.zeros((64,), tl.int32))",
    ),
    "undrained-tma": Explanation(
        "Stores through a tensor descriptor are asynchronous: a release does not cover them until they are drained.",
        "desc.store([0, 0], x); tl.debug_barrier(); tl.atomic_xchg(flag, 1, sem='release', scope='sys')",
        "desc.store([0, 0], x); wl.notify(landed, 1, 1, team)",
    ),
    "unquieted": Explanation(
        "put_nbi and get_nbi are complete after quiet(): until then the copy may still read its source and write its target.",
        "wl.put_nbi(dst, src, N, peer, team); tl.store(src + at, y)",
        "wl.put_nbi(dst, src, N, peer, team); wl.quiet(team); tl.store(src + at, y)",
    ),
    "proxy-fence": Explanation(
        "Loads through a tensor descriptor go through the asynchronous proxy, which an acquire alone does not order.",
        "while tl.atomic_add(flag, 0, sem='acquire', scope='sys') == 0: pass; x = desc.load([0, 0])",
        "wl.wait(flag, 1, team); x = desc.load([0, 0])",
    ),
    "scope": Explanation(
        "Scope gpu orders programs of one GPU, scope cta threads of one program. Both sides must include each other.",
        "tl.atomic_xchg(peer_flag, 1, sem='release')  # the default scope is the GPU",
        "tl.atomic_xchg(peer_flag, 1, sem='release', scope='sys')",
    ),
    "relaxed-order": Explanation(
        "A relaxed or volatile access carries no order: data may be seen later than the signal that announces them.",
        "while tl.load(flag, volatile=True) == 0: pass; x = tl.load(data + at)",
        "while tl.atomic_add(flag, 0, sem='acquire', scope='sys') == 0: pass; x = tl.load(data + at)",
    ),
    "early-access": Explanation(
        "A kernel launched with launch_pdl=True may start before the kernel before it has ended.",
        "x = tl.load(result_of_the_kernel_before + at)",
        "wl.follow_previous_kernel(); x = tl.load(result_of_the_kernel_before + at)",
    ),
    "unfollowed": Explanation(
        "A program of a kernel with launch_pdl=True ends without having waited for the kernel before it, so that the next "
        "kernel may start before that one has ended.",
        "if tl.program_id(0) == 0: wl.follow_previous_kernel()",
        "wl.follow_previous_kernel()",
    ),
    "uninitialised": Explanation(
        "Memory is read that nothing has written since it was allocated.",
        "x = team.empty((64,), torch.float32); y = x + 1",
        "x = team.zeros((64,), torch.float32); y = x + 1",
    ),
    "use-after-free": Explanation(
        "A tensor is used after free(): its bytes may belong to another one.",
        "team.free(x); kernel[(1,)](x)",
        "kernel[(1,)](x); team.free(x)",
    ),
    "out-of-bounds": Explanation(
        "An access leaves its tensor, even if the address belongs to another one.",
        "x = tl.load(p + tl.arange(0, 64))  # of 48 elements",
        "at = tl.arange(0, 64); x = tl.load(p + at, at < 48)",
    ),
    "misaligned": Explanation(
        "An address, an offset or a hint is no multiple of the size that the access needs, which faults on a GPU.",
        "x = tl.load(tl.multiple_of(p + 1, 16))",
        "x = tl.load(tl.multiple_of(p, 16))",
    ),
    "untranslated": Explanation(
        "A kernel of weft reaches a peer's memory by an address that no team has given it.",
        "tl.store((p + 4096).to(tl.pointer_type(tl.float32)), x)",
        "tl.store(wl.symm_at(p, peer, team), x)",
    ),
    "signal-reset": Explanation(
        "A signal goes back while a program may still wait for it: the waiter misses the value, or takes the next call's.",
        "wl.wait(flag, 1, team); tl.store(flag, 0)",
        "now = wl.next_epoch(epoch); wl.wait(flag, now, team); wl.advance_epoch(epoch, now)",
    ),
    "epoch-back": Explanation(
        "A notify sets a signal to a lower value than it had, and waits rely on its growth.",
        "wl.notify(flag, peer, 2, team); wl.notify(flag, peer, 1, team)",
        "wl.notify(flag, peer, 1, team); wl.notify(flag, peer, 2, team)",
    ),
    "unadvanced": Explanation(
        "A program does not end its epoch, so that the next launch waits for signals that came already.",
        "now = wl.next_epoch(epoch); wl.wait(flag, now, team)",
        "now = wl.next_epoch(epoch); wl.wait(flag, now, team); wl.advance_epoch(epoch, now)",
    ),
    "uncleared": Explanation(
        "Lamport words are sent into a stage that still holds older ones: the reader takes the old words for new ones.",
        "wl.lamport_store(stage + at, x, at < N)  # twice, without a clear",
        "y = wl.lamport_load(stage + at, at < N, team); wl.lamport_clear(stage + at, at < N)",
    ),
    "overtaken": Explanation(
        "A clear may land after the answer to words sent later, and erase it: a later store may overtake an earlier one.",
        "wl.lamport_clear(old + at, at < N); wl.lamport_store(there + at, x, at < N)",
        "wl.lamport_clear(old + at, at < N); wl.fence(team); wl.lamport_store(there + at, x, at < N)",
    ),
    "tile-store": Explanation(
        "A tile body stores outside the rows and columns of its tile.",
        "tl.store(out + tile.row * N + at, x)",
        "tl.store(out + tile.row * N + at, x, at < tile.rows * N)",
    ),
    "tile-read": Explanation(
        "A tile body loads rows for which its tile does not wait.",
        "x = tl.load(shard_of_any_rank + at)",
        "x = tl.load(shard + at)  # rows of tile.owner",
    ),
    "tile-owner": Explanation(
        "Ranks disagree about whose rows a tile has, so that one waits for a part that no rank sends.",
        "owner = tile % (rank + 1)",
        "owner = row // rows_of_a_rank",
    ),
    "tile-map": Explanation(
        "A map of tiles leaves rows out, or gives them to two tiles.",
        "rows = 32 if tile > 0 else 16",
        "rows = 32",
    ),
    "equality-wait": Explanation(
        "A wait for one value may look only after the signal has gone past it, and then never ends.",
        "while tl.atomic_add(flag, 0, sem='acquire', scope='sys') != 1: pass",
        "wl.wait(flag, 1, team)  # >= 1",
    ),
    "overshoot": Explanation(
        "A count ends above what is waited for: the next call's wait ends too early.",
        "wl.notify(flag, peer, 1, team, 'add'); wl.notify(flag, peer, 1, team, 'add')  # a wait for 1",
        "wl.notify(flag, peer, 1, team, 'add')",
    ),
    "residency": Explanation(
        "Programs wait for programs of the same launch that can start only after they have ended.",
        "kernel[(10_000,)](...)  # with a grid barrier",
        "kernel[(team.max_programs(4),)](..., launch_cooperative_grid=True)",
    ),
    "deadlock": Explanation(
        "No task can go on. A wait may lack its signal, or two wait for each other; a peer's failure looks like this too.",
        "if rank == 0: wl.notify(flag, 1, 1, team); wl.wait(flag, 1, team)  # rank 0 waits for ever",
        "wl.notify(flag, 1 - rank, 1, team); wl.wait(flag, 1, team)",
    ),
    "launch-mismatch": Explanation(
        "Ranks launch different kernels that wait for each other.",
        "(kernel_a if rank else kernel_b)[(1,)](...)",
        "kernel_a[(1,)](...); kernel_b[(1,)](...)",
    ),
    "compile-error": Explanation(
        "The simulator runs a kernel's Python, of which Triton compiles only a part.",
        "scale = {16: 2.0}[N]",
        "scale = 2.0 if N == 16 else 1.0",
    ),
    "call-mismatch": Explanation(
        "Ranks make different collective calls, or the same one with different arguments.",
        "if rank == 0: ops.all_reduce(x, team)",
        "ops.all_reduce(x, team)",
    ),
    "divergence": Explanation(
        "Results differ between schedules: something is combined in the order of arrival.",
        "tl.atomic_add(total, x)  # floats",
        "for source in range(world): total += tl.load(parts + source)",
    ),
    "error": Explanation(
        "The program raises an error. Where another finding explains it, it is listed under that.",
        "assert out == expected",
        "out = expected",
    ),
}


def explain(kind: str) -> str:
    """Text of a kind. ValueError for one that does not exist."""
    known = EXPLANATIONS.get(kind)
    if known is None:
        ways_out = did_you_mean(kind, tuple(EXPLANATIONS)) or f"; kinds: {', '.join(EXPLANATIONS)}"
        raise ValueError(f"--explain {kind} is no kind of finding{ways_out}")
    parts = [f"{kind}: {known.what}", "", "wrong:", *_lines(known.wrong), "mended:", *_lines(known.mended), ""]
    parts.append(f"remedy: {REMEDIES[kind]}")
    if kind in OF_TORCH:
        parts.append(f"with torch alone: {OF_TORCH[kind]}")
    return "\n".join(parts)


def _lines(code: str) -> list[str]:
    return [f"    {line}" for line in code.split("; ")]
