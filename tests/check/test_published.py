"""Published programs, run where they lie, in the folder that WEFT_PUBLISHED names (docs/check-published.md)."""

import os
from pathlib import Path

import pytest

import weft
from weft.check.torch_programs.program import TorchProgram

FOLDER = os.environ.get("WEFT_PUBLISHED", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="needs the fetched projects, in the folder that WEFT_PUBLISHED names"
)

# Driver, and the kinds that weft check finds.
FOUND = {
    "flashinfer_all_gather_matmul": {"scope", "relaxed-order"},
    "flashinfer_quantized_all_reduce": {"race"},
    "helion_one_shot_all_reduce": set(),
    "kraken_all_gather_matmul": {"proxy-fence"},
    "kraken_gemm_reduce_scatter": {"relaxed-order"},
    "kraken_one_shot_all_reduce": set(),
    "kraken_two_shot_all_reduce": set(),
    "lmdeploy_all_gather": set(),
    "sglang_all_gather": set(),
    "vllm_engram_peer": set(),
    "vllm_lamport": set(),
}


def check(name, *arguments, schedules=4):
    program = TorchProgram(Path(__file__).parent / f"published/{name}.py", None, (FOLDER, *arguments))
    return weft.check(program, 2, schedules=schedules)


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name):
    report = check(name)
    assert {found.finding.kind for found in report.wrong} == FOUND[name], str(report)
    assert len(report.wrong) == len(FOUND[name]), str(report)


@pytest.mark.parametrize("name", [name for name, kinds in FOUND.items() if kinds])
def test_the_mended_twin_is_clean(name):
    report = check(name, "mended", schedules=8)
    assert report.ok, str(report)
