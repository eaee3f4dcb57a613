"""Providers of ops: by name and family, and the designs that they run."""

import pytest
import torch

import weft
from tests.bench.ops.choosing import choose
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.providers import plan_of
from weft.bench.ops.shapes import OPS, op_of, parse_shapes
from weft.plan.planned import machine
from weft.runtime.capabilities import Capabilities


def test_providers_are_chosen_by_name_and_family():
    assert [p.name for p in choose("all-reduce", ["weft"])] == [
        f"weft.{name}"
        for name in ("auto", "one_shot", "two_shot", "copy_engine", "multimem_one_shot", "multimem_two_shot")
    ]
    assert [p.name for p in choose("all-reduce", ["nccl", "torch.two_shot"])] == [
        "nccl",
        "nccl.window",
        "torch.two_shot",
    ]
    assert [p.name for p in choose("gemm-ar", ["weft"])] == [
        f"weft.{name}" for name in ("auto", "fused", "pipelined", "sequential")
    ]
    assert [p.name for p in choose("gemm-ar", []) if p.role == "weft"] == ["weft.auto"]
    assert {p.name for p in choose("gemm-ar", [], simulated=True)} >= {
        "weft.fused",
        "weft.pipelined",
        "weft.sequential",
    }
    assert [p.name for p in choose("gemm-ar", ["weft.segments", "weft.library"])] == [
        "weft.pipelined",
        "weft.sequential",
    ]
    assert "weft.small_m" not in {p.name for p in choose("gemm", [], simulated=True)}  # for some dtypes and sizes only
    assert [p.name for p in choose("gemm", ["weft.small_m"])] == ["weft.small_m"]
    assert [(p.name, p.role) for p in choose("gemm-rs", ["cublas"])] == [("cublas", "ceiling")]
    assert [(p.name, p.role) for p in choose("gemm", ["cublas"])] == [("cublas", "other")]


@pytest.mark.parametrize("name", [name for name in OPS if op_of(name).form == "gemm"])
def test_a_design_by_name_has_its_own_fields(name):
    """Also where a call gets another one, by rule or by a row that was tuned."""
    h200 = Capabilities(device_name="NVIDIA H200", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,) * 4)
    op, here = op_of(name), machine(h200, 4)
    for m in (16, 4096, 8192):
        call = op.call_of((m, 5120, 6400), torch.bfloat16, here)
        for design in op.designs.keys() - op.internal:
            planned = op.plan(call._replace(design=design), here)
            assert (planned.name, type(planned.design)) == (design, op.designs[design])
        auto = op.plan(call, here)
        assert op.plan(call._replace(design=auto.name), here).design == auto.design


def test_a_provider_runs_the_plan_of_its_design():
    def main(team):
        problem = OpProblem(op_of("gemm-rs"), parse_shapes("gemm-rs", [], 2, tiny=True)[0], "bf16", team)
        return [
            plan_of(problem, design).name
            for design in ("auto", *problem.op.designs)
            if design not in problem.op.internal
        ]

    assert weft.simulate(main, 2) == [["sequential", "fused", "pipelined", "sequential"]] * 2
