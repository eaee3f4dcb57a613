"""Baselines of a folder: found by the names of what they solve, refused by the file's name."""

import pytest

from weft.bench.harness import baselines
from weft.bench.harness.baselines import baselines_for, folder_of
from weft.bench.names import MEASURED
from weft.bench.ops.workload import OpWorkload
from weft.bench.workloads import check_words

FILE = """
from weft.bench.harness.provider import Provider
from .shared import ROLE

PROVIDERS = (Provider(name="mine", ops=("gemm", "mlp"), role=ROLE, make=print),)
"""


def folder(path, **files):
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / f"{name}.py").write_text(text)
    return path


def test_a_folder_is_searched_in_place_of_a_checkout_s(tmp_path):
    made = folder(tmp_path, mine=FILE, shared='ROLE = "other"')
    assert (
        [one.name for one in baselines_for("gemm", made)]
        == ["mine"]
        == [one.name for one in baselines_for("mlp", made)]
    )
    assert baselines_for("ag-gemm", made) == ()
    names = [one.name for one in OpWorkload(name="gemm", shapes=(), baselines=made).available()]
    assert names[-1] == "mine" and "cublas" in names


def test_files_that_cannot_be_used_are_named(tmp_path):
    for name, text, message in (
        ("broken", "x =", r"--baselines .*broken.py: SyntaxError"),
        ("lacking", "import no_such_module", r"--baselines .*lacking.py: ModuleNotFoundError: No module"),
        ("empty", "", r"--baselines .*empty: no Python file there has PROVIDERS"),
    ):
        with pytest.raises(ValueError, match=message):
            baselines_for("gemm", folder(tmp_path / name, **{name: text}))


def test_an_installed_package_says_where_baselines_are(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "_CHECKOUT", tmp_path)
    assert folder_of(None) is None and all(baselines_for(name, None) == () for name in MEASURED)
    with pytest.raises(ValueError, match="provider 'deep_ep' is unknown; .* pass --baselines FOLDER"):
        check_words([OpWorkload(name="moe-dispatch", shapes=())], ["deep_ep"])


def test_every_baseline_of_the_checkout_solves_something():
    solved = {op for name in MEASURED for one in baselines_for(name, None) for op in one.ops}
    assert solved and solved <= {*MEASURED}
