"""Constants of weft's kernels, fitted to committed rows by ``python -m benchmarks.costs``.

Factors have no unit, times are µs. They belong to kernels, not to a GPU: what a GPU changes stands in ``Gpu``.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

FILE = Path(__file__).parent / "fitted.json"

# Variants of ops whose rows and weights are in fp8.
FP8_VARIANTS = ("block_fp8", "channel_fp8")
# Share of the last wave that cuBLAS's GEMM with scales of blocks loses; it loses nothing at its begin. By prompts of 512 to
# 1,536 tokens on two H200s (benchmarks/results/h200-x2-fp8-prompts): in the ops' rows, of 4,096 tokens, waves are nearly full.
BLOCK_WAVES = 0.45


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemms:
    """GEMMs.

    pace     time of a tile's multiplications over the one at the rate of a large GEMM; tile: time of a tile besides
    waves    share of the SMs' time that is lost in the last wave; rest: the same of pieces of a pipelined GEMM
    begin    time of a GEMM besides
    power    slowdown of long GEMMs, half of it at power_us
    few      time of a small-M GEMM besides its loads; rows: share of its arithmetic that the loads do not hide
    call     time of a pipelined GEMM besides; scatter: of one whose sums go to their ranks, besides that
    beside   share of the copies' time that a pipelined GEMM takes longer: they share the memory and the power
    between  time of a GEMM and a collective after each other besides both; after: factor of that collective
    add      rate at which received rows are added up, over the memory's
    triton   factor of a tile of a fused GEMM; fused: time of a call besides
    slow     time in which few rows' GEMM reads its weight besides the memory's, over that
    sums     as ``beside``, of the bytes of sums alone, besides it
    """

    pace: float = 0.95
    tile: float = 0.28
    waves: float = 0.15
    rest: float = 0.15
    begin: float = 2.9
    power: float = 0.11
    power_us: float = 160.0
    few: float = 3.3
    rows: float = 0.3
    call: float = 6.0
    scatter: float = 12.0
    beside: float = 0.15
    between: float = 2.0
    after: float = 1.2
    add: float = 1.3
    triton: float = 1.05
    fused: float = 6.0
    slow: float = 0.0
    sums: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushes:
    """Kernels that store to peers and wait for words.

    ramp, ramp_bytes  of a call of many bytes besides: up to ``ramp`` µs, half of it at ``ramp_bytes``
    peer              of each further peer
    second            hop of a two-shot all-reduce besides the first
    owner             factor of the wire in a two-shot all-reduce
    engine            of a copy-engine collective besides its copies
    reduce, joined    of one that adds up, for each further peer; less for both halves of an all-reduce, of two ranks
    """

    ramp: float = 1.0
    ramp_bytes: float = 2e5
    peer: float = 0.1
    second: float = 1.0
    owner: float = 1.0
    engine: float = 14.0
    reduce: float = 4.0
    joined: float = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """All-reduces with a norm, besides the all-reduce.

    call, peer, rows  time of a call; of each further peer; factor of the memory's time of the rows
    several, later    where programs take several tiles: time of a call; factor of the memory's time of the rows that are added
    longer            share of ``later`` that remains with parts of 1,024 bytes, by two shapes of
                      benchmarks/lab/h200-regret-unseen/w2.json
    """

    call: float = 1.1
    peer: float = 0.4
    rows: float = 1.0
    several: float = 1.2
    later: float = 3.557
    longer: float = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """Kernels of moe_dispatch and moe_combine.

    words, first, gathered  of "lamport": factor of the wire; time of a combine besides, of a dispatch
    choices, stored  of "lamport": share of a combine's loads, of a dispatch's loads and stores, that the wire does not hide
    crossing, crossing_step  of "lamport" sums whose tiles go across tokens: µs of 1,000,000 elements and choices on 132 SMs;
                     of a choice
    sums, sums_base  of moe_sum: factor of the memory's time; time of a call
    base, step, load, rate, both  of combine's "push": time of a call; of a block of columns; of a choice in it; share of the
                     memory's rate; share of the shorter of loads and wire that the longer does not hide
    send, send_step, send_wire, send_fp8  of dispatch's "push": time of a call; of a block of columns; factor of the wire; a
                     further one in fp8; send_both: share of the shorter of blocks and wire that the longer does not hide
    pieces, piece_step, piece_sums  of "pipelined": time of a call; of the root of its tokens; share of the sums that copies
                     do not hide
    rounding         of fp8 rows: factor of the memory's time of the rows that are read
    """

    words: float = 1.0
    first: float = 0.4
    gathered: float = 0.2
    choices: float = 0.25
    stored: float = 0.25
    crossing: float = 0.8
    crossing_step: float = 0.4
    sums: float = 1.0
    sums_base: float = 1.0
    base: float = 8.0
    step: float = 0.5
    load: float = 0.35
    rate: float = 0.5
    both: float = 0.3
    send: float = 6.0
    send_step: float = 0.2
    send_wire: float = 1.0
    send_fp8: float = 1.1
    send_both: float = 0.3
    pieces: float = 16.0
    piece_step: float = 1.6
    piece_sums: float = 0.5
    rounding: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Grouped GEMMs.

    expert   factor of a tile whose rows are gathered; weights: share of the memory's rate at which experts' weights are read
    call     of a grouped GEMM besides
    ag, rs   of a sequential AG-MoE, of an MoE-RS besides its parts
    fused    of a fused AG-MoE besides its GEMM; late: share of its rows' time on the wire for which tiles wait
    slabs    share of the sums and their copies that the GEMM does not hide
    """

    expert: float = 1.3
    weights: float = 0.93
    call: float = 5.5
    ag: float = 5.0
    fused: float = 26.0
    late: float = 1.0
    rs: float = 2.0
    slabs: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention.

    cache    rate at which decode attention reads keys and values, over the memory's; call: time of a call besides
    merge    time of the exchange of parts between ranks besides a hop
    prefill  rate of a prompt's attention, over that of a large GEMM
    """

    cache: float = 1.08
    call: float = 11.8
    merge: float = 1.2
    prefill: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """GEMMs of fp8 operands: constants that replace the ones in ``Gemms``.

    block, channel     pace of a tile with scales of blocks, and of rows
    few, rows, slow, sums  as of ``Gemms``
    """

    block: float = 1.235
    channel: float = 1.134
    few: float = 4.745
    rows: float = 0.2605
    slow: float = 0.03508
    sums: float = 0.6748


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Experts:
    """Grouped GEMMs of fp8 operands.

    step     time of a step of 128 columns in a tile of few pairs
    tile     time of a tile of many pairs besides its multiplications
    expert   factor of the multiplications, at twice the rate of 16 bits
    """

    step: float = 0.4
    tile: float = 0.9
    expert: float = 1.9


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBit:
    """GEMMs of a weight in 4 bits and rows of 16.

    convert  numbers that an SM makes of a weight in a µs, in a GEMM of few rows; experts: in a grouped GEMM
    widen    share of the memory's rate at which a kernel writes a weight in 16 bits
    """

    convert: float = 9e3
    experts: float = 13.2e3
    widen: float = 0.65


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """All groups."""

    gemms: Gemms = dataclasses.field(default_factory=Gemms)
    pushes: Pushes = dataclasses.field(default_factory=Pushes)
    norms: Norms = dataclasses.field(default_factory=Norms)
    exchanges: Exchanges = dataclasses.field(default_factory=Exchanges)
    grouped: Grouped = dataclasses.field(default_factory=Grouped)
    attention: Attention = dataclasses.field(default_factory=Attention)
    fp8: Fp8 = dataclasses.field(default_factory=Fp8)
    fp8_experts: Fp8Experts = dataclasses.field(default_factory=Fp8Experts)
    mxfp4: FourBit = dataclasses.field(default_factory=FourBit)
    int4: FourBit = dataclasses.field(default_factory=FourBit)

    def four_bit(self, variant: str) -> FourBit | None:
        """Constants of a format of 4 bits, as variants of ops name it; None: of another variant."""
        return {"four_bit": self.mxfp4, "int4": self.int4}.get(variant)

    def of_variant(self, variant: str) -> Fitted:
        """Constants of GEMMs with fp8 operands in place of those of 16 bits, if an op's variant has such."""
        of = self.fp8
        if variant not in FP8_VARIANTS:
            return self
        pace = of.block if variant == "block_fp8" else of.channel
        # No power: it did not slow down the long GEMMs of the measurements.
        gemms = replace(self.gemms, pace=pace, few=of.few, rows=of.rows, slow=of.slow, sums=of.sums, power=0.0)
        if variant == "block_fp8":
            gemms = replace(gemms, waves=BLOCK_WAVES, begin=0.0)
        return replace(self, gemms=gemms)


@lru_cache
def read(file: Path = FILE) -> Fitted:
    """Fitted constants that weft ships."""
    document = json.loads(file.read_text())
    groups = {field.name: field.default_factory for field in dataclasses.fields(Fitted)}
    return Fitted(**{name: kind(**document[name]) for name, kind in groups.items()})


@lru_cache
def shipped(variant: str = "") -> Fitted:
    """``read`` for an op's variant."""
    return read().of_variant(variant)


def to_json(fitted: Fitted) -> str:
    """Text of ``FILE``, rounded to what a fit can tell."""
    known = dataclasses.asdict(fitted)
    rounded = {group: {name: float(f"{value:.4g}") for name, value in of.items()} for group, of in known.items()}
    return json.dumps(rounded, indent=1) + "\n"
