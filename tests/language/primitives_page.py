"""Generator of docs/primitives.md: ``python -m tests.language.primitives_page`` writes it.

Signatures and promises are those of the code, examples those of tests/language/examples.py. ``LOWERINGS``, ``SHMEM`` and
``CONSTANTS`` are written by hand.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton

import weft.language as wl
from tests.language import examples

PAGE = Path(__file__).parent.parent.parent / "docs" / "primitives.md"
# Modules in the order of the page; others follow.
ORDER = (
    "coordinates", "signals", "waits", "grid", "epochs", "channels", "bulk", "ordering", "lamport", "hints", "spans",
    "multimem",
)  # fmt: skip


# Of parameters or fields, in front of a line that describes them.
NAMES = r"\w+(?:, \w+)*"


class Lowering(NamedTuple):
    nvidia: str
    amd: str
    simulator: str = "interpreted as written"


NOTHING = "nothing"
RELEASE = Lowering(
    "`cp.async.bulk.wait_group 0` (from sm_90 on), `bar.sync`, `st.release.sys` by one thread; "
    '"add": `atom.add.release.sys`',
    "`s_waitcnt vmcnt(0)`, `buffer_wbl2 sc0 sc1`, `s_waitcnt vmcnt(0)`, `s_barrier`, a release atomic of system scope",
    "a release: the signal carries what the program knows. A program's late stores come first",
)
ACQUIRE = Lowering(
    "`ld.acquire.sys` until the value is there, `bar.sync`, `fence.proxy.async` (from sm_90 on)",
    "an acquire atomic of system scope until the value is there, `s_barrier`",
    "an intrinsic: the program blocks until the value is there, and acquires what the signal carries",
)
SEVERAL = Lowering(
    "`atom.acquire.sys.add` of 0, a signal a thread, until the values are there; `bar.sync`, then as `wait`",
    "acquire atomics of system scope until the values are there, `s_barrier`",
    "an intrinsic: the program blocks until the values are there, and acquires what the signals carry",
)
COPY = Lowering(
    "`bar.sync`, `ld.global` and `st.global` of 16 bytes a thread, `bar.sync`", "the same with AMD's instructions"
)
LATER = COPY._replace(simulator="an intrinsic: the copy happens at any time until `quiet` or the kernel's end")
FLAGGED = Lowering(
    "`st.global` of up to 16 bytes a thread",
    "`buffer_store` with `sc0 sc1`: past every cache",
    "a store that is its own signal, element by element",
)
POLL = Lowering(
    "`ld.volatile.global` until no -0.0 is left; with several warps on one element a `bar.sync` and a second load",
    "the same with `buffer_load` with `sc0 sc1` and `s_barrier`",
    "an intrinsic: the program blocks until all elements have arrived",
)
RECEIVE = POLL._replace(nvidia=f"`lamport_clear`; if `ordered`, `ld.volatile.global` until it shows; {POLL.nvidia}")
MULTIMEM = "loads and stores of every rank, in rank order"

LOWERINGS = {
    "rank": Lowering("arithmetic on a kernel argument", "the same"),
    "num_ranks": Lowering("a compile-time constant", "the same"),
    "symm_at": Lowering(
        "one load from the team's table, one add", "the same", "the same; a pointer outside the heap is an error"
    ),
    "notify": RELEASE,
    "wait": ACQUIRE,
    "wait_all": SEVERAL,
    "wait_any": SEVERAL,
    "grid_barrier": Lowering(
        "`cp.async.bulk.wait_group 0` (from sm_90 on), `bar.sync`, `atom.add.release.gpu`, `wait`",
        "`gather_stores`, a release atomic of agent scope, `wait`",
    ),
    "consume_token": Lowering(NOTHING, NOTHING),
    "barrier": Lowering("`notify` to every peer, then `wait` for every peer", "the same"),
    "next_epoch": Lowering("a load, an add", "the same"),
    "advance_epoch": Lowering("`bar.sync`, `atom.add.acq_rel.gpu`; the last program stores", "the same"),
    "next_call": Lowering("`next_epoch`", "the same"),
    "current_call": Lowering("a load", "the same"),
    "advance_call": Lowering("`advance_epoch`", "the same"),
    "chunk_notify": Lowering("`notify`", "`notify`", "`notify`; a chunk or rank that the channel lacks is an error"),
    "chunk_wait": Lowering("`wait`", "`wait`", "`wait`; a chunk or rank that the channel lacks is an error"),
    "put": COPY,
    "get": COPY,
    "put_signal": Lowering("`put`, `notify`", "the same"),
    "put_nbi": LATER,
    "get_nbi": LATER,
    "put_signal_nbi": LATER._replace(simulator="an intrinsic: the copy happens at any time until the signal arrives"),
    "gather_stores": Lowering(
        "`bar.sync`", "`s_waitcnt vmcnt(0)`, `buffer_wbl2 sc0 sc1`, `s_waitcnt vmcnt(0)`, `s_barrier`"
    ),
    "fence": Lowering(
        "`cp.async.bulk.wait_group 0` (from sm_90 on), `bar.sync`, `fence.acq_rel.sys`, `bar.sync`",
        "`gather_stores`, an acq_rel atomic of system scope on a word of this rank, `s_barrier`",
        "later stores come after earlier ones",
    ),
    "quiet": Lowering("`fence`", "`fence`", "performs the copies of `_nbi` primitives, then `fence`"),
    "wait_for_previous_kernel": Lowering(
        "`griddepcontrol.wait` (from sm_90 on)", NOTHING, "until then the check knows nothing of the kernel before"
    ),
    "let_next_kernel_start": Lowering(
        "`griddepcontrol.launch_dependents` (from sm_90 on)", NOTHING, "what the next kernel knows when it starts"
    ),
    "follow_previous_kernel": Lowering("the two above", NOTHING),
    "lamport_store": FLAGGED,
    "lamport_clear": FLAGGED._replace(simulator="marks the elements as unwritten"),
    "lamport_load": POLL,
    "lamport_load_keyed": POLL,
    "lamport_receive": RECEIVE,
    "lamport_receive_keyed": RECEIVE,
    "prefetch": Lowering("`cp.async.bulk.prefetch.L2` (from sm_90 on)", NOTHING, NOTHING),
    "zero_here": Lowering("a volatile `mov`", "a 0", "a 0"),
    "begin_tile": Lowering(f"{NOTHING}; traced, a load of `%globaltimer_lo`", NOTHING, "the program's virtual time"),
    "end_tile": Lowering(
        f"{NOTHING}; traced, by one thread, `atom.add` and two `st.global.v2.u64` in this rank's memory",
        NOTHING,
        "a slice of virtual time",
    ),
    "begin_put": Lowering("`begin_tile`", NOTHING, "the program's virtual time"),
    "end_put": Lowering("`end_tile`", NOTHING, "a slice of virtual time"),
    "multimem_store": Lowering("`multimem.st.relaxed.sys.v4.f32`; never run", "none: a compile-time error", MULTIMEM),
    "multimem_load_reduce": Lowering(
        "`multimem.ld_reduce.relaxed.sys.add` of `v4.f32`, or of `v4.bf16x2` or `v4.f16x2` with `acc::f32`; never run",
        "none: a compile-time error",
        MULTIMEM,
    ),
}

# Functions of weft.language.shmem, and what each is in weft's primitives, whose lowerings it has.
SHMEM = {
    "my_pe": "`rank`",
    "n_pes": "`num_ranks`",
    "remote_ptr": "`symm_at`",
    "putmem_block": "`put` of bytes",
    "putmem_nbi_block": "`put_nbi` of bytes",
    "getmem_block": "`get` of bytes",
    "getmem_nbi_block": "`get_nbi` of bytes",
    "signal_op": "`notify`",
    "putmem_signal_block": "`put_signal` of bytes",
    "putmem_signal_nbi_block": "`put_signal_nbi` of bytes",
    "signal_wait_until": "`wait`, with other comparisons too",
    "signal_fetch": "one look of `wait`",
    "wait_until_all": "`wait_all`, with other comparisons too",
    "wait_until_any": "`wait_any`, with other comparisons too",
    "int_p": "`tl.store` through `symm_at`",
    "int_g": "`tl.load` with `volatile=True` through `symm_at`",
    "fence": "`fence`",
    "quiet": "`quiet`",
    "barrier_all_block": "`quiet`, then `barrier`",
    "sync_all_block": "`barrier`",
}
REFUSED = "refused at compile time: signals grow, so it holds before any notify"
CONSTANTS = {
    "CMP_EQ": "`signal == value`; misses the value if the next notify comes first: see `signal_wait_until`",
    "CMP_NE": "`signal != value`, also of an earlier or a later call",
    "CMP_GT": "`signal > value`, of the signed difference",
    "CMP_LE": REFUSED,
    "CMP_LT": REFUSED,
    "CMP_GE": "`signal >= value`, of the signed difference: the comparison of `wait`",
    "SIGNAL_SET": '`notify(..., "set")`',
    "SIGNAL_ADD": '`notify(..., "add")`',
}

HEAD = """# Primitives

What kernels import from `weft.language`, usually as `wl`: signature, promise, lowering and an example of each. Written by
`python -m tests.language.primitives_page`: signatures and promises are the docstrings', the examples run in the tests.

Memory order belongs to the primitive: `notify` releases, `wait` acquires, and no flag weakens one. A primitive is a
`@triton.jit` function of the whole program, which all its threads must reach. Misuses that types show are refused at
compile time, by the same functions in the simulator (`weft/language/arguments.py`).

Lowerings: NVIDIA is PTX as stock Triton compiles it, with the few instructions that Triton lacks in
`weft/language/lowering/ptx.py`. AMD is compiled for gfx942 and gfx950 in the tests, which look for
LLVM's memory model in its instructions (`tests/language/test_amd.py`); it has never run on a GPU, and `weft.init` refuses one
unless it is given `untested=True`.
"""


TILES = """
## Tile primitives

`weft.tiles` runs tile bodies ([tutorial](tutorials/6_tile_body.md)). Kernels of another structure use the pair beneath it,
`chunk_notify` and `chunk_wait` on a channel. TileLink (arXiv 2503.20313) proposes nine tile primitives; here they are:
"""
# Primitives that TileLink proposes, and what stands for them.
PUBLISHED = {
    "producer_tile_notify(tile, mode)": "`chunk_notify(call, peer, chunk, team)` after the tile's stores. No mode: a call for "
    "each peer that is to know",
    "consumer_tile_wait(tile)": "`chunk_wait(call, source, chunk, team)`. A body of `weft.tiles.gather` starts behind it",
    "peer_tile_notify(tile, rank)": "`chunk_notify` with `peer=rank`; `scatter` and `exchange` send it behind each part",
    "peer_tile_wait(tile, rank)": "`chunk_wait` with `source=rank`",
    "rank_notify(segment, rank)": "`channel.send` on the host, whose signal follows its copy; `notify` in a kernel",
    "rank_wait(segment, rank)": "`chunk_wait` in a kernel. None on the host: a stream waits by a kernel of one warp, which a "
    "graph replays (`await_chunk` of `weft.transport.copy_channel`)",
    "tile_push_data(tensors, tile, data)": "`tl.store` through `symm_at`, or `put`; `scatter` and `exchange` push what a body "
    "returns",
    "tile_pull_data(tensors, tile)": "`tl.load` through `symm_at`, or `get`. Not in `weft.tiles`: a load over NVLink costs a "
    "round trip that a store does not",
    "rank_copy_data(source, target)": '`channel.send`: a copy engine, then the chunk\'s signal; `GatherPlan(transport="copy")`',
}
MAPS = """
The block channel is `team.channel(chunks)` with the team's view. It counts calls, so that no signal is ever reset. The maps
from a tile to shape and rank are a `weft.tiles.TileMap`: affine by default, else two functions or an int32 table. The map
from a tile to a barrier is not the user's: a tile waits for the chunks that its rows are in.
"""


def primitives() -> dict[str, Any]:
    """Name -> primitive, of all that ``weft.language`` exports."""
    return {name: getattr(wl, name) for name in wl.__all__ if not inspect.ismodule(getattr(wl, name))}


def own(primitive: Any) -> Any:
    """The Python function of a primitive."""
    return getattr(primitive, "fn", primitive)


def module_of(primitive: Any) -> str:
    return own(primitive).__module__.rpartition(".")[2]


def groups() -> list[tuple[str, list[str]]]:
    """(module, names of its primitives in the order of its source), in the order of the page."""
    found: dict[str, list[str]] = {}
    for name, primitive in primitives().items():
        found.setdefault(module_of(primitive), []).append(name)
    for names in found.values():
        names.sort(key=lambda name: inspect.getsourcelines(own(getattr(wl, name)))[1])
    return sorted(found.items(), key=lambda group: (*ORDER, group[0]).index(group[0]))


def kernels(module: str) -> list[str]:
    """Sources of the kernels of a module's example, without the decorator."""
    return [
        inspect.getsource(member.fn).strip()
        for name, member in vars(examples).items()
        if isinstance(member, triton.JITFunction) and re.fullmatch(f"{module}(_\\w+)?", name)
    ]


def lacking() -> list[str]:
    """What is missing for the page, a line each."""
    found = primitives()
    lines = [f"{name}: no entry in LOWERINGS of tests/language/primitives_page.py" for name in found.keys() - LOWERINGS]
    lines += [f"{name}: in LOWERINGS, but weft.language does not export it" for name in LOWERINGS.keys() - found]
    for name in found:
        module = module_of(found[name])
        if not any(f"wl.{name}(" in kernel for kernel in kernels(module)):
            lines.append(f"{name}: in no kernel {module}... of tests/language/examples.py")
    for written, there, what in ((SHMEM, shmem(), "SHMEM"), (CONSTANTS, constants(), "CONSTANTS")):
        lines += [f"{name}: no entry in {what} of tests/language/primitives_page.py" for name in there.keys() - written]
        lines += [f"{name}: in {what}, but weft.language.shmem has none" for name in written.keys() - there]
    return sorted(lines)


def signature(primitive: Any) -> str:
    """A primitive's parameters with their defaults, as in source: constants by value, no annotations."""
    shown = []
    for name, parameter in inspect.signature(own(primitive)).parameters.items():
        default = parameter.default
        if default is inspect.Parameter.empty:
            shown.append(name)
        elif default is not None or name != "_semantic":
            value = getattr(default, "value", default)
            shown.append(f'{name}="{value}"' if isinstance(value, str) else f"{name}={value!r}")
    return f"{own(primitive).__name__}({', '.join(shown)})"


def promise(described: Any) -> str:
    """A docstring as Markdown; its indented lines are code."""
    text = inspect.getdoc(own(described)).replace("``", "`")
    paragraphs = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        # A table of arguments, such as "ptr     a block of pointers", as a list.
        if re.match(rf"{NAMES} {{2,}}\S", lines[0]):
            paragraph = re.sub(rf"^({NAMES}) {{2,}}", r"- `\1`: ", paragraph, flags=re.MULTILINE)
            paragraph = re.sub(r"\n {3,}", "\n  ", paragraph)
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def page() -> Iterator[str]:
    """Yield the page's paragraphs."""
    yield HEAD.strip()
    for module, names in groups():
        yield f"## {module.capitalize()}"
        yield promise(importlib.import_module(f"weft.language.{module}"))
        if example := kernels(module):
            yield "```python\n" + "\n\n\n".join(example) + "\n```"
        for name in names:
            yield f"### {name}"
            yield f"```python\n{signature(getattr(wl, name))}\n```"
            yield promise(getattr(wl, name))
            nvidia, amd, simulator = LOWERINGS[name]
            yield f"- NVIDIA: {nvidia}\n- AMD: {amd}\n- simulator: {simulator}"
    yield TILES.strip()
    rows = (f"| `{name}` | {here} |" for name, here in PUBLISHED.items())
    yield "\n".join(["| published | here |", "|---|---|", *rows])
    yield MAPS.strip()
    yield from shmem_page()


def shmem_page() -> Iterator[str]:
    """Yield the paragraphs about ``weft.language.shmem``."""
    yield "## OpenSHMEM names"
    yield promise(wl.shmem)
    yield "```python\n" + "\n\n\n".join(kernels("shmem")) + "\n```"
    for name, member in shmem().items():
        yield f"### shmem.{name}"
        yield f"```python\n{signature(member)}\n```"
        yield promise(member)
        yield f"- in weft's primitives: {SHMEM[name]}"
    yield "### Constants of shmem"
    yield "Each has a second name with NVSHMEM's prefix, such as `NVSHMEM_CMP_GE`."
    rows = (f"| `{name}` | {number} | {CONSTANTS[name]} |" for name, number in constants().items())
    yield "\n".join(["| constant | number | meaning |", "|---|---|---|", *rows])


def shmem() -> dict[str, Any]:
    """Name -> function of ``weft.language.shmem``."""
    return {
        name: member
        for name, member in vars(wl.shmem).items()
        if callable(member) and not name.startswith("_") and member.__module__ == wl.shmem.__name__
    }


def constants() -> dict[str, int]:
    """Name -> number of the constants of ``weft.language.shmem``, without those that have NVSHMEM's prefix."""
    return {name: member.value for name, member in vars(wl.shmem).items() if re.match("CMP_|SIGNAL_", name)}


def whole(lines: list[str], paragraphs: Iterator[str]) -> str:
    """A page of these paragraphs. SystemExit with ``lines``, what is missing for it."""
    if lines:
        raise SystemExit("\n".join(lines))
    return "\n\n".join(paragraphs) + "\n"


def write() -> str:
    return whole(lacking(), page())


if __name__ == "__main__":
    PAGE.write_text(write())
