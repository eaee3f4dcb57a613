"""The GPU suite, in a process of its own, for the world sizes this machine has GPUs for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from tests.gpu.attempts import Desynchronised, Suite
from tests.gpu.suite import first_of_each
from tests.limits import SUITE
from weft.ops.op import registered

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(SUITE + 100)
@pytest.mark.parametrize("world_size", [pytest.param(w, marks=pytest.mark.gpu(w), id=f"{w} GPUs") for w in (2, 4, 8)])
def test_suite(world_size, tmp_path, pytestconfig):
    run_suite(world_size, tmp_path, pytestconfig)


@pytest.mark.timeout(SUITE + 100)
@pytest.mark.gpu(2)
def test_2000_calls_of_experts_with_changing_tokens_and_routing_never_wait_on_the_host(tmp_path, pytestconfig):
    run_suite(2, tmp_path, pytestconfig, "--load", "--only", "experts")


def run_suite(world_size, tmp_path, pytestconfig, *options):
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "tests.gpu.suite",
        "--world-size",
        str(world_size),
        "--json",
        str(report),
        *options,
    ]
    if pytestconfig.getoption("--share-gpus"):
        command.append("--share-gpus")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SUITE)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert json.loads(report.read_text())["failed"] == 0


# Fields of cases whose weight is quantized; of "four_bit" its value is the format.
QUANTIZED = {"block_fp8", "channel_fp8", "four_bit"}


def quantized_forms(cases):
    fields = ((case.op, name, value) for case in cases for name, value in case.fields)
    return {(op, name, value if name == "four_bit" else True) for op, name, value in fields if name in QUANTIZED}


def test_graphs_and_loads_take_a_case_of_each_format_of_weights():
    """On GPUs they take large cases alone. 2 ranks: the fewest of which all ops have cases."""
    cases = [case for op in registered() for case in op.cases() if case.world_size in (1, 2)]
    large = [case for op in registered() for case in op.large_cases() if case.world_size in (1, 2)]
    assert len(quantized_forms(cases)) >= 20 and quantized_forms(first_of_each(large)) >= quantized_forms(cases)


def test_the_suite_notes_failures_and_goes_on():
    """On virtual ranks: a failure of one rank is everybody's verdict, and later attempts still run."""

    def main(team):
        def wrong_here(rank):
            if team.rank == rank:
                raise AssertionError("wrong")

        suite = Suite(team)
        suite.group(
            "some",
            [
                ("passes", lambda: None, lambda made: None),
                ("one rank is wrong", lambda: None, lambda made: wrong_here(1)),
                ("all ranks raise", lambda: [][0], lambda made: None),
                ("bits differ", lambda: None, lambda made: team.rank),
                ("passes again", lambda: 5, lambda made: made),
            ],
        )
        with pytest.raises(Desynchronised, match="rank 1: .*wrong"):
            suite.attempt(lambda: wrong_here(1), lambda made: None)
        return suite.groups[0]

    for group in weft.simulate(main, 2):
        assert group.passed == 2
        assert [failure.split(":")[0] for failure in group.failures] == [
            "one rank is wrong",
            "all ranks raise",
            "bits differ",
        ]
