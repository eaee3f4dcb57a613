"""Reports of files: as they were written, or refused by the file's name; and what tables ask of their workloads."""

from dataclasses import replace

import pytest

from tests.bench import canned
from weft.bench.harness import report
from weft.bench.names import MEASURED
from weft.bench.workloads import read, workload_of


def test_every_workload_says_what_tables_need():
    """Ops have a rate, layers and models a roofline; only whole models are timed in ms."""
    found = {}
    for name in MEASURED:
        made = workload_of(replace(canned.model(), op=name))
        found[name] = made.time_unit, made.step_layers, len(made.notes)
        assert (made.unit == "") == bool(made.subject), name
        assert made.in_milliseconds == made.time_unit.startswith("ms"), name
        if made.subject:
            assert made.rate(2, (1, 128, 1), 10.0) is None
    layers = {"model": ("ms", 64, 1), "generate": ("ms per token after the first", 64, 1)}
    assert found == dict.fromkeys(MEASURED, ("µs", 1, 0)) | layers


def test_json_comes_back_as_it_was(tmp_path):
    reports = [canned.all_reduce(), canned.ag_gemm()]
    report.write(tmp_path / "made" / "x.json", reports)
    assert read(tmp_path / "made" / "x.json") == reports
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"schema": 1', '"schema": 7', "schema is 7"),
        ('"op": "all-reduce"', '"op": "all"', "op 'all' is unknown"),
        ('"role": "other"', '"role": "both"', "role='both'"),
        ('"samples"', '"sample"', "sample"),
        ('"no such op"', "null", "neither a time, an error nor a reason"),
        ("{", "", "x.json"),
        ("", "[1]", "schema is None"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, old, new, message):
    file = tmp_path / "x.json"
    file.write_text(report.to_json([canned.all_reduce()]).replace(old, new, 1) if old else new)
    with pytest.raises(ValueError, match=message) as caught:
        read(file)
    assert "x.json" in str(caught.value)
