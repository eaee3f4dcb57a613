"""What the harness may know of what it measures, and how ranks agree."""

import re
from pathlib import Path

import pytest

import weft
from weft.bench import harness
from weft.bench.harness.workload import Failed, OutOfStep, together, words_apart


def test_the_harness_knows_no_op_no_model_and_no_table():
    for file in Path(harness.__file__).parent.glob("*.py"):
        assert not re.search(r"weft\.bench\.(ops|models|render|workloads)", file.read_text()), file.name


def test_all_ranks_fail_together_with_the_first_reason():
    def main(team):
        assert together(team, lambda: team.rank) == team.rank
        with pytest.raises(Failed, match="^rank 1: ZeroDivisionError: .* by zero$"):
            together(team, lambda: 1 // (team.rank != 1))
        with pytest.raises(Failed, match="^no memory$"):
            together(team, fail, launches="a step")
        with pytest.raises(OutOfStep, match="a step failed on some ranks only .rank 1: ZeroDivisionError"):
            together(team, lambda: 1 // (team.rank != 1), launches="a step")
        return True

    def fail():
        raise ValueError("no memory")

    assert weft.simulate(main, 3) == [True] * 3


def test_a_number_belongs_to_the_word_before_it():
    assert words_apart("4096,12800,5120") == ["4096,12800,5120"]
    assert words_apart("qwen3-32b:1,2,llama3-70b") == ["qwen3-32b:1,2", "llama3-70b"]
    assert words_apart("decode:1x128,32x1024,prefill:32x128") == ["decode:1x128,32x1024", "prefill:32x128"]
