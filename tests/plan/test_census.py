"""Which designs plans take: at every shape that ``weft bench`` names, on four GPUs, of 1 to 8 ranks."""

import dataclasses
import functools

import torch

from tests.documents import ROOT
from weft.bench.ops.shapes import FORMS, parse_shapes
from weft.ops.op import registered
from weft.plan.planned import machine
from weft.runtime import capabilities

WORLD_SIZES = (1, 2, 4, 8)
# Why a design is kept that no call takes by itself at these shapes.
NODES, COUNTED = "of several nodes", "its shapes are no set of weft bench"
UNCHOSEN = {
    ("gathered_prefill_attention", "ulysses"): "few tokens of each rank: weft bench names none so short",
    ("sharded_decode_attention", "over_nodes"): NODES,
    ("all_reduce", "multimem_one_shot"): "NVLink multicast was off on all GPUs that measured: asked for by name",
    ("all_reduce", "multimem_two_shot"): "NVLink multicast was off on all GPUs that measured: asked for by name",
    ("grouped_matmul_reduce_scatter", "slabs"): "of experts in slices, and of whole ones between nodes or by name",
    ("mla_decode_attention", "blocks"): "the op has no form of shapes yet",
    ("mla_decode_attention", "early"): "the op has no form of shapes yet",
    ("matmul", "persistent"): "weft's own GEMM, asked for by name; tests of tile schedules run it",
    **{
        (name, "over_nodes"): NODES
        for name in (
            "all_gather", "all_reduce", "all_reduce_rms_norm", "all_to_all", "reduce_scatter", "moe_combine", "moe_dispatch",
            "all_gather_grouped_matmul_silu_mul", "grouped_matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce",
            "matmul_reduce_scatter",
        )
    },
    **{(name, "chunks"): COUNTED for name in ("adjust_logits", "sample_argmax", "top_p_mass")},
}  # fmt: skip


def shapes():
    """(op, world size, sizes) of every named set."""
    for op in registered():
        for world_size in WORLD_SIZES if op.form and op.designs else ():
            for word in FORMS[op.form].sets:
                try:
                    found = parse_shapes(op.name, [word], world_size)
                except ValueError:
                    continue  # more ranks than heads
                yield from ((op, world_size, shape.size) for shape in found)


@functools.cache
def calls():
    """(op, machine of a virtual rank, call, plan) of every shape like every GPU, with each variant that the op has."""
    found = []
    for op, world_size, size in shapes():
        for variant in (None, *op.variants):
            case = op.case_of(size, torch.bfloat16, world_size, **({variant: True} if variant else {}))
            for like in capabilities.GPUS:
                here = machine(capabilities.simulated(world_size, like=like), world_size)
                call = op.call_of_case(case, here)
                found.append((op, here, call, op.plan(call, here)))
    return found


def test_virtual_ranks_plan_as_the_gpu_that_they_are_like():
    assert len(calls()) > 10_000
    for op, here, call, planned in calls()[::5]:  # of each GPU in turn
        real = machine(dataclasses.replace(here.caps, is_simulated=False, multicast=False), here.world_size)
        assert op.choose(call, real) == planned, (op.name, here.caps.device_name, here.world_size, call)


def test_every_design_is_chosen_somewhere_or_says_why_it_stays():
    chosen = {(op.name, planned.name) for op, _, _, planned in calls()}
    designs = {(op.name, design) for op in registered() for design in op.designs}
    assert designs - chosen == set(UNCHOSEN)


def test_no_op_asks_whether_it_is_simulated():
    for room in ("ops", "parallel", "transport", "kernels", "tiles", "layers"):
        for file in (ROOT / "weft" / room).rglob("*.py"):
            assert "is_simulated" not in file.read_text(), file
