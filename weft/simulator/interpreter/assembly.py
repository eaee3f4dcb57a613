"""Inline assembly, which the simulator does not run: portable replacements for messages."""

from __future__ import annotations

import re

# (pattern of the assembly, replacement); the first match counts.
ADVICE = (
    (r"multimem\.ld_reduce", "add up tl.load of wl.symm_at(ptr, peer, team) in a loop over wl.num_ranks(team)"),
    (r"multimem\.", "tl.store through wl.symm_at(ptr, peer, team) in a loop over wl.num_ranks(team)"),
    (r"\bld\.\S*acquire", "write wl.wait(signal, value, team), or tl.atomic_add(ptr, 0, sem='acquire', scope='sys')"),
    (
        r"\bst\.\S*release",
        "write wl.notify(signal, peer, value, team), or tl.atomic_xchg(ptr, value, sem='release', scope='sys')",
    ),
    (r"\b(atom|red)\.", "write tl.atomic_add or another atomic, with sem= and scope="),
    (r"fence\.proxy", "write wl.wait(signal, value, team), which contains it"),
    (r"fence|membar", "write wl.fence(team)"),
    (r"cp\.async\.bulk\.(wait|commit)", "write wl.notify(signal, peer, value, team), which contains it"),
    (r"prefetch", "write wl.prefetch(ptr, nbytes)"),
    (r"griddepcontrol", "write wl.follow_previous_kernel()"),
    (r"bar\.sync|barrier\.sync|s_barrier", "write tl.debug_barrier()"),
    (r"\bld\.\S*volatile", "write tl.load(ptr, volatile=True)"),
    (r"\bld\.", "write tl.load"),
    (r"\bst\.", "write tl.store"),
    (
        r"(ex2|lg2|sin|cos|tanh|rsqrt|rcp|sqrt)\.approx",
        "write tl.exp2, tl.log2, tl.rsqrt or a function of libdevice",
    ),
    (r"%tid", "write tl.arange(0, BLOCK) in place of a thread's number"),
    (r"%(smid|warpid|ctaid|nctaid)", "write tl.program_id, or avoid the hardware position of a program"),
    (r"%(globaltimer|clock)", "avoid clocks: simulated time means nothing"),
)


def instead_of(assembly: str) -> str:
    """Advice on portable code in place of this assembly, as a part of a sentence."""
    advice = (instead for pattern, instead in ADVICE if re.search(pattern, assembly))
    return next(advice, "write it in plain Triton")
