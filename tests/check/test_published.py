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

# Driver with its arguments, and the kinds that weft check finds.
FOUND = {
    "flashinfer_all_gather_matmul": ["relaxed-order", "scope"],
    "flashinfer_gemm_persistent": ["error"],
    "flashinfer_quantized_all_reduce": ["race"],
    "helion_one_shot_all_reduce": [],
    "iris_examples all_scatter numbers": [],
    "iris_examples all_scatter": ["error", "error"],
    "iris_examples atomics": ["error", "error"],
    "iris_examples atomics numbers": ["scope"],
    "iris_examples messages": ["race"],
    "iris_examples one_shot": ["error", "error"],
    "iris_examples one_shot numbers": ["missing-barrier"],
    "kraken_all_gather_matmul": ["proxy-fence"],
    "kraken_gemm_all_reduce": ["relaxed-order"],
    "kraken_gemm_reduce_scatter": ["relaxed-order"],
    "kraken_gemm_reduce_scatter_ce": ["undrained-tma"],
    "kraken_one_shot_all_reduce": [],
    "kraken_two_shot_all_reduce": [],
    "lmdeploy_all_gather": [],
    "megatron_lm_collectives experts": ["relaxed-order"],
    "megatron_lm_collectives gather": [],
    "megatron_lm_collectives gather_three": [],
    "megatron_lm_collectives layer": ["relaxed-order", "relaxed-order"],
    "megatron_lm_collectives norm": ["relaxed-order"],
    "sglang_all_gather": [],
    "sglang_gemms hc_mix": ["missing-barrier"],
    "sglang_gemms router_gemv": ["missing-barrier"],
    "symm_mem_recipes_all_reduce": ["relaxed-order"],
    "tokenspeed_communication inner": [],
    "tokenspeed_communication layers": ["relaxed-order"],
    "tokenspeed_communication sampling": [],
    "torchao_all_to_all": ["race", "race", "relaxed-order", "relaxed-order", "relaxed-order"],
    "torchtitan_expert_parallel": [],
    "tritonbench_layer_norm": ["missing-barrier", "missing-barrier"],
    "vllm_engram_peer": [],
    "vllm_lamport": [],
}


# The example that never ends has no twin.
WITHOUT_A_TWIN = {"iris_examples messages"}


def check(driver, *further, schedules=4):
    name, *arguments = driver.split()
    program = TorchProgram(Path(__file__).parent / f"published/{name}.py", None, (FOLDER, *arguments, *further))
    return weft.check(program, 2, schedules=schedules)


@pytest.mark.parametrize("driver", FOUND)
def test_what_is_found(driver):
    report = check(driver)
    assert sorted(found.finding.kind for found in report.wrong) == FOUND[driver], str(report)


@pytest.mark.parametrize(
    "driver", [driver for driver, kinds in FOUND.items() if kinds and driver not in WITHOUT_A_TWIN]
)
def test_the_mended_twin_is_clean(driver):
    report = check(driver, "mended", schedules=8)
    assert report.ok, str(report)
