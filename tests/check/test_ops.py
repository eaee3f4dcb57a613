"""weft's own ops under a few schedules each; ``python -m tests.check.sweep`` runs hundreds.

Other tests compile their kernels.
"""

import dataclasses
import inspect

import pytest
import torch

import weft
import weft.check
from tests.check.calls import OPS, SLOW
from tests.runtime import behaviour
from tests.sampled import sampled
from weft import ops

# Ops that write words which are their own flags, on stages that are used again in the eighth call. Of the others a schedule
# sees four calls, two of each half of a workspace.
STAGED = ("one_shot", "norm", "lamport", "fp32", "all_gather", "reduce_scatter", "all_to_all", "sharded", "merge")


# Schedule i follows strategy i modulo 4: two ranks run one of the first two, three or four ranks one of the last. Of two calls
# one is made on two ranks, one on three; `make sweep` makes all so, also on four, and 16 schedules of each at each size.
@pytest.mark.parametrize(
    ("call", "world_size", "schedules", "seed"),
    [
        pytest.param(call, *ranks, id=f"{call.name.replace(' ', '-')}-{ranks[0]}-{ranks[1]}", marks=marks)
        for index, call in enumerate(OPS)
        for ranks, marks in (
            ((2, 1, index // 2 % 2), () if index % 2 else pytest.mark.sweep),
            ((2, 2, 0), pytest.mark.sweep),
            ((3, 1, 2 + index // 4 % 2), pytest.mark.sweep if index % 2 else ()),
            ((4, 1, 2 + index // 2 % 2), pytest.mark.sweep),
        )
    ],
)
def test_an_op_is_clean(call, world_size, schedules, seed):
    if schedules == 1 and not any(word in call.name for word in STAGED):
        call = dataclasses.replace(call, calls=min(call.calls, 4))
    report = weft.check.check(call, world_size, schedules=schedules, seed=seed, sms=call.sms, compile=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("call", SLOW, ids=lambda call: call.name)
@pytest.mark.parametrize(
    ("world_size", "schedules"), [(2, 1), *(pytest.param(size, 8, marks=pytest.mark.sweep) for size in (2, 3, 4))]
)
def test_a_forward_and_its_backward_in_one_program_are_clean(call, world_size, schedules):
    report = weft.check.check(call, world_size, schedules=schedules, sms=call.sms)
    assert report.ok, str(report)


def test_all_ops_of_a_team_are_among_them():
    named = {call.name.split()[0] for call in OPS}
    of_a_team = {name for name in ops.__all__ if "team" in inspect.signature(getattr(ops, name)).parameters}
    assert of_a_team - {"explain", "warm_up"} <= named  # these launch nothing on virtual ranks


@pytest.mark.parametrize("behave", behaviour.ALL, ids=lambda behave: behave.__name__)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_promises_of_teams_and_primitives_hold_under_check(behave, world_size):
    report = weft.check.check(behave, world_size, schedules=2)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("mode", "world_size", "top_p", "schedules"),
    sampled(
        [
            *(("gemm_ar", 2, 0.8, 1), ("ag_rs", 2, 1.0, 1)),
            *(("gemm_ar", 4, 1.0, 8), ("ag_rs", 4, 0.8, 8)),
        ],
        lambda mode, world_size, top_p, schedules: world_size == 2,
    ),
)
def test_whole_fused_steps_are_clean(mode, world_size, top_p, schedules):
    """Prefill, decode and sampling, in which kernels overlap the ones before them."""

    def main(team):
        engine = weft.Engine(None, team, mode=mode, fused=True, dtype=torch.bfloat16, page_size=16, max_seq_len=32)
        params = weft.SamplingParams(max_tokens=2, temperature=1.0, top_p=top_p, ignore_eos=True)
        return [piece.token_id for piece in engine.answer(["12+3=", "1"], [params, params])]

    report = weft.check.check(main, world_size, schedules=schedules)
    assert report.ok, str(report)
