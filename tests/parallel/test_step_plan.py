"""The plan of a forward pass: its recipe, by mode and number of tokens, and the reason."""

import re
from types import SimpleNamespace

import pytest
import torch

import weft
from weft.costs.recipes import Layer
from weft.parallel.replicated import FusedNorm
from weft.parallel.sequence_parallel import GatheredMLP
from weft.parallel.step_plan import plan_layer, plan_step, splits_tokens
from weft.runtime import capabilities
from weft.runtime.capabilities import Capabilities


def test_the_plan_of_a_pass_follows_its_tokens_and_says_why():
    def main(team):
        sizes = {"hidden_size": 4096, "dtype": torch.bfloat16, "team": team}
        plans = [str(plan_step(tokens, mode="auto", **sizes)) for tokens in (1, 1000, 4096)]
        return [*plans, str(plan_step(1, mode="auto", **sizes, fused=False))]

    decode, medium, prefill, plain = weft.simulate(main, 4)[0]
    time = r"\d+(?:\.\d+)?"
    assert re.fullmatch(
        "replicated, fused, all-reduce with the next norm, deferred RMS scale: 1 token < 1024: predicted µs of a layer: "
        f"fused_norm {time}, replicated {time}, sequence_parallel {time}",
        decode,
    )
    assert re.fullmatch(
        f"replicated, fused: 1000 tokens < 1024: predicted µs of a layer: replicated {time}, .* {time}, .* {time}",
        medium,
    )
    assert re.fullmatch(
        "sequence_parallel, fused: 4096 tokens >= 1024: predicted µs of a layer: "
        f"sequence_parallel {time}, replicated {time}, fused_norm {time}",
        prefill,
    )
    assert "fused_norm" not in plain and plain.startswith(
        "replicated, unfused: 1 token < 1024: predicted µs of a layer: rep"
    )
    decode, medium, prefill, _ = weft.simulate(main, 1)[0]
    assert decode == (
        "replicated, fused, all-reduce with the next norm, deferred RMS scale: one rank: nothing to send; 1 token <= 128: the "
        "norm adds up a GEMM's parts"
    )
    assert medium == prefill == "replicated, fused: one rank: nothing to send"


@pytest.mark.parametrize("names", [("reference", "sequence_parallel", "replicated"), ("torch", "ag_rs", "gemm_ar")])
def test_a_plan_that_was_asked_for_is_followed(names):
    def main(team):
        sizes = {"hidden_size": 64, "dtype": torch.float32, "team": team}
        plans = [plan_step(8, mode=mode, **sizes, fused=True) for mode in names]
        narrow = plan_step(8, mode=names[-1], hidden_size=6, dtype=torch.bfloat16, team=team, fused=True)
        return [(plan.mode, plan.fused, isinstance(plan.recipe, FusedNorm)) for plan in [*plans, narrow]]

    reference, sequence_parallel, replicated, narrow = weft.simulate(main, 2)[0]
    assert reference == ("reference", False, False)
    assert sequence_parallel == ("sequence_parallel", True, False)
    assert replicated == ("replicated", True, True)
    assert narrow == ("replicated", True, False)  # rows of 12 bytes: not what all_reduce_rms_norm takes


def test_rms_scales_are_deferred_for_few_tokens_in_bf16_on_sm_90(monkeypatch):
    def plan(tokens=64, dtype=torch.bfloat16, mode="replicated", arch="sm_90", world_size=4):
        caps = Capabilities(device_name=arch, arch=arch, sms=132, memory_bytes=0, peer_access=(True,))
        team = SimpleNamespace(rail=None, size=world_size, is_simulated=False, caps=caps)
        return plan_step(tokens, mode=mode, hidden_size=5120, dtype=dtype, team=team)

    def defers(plan):
        assert isinstance(plan.recipe, FusedNorm) or "deferred" not in str(plan)
        return isinstance(plan.recipe, FusedNorm) and plan.recipe.deferred_scale

    assert defers(plan()) and ", deferred RMS scale" in str(plan())
    others = [
        {"tokens": 2048},
        {"dtype": torch.float32},
        {"dtype": torch.float16},
        {"mode": "sequence_parallel"},
        {"arch": "sm_100"},
    ]
    for asked in others:
        assert not defers(plan(**asked)) and "deferred" not in str(plan(**asked)), asked
    assert defers(plan(512)) and defers(plan(1024, world_size=2))
    assert not isinstance(plan(2048, world_size=2).recipe, FusedNorm)
    monkeypatch.setattr("weft.parallel.step_plan.defers_scale", lambda dtype, team: True)
    assert defers(plan(arch="sm_100")) and not defers(plan(2048))
    monkeypatch.setattr("weft.parallel.step_plan.defers_scale", lambda dtype, team: False)
    assert not defers(plan())


def test_a_team_of_nodes_is_planned_as_one_of_its_nodes():
    caps = Capabilities(device_name="NVIDIA H200", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,))
    node = SimpleNamespace(size=4, rail=None, is_simulated=False, caps=caps)
    teams = node, SimpleNamespace(size=16, rail=object(), node=node, is_simulated=False, caps=caps)
    sizes = {"mode": "auto", "hidden_size": 4096, "dtype": torch.bfloat16, "layer": Layer.dense(4096, 16)}
    for tokens in (1, 1024, 4096):
        first, second = (plan_step(tokens, team=team, **sizes) for team in teams)
        assert (first.mode, first.reason) == (second.mode, second.reason)


def test_torch_compile_traces_no_cost_function():
    """It asks for the tokens at which a layer's recipes change, and guards them alone."""
    team = SimpleNamespace(rail=None, size=2, is_simulated=False, caps=capabilities.simulated(2))

    def run(x):
        gathers = isinstance(plan_layer(len(x), mode="sequence_parallel", team=team).recipe, GatheredMLP)
        x = x + 1 if gathers else x
        return x + 2 if splits_tokens(len(x), 4096, team) else x

    made = torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    assert [made(torch.zeros(rows)).max().item() for rows in (600, 1100, 5000)] == [1, 0, 2]


def test_a_head_of_many_rows_is_given_normed_rows():
    """cuBLAS's GEMM leaves a deferred scale to the kernel behind it, and the logits have none."""

    def main(team):
        plan = plan_step(64, mode="replicated", hidden_size=64, dtype=torch.bfloat16, team=team, fused=True)
        return [plan.recipe.of_head(rows).deferred_scale for rows in (1, 10_000)]

    assert weft.simulate(main, 2)[0] == [True, False]
