"""Reports of files: as they were written, or refused by the file's name."""

import pytest

from tests.bench import canned
from weft.bench.harness import report
from weft.bench.workloads import read


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
