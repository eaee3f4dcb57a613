"""What results say of the sources that ran: git's own name of them, with or without git."""

import shutil
import subprocess

import pytest

import weft
from weft.bench.harness.machine import check_clean, commit_of, revision, tree

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder, *words):
    who = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path):
    """A checkout's package: folders that sort differently with their stroke, a script, a file of bytes, caches."""
    folder = tmp_path / "checkout" / "weft"
    for name in ("ops/tuned", "ops-more", "empty", "__pycache__"):
        (folder / name).mkdir(parents=True)
    (folder / "__init__.py").write_text('"""é"""\n')
    (folder / "ops.py").write_bytes(b"\x00\xff\r\n")
    (folder / "ops" / "tuned" / "x.json").write_text("{}")
    (folder / "ops-more" / "y.py").write_text("")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "__pycache__" / "x.pyc").write_bytes(b"x")
    (folder.parent / ".gitignore").write_text("__pycache__/\n")
    git(folder.parent, "init", "-q")
    git(folder.parent, "add", "-A")
    git(folder.parent, "commit", "-q", "-m", "x")
    return folder


def test_a_folder_has_the_name_that_git_gives_it(package):
    assert tree(package) == git(package, "rev-parse", "HEAD:weft")
    (package / "ops" / "z.py").write_text("new")
    git(package, "add", "-A")
    git(package, "commit", "-q", "-m", "y")
    assert tree(package) == git(package, "rev-parse", "HEAD:weft")


def test_changes_show_and_name_what_ran(package):
    commit = git(package, "rev-parse", "HEAD")
    assert revision(package) == f"{commit} (weft/ {tree(package)[:12]})"
    assert commit_of(package) == (commit, True)
    (package / "new.py").write_text("x = 1\n")  # not even added
    assert revision(package) == f"{commit} with changes (weft/ {tree(package)[:12]})"
    assert commit_of(package) == (commit, False)
    changed = tree(package)
    git(package, "add", "-A")
    git(package, "commit", "-q", "-m", "what ran")
    assert git(package, "rev-parse", "HEAD:weft") == changed


def test_without_git_the_sources_have_a_name_all_the_same(package):
    shutil.rmtree(package.parent / ".git")
    assert commit_of(package) == (None, False)
    assert revision(package) == f"weft/ {tree(package)[:12]}"


def test_results_of_changed_sources_are_refused(package, monkeypatch, tmp_path):
    monkeypatch.setattr(weft, "__file__", str(package / "__init__.py"))
    results = package.parent / "benchmarks" / "results" / "h200-x2"
    check_clean("--out", results)
    (package / "new.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"--out .*/h200-x2: weft/ has changes that no commit holds"):
        check_clean("--out", results)
    check_clean("--json", tmp_path / "x.json")
    check_clean("--json", None)
