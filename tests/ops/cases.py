"""The case table: what is called, on how many ranks, with what, and the plain PyTorch reference of each op.

It drives the simulator's tests (tests/ops/test_*.py), the GPU suite (tests/gpu/suite.py) and benchmarks. An op joins
by an ``Operation`` in OPERATIONS and cases in a list of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.ops.closeness import assert_close, assert_identical
from tests.ops.designs import collective_design
from weft import ops
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.op import find_op

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """shape   of the tensor at each rank; for matrix products (M, N, K), the whole product's
    data       "random", "special" (with -0.0, NaN, infinities and the type's largest) or "subnormal"
    layout     "contiguous", "transposed" (not contiguous) or "offset" (contiguous, not 16-byte aligned)
    config     fields of the op's config to set, by name
    """

    op: str
    world_size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    algorithm: str = "auto"
    data: str = "random"
    layout: str = "contiguous"
    config: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [
            self.op,
            f"W{self.world_size}",
            str(self.dtype).removeprefix("torch."),
            "x".join(map(str, self.shape)) or "0d",
        ]
        parts += [
            word for word in (self.algorithm, self.data, self.layout) if word not in ("auto", "random", "contiguous")
        ]
        return "-".join(parts + [f"{name}={value}" for name, value in self.config])


Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """inputs       (case, rank, generator) -> this rank's tensors, on the generator's device
    run          (case, team, *inputs) -> result
    reference    (case, rank, every rank's inputs) -> the result in fp32 or wider, or bit for bit where ``exact``
    length       (case) -> how many terms are summed, for the tolerance
    exact        nothing is computed: bits must arrive as they were sent
    replicated   all ranks get the same bits
    partials     (case) -> how many partial sums are rounded to the dtype on the way; None: none
    """

    inputs: Callable[[Case, int, torch.Generator], Inputs]
    run: Callable[..., torch.Tensor]
    reference: Callable[[Case, int, Sequence[Inputs]], torch.Tensor]
    length: Callable[[Case], int]
    exact: bool = False
    replicated: bool = False
    partials: Callable[[Case], int] | None = None


def inputs_of(case: Case, rank: int, call: int, device: torch.device | str = "cpu") -> Inputs:
    """The same for the same arguments, in every process; other data at every rank and call."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{case} {rank} {call}".encode()))
    return tuple(lay_out(x, case.layout) for x in OPERATIONS[case.op].inputs(case, rank, generator))


def check(case: Case, rank: int, call: int, actual: torch.Tensor) -> None:
    """``actual`` is what ``rank`` should get of this call, else AssertionError."""
    operation = OPERATIONS[case.op]
    everyone = [inputs_of(case, peer, call, actual.device) for peer in range(case.world_size)]
    expected = operation.reference(case, rank, everyone)
    what = f"{case} rank {rank} call {call}"
    assert actual.is_contiguous(), f"{what}: the result is not contiguous"
    if operation.exact:
        assert_identical(actual, expected, what=what)
    else:
        assert actual.dtype == case.dtype, f"{what}: dtype {actual.dtype}"
        partials = operation.partials(case) if operation.partials else 0
        assert_close(actual, expected, operation.length(case), partials=partials, what=what)


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another layout."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "offset":
        room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        room[1:] = x.reshape(-1)
        return room[1:].view(x.shape)
    return x


def values(case: Case, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """A tensor of ``case.dtype`` on the generator's device, as ``case.data`` says."""
    where = {"generator": generator, "device": generator.device}
    if not case.dtype.is_floating_point:
        return torch.randint(-100, 100, tuple(shape), **where).to(case.dtype)
    x = torch.randn(tuple(shape), **where)
    if case.data == "subnormal":
        return (x.double() * torch.finfo(case.dtype).smallest_normal / 8).to(case.dtype)
    x = x.to(case.dtype)
    if case.data == "special":
        flat, odd = x.view(-1), [-0.0, torch.nan, torch.inf, -torch.inf, torch.finfo(case.dtype).max, -0.0]
        flat[: flat.numel() // 2] = -0.0
        at = torch.randperm(flat.numel(), **where)[: len(odd)]
        flat[at] = torch.tensor(odd[: len(at)], dtype=x.dtype, device=x.device)
    return x


# --- collectives -----------------------------------------------------------------------------------------------------


def one_tensor(case: Case, rank: int, generator: torch.Generator) -> Inputs:
    return (values(case, case.shape, generator),)


def sum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].double()
    for part in parts[1:]:
        total = total + part
    return total


def part_of(x: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    rows = x.shape[0] // world_size
    return x[rank * rows : (rank + 1) * rows]


def run_collective(case: Case, team: Any, x: torch.Tensor) -> torch.Tensor:
    if case.config:
        return find_op(case.op).run(collective_design(case.op, case.algorithm, dict(case.config)), team, x)
    return getattr(ops, case.op)(x, team, case.algorithm)


def inputs_of_norm(case: Case, rank: int, generator: torch.Generator) -> Inputs:
    x = values(case, case.shape, generator)
    same = torch.Generator(generator.device).manual_seed(zlib.crc32(f"{case}".encode()))
    return x, values(case, case.shape, same), 1 + values(case, case.shape[-1:], same) / 8


def run_norm(case: Case, team: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[2, ...]: normed, hidden."""
    return torch.stack(ops.all_reduce_rms_norm(x, residual, weight, 1e-6, team, case.algorithm))


def run_factored_norm(
    case: Case, team: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    normed, hidden = ops.all_reduce_rms_norm(x, residual, weight, 1e-6, team, case.algorithm, factored=True)
    return torch.stack((normed.normed(), hidden))


def reference_of_norm(case: Case, rank: int, everyone: Sequence[Inputs]) -> torch.Tensor:
    _, residual, weight = everyone[rank]
    hidden = sum_of([x for x, _, _ in everyone]) + residual.double()
    rounded = hidden.to(case.dtype).double()
    normed = rounded * (rounded.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    return torch.stack((normed, hidden))


def inputs_of_parts(case: Case, rank: int, generator: torch.Generator) -> Inputs:
    """Those of the norm, but what each rank adds is in three parts, fp32."""
    _, *others = inputs_of_norm(case, rank, generator)
    return torch.randn((3, *case.shape), generator=generator, device=generator.device), *others


def whole_of_parts(case: Case, parts: torch.Tensor) -> torch.Tensor:
    """Their sum, rounded, bit for bit as the kernels make it."""
    return (parts[0] + parts[1] + parts[2]).to(case.dtype)


def run_all_reduce_of_parts(case: Case, team: Any, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return ALL_REDUCE.run_of_partials(x, case.dtype, team)


def run_norm_of_parts(
    case: Case, team: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """[4, ...]: normed, hidden; and both of the factored norm."""
    arguments = (x, residual, weight, 1e-6, team, case.algorithm)
    normed, hidden = ops.all_reduce_rms_norm(*arguments)
    factored, again = ops.all_reduce_rms_norm(*arguments, factored=True)
    return torch.stack((normed, hidden, factored.normed(), again))


def reference_of_norm_of_parts(case: Case, rank: int, everyone: Sequence[Inputs]) -> torch.Tensor:
    once = reference_of_norm(case, rank, [(whole_of_parts(case, x), *others) for x, *others in everyone])
    return torch.cat((once, once))


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        inputs=one_tensor,
        run=run_collective,
        reference=lambda case, rank, everyone: sum_of([x for (x,) in everyone]),
        length=lambda case: case.world_size,
        replicated=True,
    ),
    "reduce_scatter": Operation(
        inputs=one_tensor,
        run=run_collective,
        reference=lambda case, rank, everyone: sum_of([part_of(x, rank, case.world_size) for (x,) in everyone]),
        length=lambda case: case.world_size,
    ),
    "all_reduce_rms_norm": Operation(
        inputs=inputs_of_norm,
        run=run_norm,
        reference=reference_of_norm,
        length=lambda case: case.world_size + 1 + case.shape[-1],
        replicated=True,
        partials=lambda case: 1,
    ),
    "all_reduce_factored_norm": Operation(
        inputs=inputs_of_norm,
        run=run_factored_norm,
        reference=reference_of_norm,
        length=lambda case: case.world_size + 1 + case.shape[-1],
        replicated=True,
        partials=lambda case: 1,
    ),
    "all_reduce_of_parts": Operation(
        inputs=inputs_of_parts,
        run=run_all_reduce_of_parts,
        reference=lambda case, rank, everyone: sum_of([whole_of_parts(case, x) for x, *_ in everyone]),
        length=lambda case: case.world_size,
        replicated=True,
    ),
    "all_reduce_norm_of_parts": Operation(
        inputs=inputs_of_parts,
        run=run_norm_of_parts,
        reference=reference_of_norm_of_parts,
        length=lambda case: case.world_size + 1 + case.shape[-1],
        replicated=True,
        partials=lambda case: 1,
    ),
    "all_gather": Operation(
        inputs=one_tensor,
        run=run_collective,
        reference=lambda case, rank, everyone: torch.cat([x for (x,) in everyone]),
        length=lambda case: 1,
        exact=True,
        replicated=True,
    ),
    "all_to_all": Operation(
        inputs=one_tensor,
        run=run_collective,
        reference=lambda case, rank, everyone: torch.cat([part_of(x, rank, case.world_size) for (x,) in everyone]),
        length=lambda case: 1,
        exact=True,
    ),
}

# A tile of one-shot is 256 elements of two bytes or 128 of four, a tile of two-shot world_size times that.
COLLECTIVES: list[Case] = []
# Sizes for real GPUs: many rounds of a bounded workspace.
LARGE: list[Case] = [
    Case(op=op, world_size=w, dtype=BF16, shape=shape)
    for w in (2, 4, 8)
    for op, shape in (
        ("all_reduce", (3 << 20,)),
        ("all_reduce", ((16 << 20) + 8,)),
        ("all_reduce", (128 << 20,)),
        ("all_gather", ((32 << 20) + 1,)),
        ("reduce_scatter", (w, 16 << 20)),
        ("all_to_all", (w, 8 << 20)),
    )
] + [
    Case(op=op, world_size=w, dtype=BF16, shape=shape, algorithm="copy_engine")
    for w in (2, 4)
    for op, shape in (
        ("all_reduce", ((160 << 20) + 5,)),
        ("all_gather", (40 << 20,)),
        ("reduce_scatter", (w, (160 << 20) // w)),
        ("all_to_all", (w, (160 << 20) // w)),
    )
]


def _collectives() -> None:
    add = COLLECTIVES.append
    wide = (("transport", "lamport"), ("row_bytes", 2048), ("num_warps", 2))
    keyed = (("transport", "keyed"), ("row_bytes", 2048), ("num_warps", 4))
    for w in (1, 2, 3, 4, 8):
        for dtype in (FP16, BF16, FP32):
            add(Case(op="all_reduce", world_size=w, dtype=dtype, shape=(3, 5, 77), algorithm="one_shot"))
            add(Case(op="all_reduce", world_size=w, dtype=dtype, shape=(w * 700 + 1,), algorithm="two_shot"))
            add(Case(op="reduce_scatter", world_size=w, dtype=dtype, shape=(w * 3, 211)))
        for op in ("all_gather", "all_to_all"):
            add(Case(op=op, world_size=w, dtype=BF16, shape=(w * 2, 513)))
        add(Case(op="all_reduce", world_size=w, dtype=BF16, shape=(5000,), algorithm="two_shot", config=wide))
    for w in (2, 4):
        for algorithm in ("one_shot", "two_shot"):
            for shape in ((), (1,), (0, 4), (7,), (512,), (16, 512)):
                add(Case(op="all_reduce", world_size=w, dtype=BF16, shape=shape, algorithm=algorithm))
            for dtype in (FP16, FP32):
                add(
                    Case(
                        op="all_reduce", world_size=w, dtype=dtype, shape=(2, 999), algorithm=algorithm, data="special"
                    )
                )
                add(
                    Case(
                        op="all_reduce", world_size=w, dtype=dtype, shape=(1500,), algorithm=algorithm, data="subnormal"
                    )
                )
            for layout in ("transposed", "offset"):
                add(Case(op="all_reduce", world_size=w, dtype=BF16, shape=(33, 48), algorithm=algorithm, layout=layout))
        special = {"algorithm": "two_shot", "config": wide, "data": "special"}
        add(Case(op="all_reduce", world_size=w, dtype=BF16, shape=(2, 999), **special))
        add(Case(op="all_reduce", world_size=w, dtype=FP16, shape=(40, 50)))
        add(Case(op="reduce_scatter", world_size=w, dtype=BF16, shape=(w, 3000), config=wide))
        add(Case(op="reduce_scatter", world_size=w, dtype=BF16, shape=(w, 999), data="special"))
        for op in ("all_gather", "all_to_all"):
            for dtype in (FP16, FP32):
                add(Case(op=op, world_size=w, dtype=dtype, shape=(w, 3, 100), data="special"))
            add(Case(op=op, world_size=w, dtype=BF16, shape=(w, 3, 101), data="special"))
            add(Case(op=op, world_size=w, dtype=FP32, shape=(w * 2, 700), data="special", config=keyed))
            add(Case(op=op, world_size=w, dtype=BF16, shape=(w * 3, 50), layout="offset"))
        for op in ("all_gather", "all_to_all", "reduce_scatter"):
            add(Case(op=op, world_size=w, dtype=FP32, shape=(w, 1)))
            add(Case(op=op, world_size=w, dtype=BF16, shape=(w, 0)))
            add(Case(op=op, world_size=w, dtype=BF16, shape=(w * 4, 130), layout="transposed"))
        for dtype in (torch.int64, torch.int32, torch.int8, torch.bool):
            add(Case(op="all_gather", world_size=w, dtype=dtype, shape=(5, 3)))
        for algorithm in ("one_shot", "two_shot"):
            for dtype, shape in ((BF16, (5, 48)), (FP16, (2, 3, 640)), (FP32, (9, 100)), (BF16, (0, 64))):
                for op in ("all_reduce_rms_norm", "all_reduce_factored_norm"):
                    add(Case(op=op, world_size=w, dtype=dtype, shape=shape, algorithm=algorithm))
            for dtype, shape in ((BF16, (5, 48)), (FP16, (3, 640))):
                add(Case(op="all_reduce_norm_of_parts", world_size=w, dtype=dtype, shape=shape, algorithm=algorithm))
                if algorithm == "one_shot":
                    add(Case(op="all_reduce_of_parts", world_size=w, dtype=dtype, shape=shape, algorithm=algorithm))
    for w in (1, 3, 8):
        for op in ("all_reduce_rms_norm", "all_reduce_factored_norm"):
            add(Case(op=op, world_size=w, dtype=BF16, shape=(5, 72)))
            add(Case(op=op, world_size=w, dtype=FP16, shape=(5, 72), algorithm="two_shot"))
    copies = {"algorithm": "copy_engine"}
    for w in (1, 2, 3, 4, 8):
        for op in ("all_gather", "all_to_all", "reduce_scatter"):
            add(Case(op=op, world_size=w, dtype=BF16, shape=(w * 2, 1600), **copies))
            add(Case(op=op, world_size=w, dtype=FP32, shape=(w * 3, 77), **copies))
        add(Case(op="all_reduce", world_size=w, dtype=BF16, shape=(w * 700 + 1,), **copies))
    for w in (2, 4):
        for op in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce"):
            add(Case(op=op, world_size=w, dtype=FP16, shape=(w, 3, 100), data="special", **copies))
            add(Case(op=op, world_size=w, dtype=FP32, shape=(w, 1), **copies))
            add(Case(op=op, world_size=w, dtype=BF16, shape=(w, 0), **copies))
            add(Case(op=op, world_size=w, dtype=BF16, shape=(w * 4, 130), layout="transposed", **copies))
            add(Case(op=op, world_size=w, dtype=BF16, shape=(w * 3, 50), layout="offset", **copies))
            for pieces in ((1,), (5, 1, 1), (1,) * 8):
                add(Case(op=op, world_size=w, dtype=BF16, shape=(w, 500), config=(("pieces", pieces),), **copies))
        for dtype in (torch.int64, torch.int8, torch.bool):
            add(Case(op="all_gather", world_size=w, dtype=dtype, shape=(5, 3), **copies))
    add(Case(op="all_gather", world_size=2, dtype=BF16, shape=(20000,)))
    add(Case(op="all_to_all", world_size=4, dtype=BF16, shape=(40000,)))


_collectives()
