"""Committed results: each names the commit that holds the sources which it measured."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Of vLLM's server, before benchmarks/serving.py wrote the client's commit.
WITHOUT = ("lab/h200-serving/vllm.json", "lab/h200-x2-serving/vllm.json")
# Times of several designs of one shape on sources that no commit holds: weft/costs is fitted to them, and no page has them.
WITHOUT += ("lab/h200-x2-candidates.json", "lab/h200-x4-candidates.json", "lab/h200-x2-exchanges.json")
FOLDER = ROOT / "benchmarks"
FILES = [file for file in sorted(FOLDER.rglob("*.json")) if file.relative_to(FOLDER).as_posix() not in WITHOUT]


def sources_of(file):
    """What a file says of weft's sources: all values of these keys."""
    return set(re.findall(r'"(?:revision|versions|commit)": "([^"]*)"', file.read_text()))


def git(*command):
    return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_a_result_names_a_commit_and_no_changes(file):
    sources = sources_of(file)
    assert [one for one in sources if "changes" in one or "patched" in one] == []
    assert any(re.search(r"\b[0-9a-f]{7,40}\b", one) for one in sources), f"{file.name}: {sources or 'no sources'}"


@pytest.fixture(scope="module")
def history():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history")


def test_the_commits_are_in_the_history_and_hold_what_was_measured(history):
    sources = {one for file in FILES for one in sources_of(file)}
    trees = {tuple(found) for one in sources for found in re.findall(r"\b([0-9a-f]{7,40}) \(weft/ ([0-9a-f]+)\)", one)}
    assert len(trees) > 10
    assert [(commit, tree) for commit, tree in sorted(trees) if not tree_of(commit).startswith(tree)] == []
    alone = {found for one in sources for found in re.findall(r"\b[0-9a-f]{7,40}\b(?! \(|\))", one)}
    assert [commit for commit in sorted(alone) if not tree_of(commit)] == []


def test_the_files_that_decisions_and_comments_take_from_the_history_are_there(history):
    texts = [file.read_text() for file in (ROOT / "docs" / "decisions.md", *(ROOT / "weft").rglob("*.py"))]
    named = {one for text in texts for one in re.findall(r"\b((?:lab|results)/[\w./+-]+)@([0-9a-f]{7})\b", text)}
    assert len(named) > 10
    assert [one for one in sorted(named) if git("cat-file", "-e", f"{one[1]}:benchmarks/{one[0]}").returncode] == []


def test_the_figures_that_comments_name_are_there():
    named = {
        one
        for file in (ROOT / "weft").rglob("*.py")
        for one in re.findall(r"(?<![\w:/])((?:benchmarks|docs)/[\w./+-]+\.(?:json|py|md))", file.read_text())
    }
    assert len(named) > 15 and sorted(one for one in named if not (ROOT / one).exists()) == []


def tree_of(commit):
    """Git's name of weft/ at a commit that HEAD descends from; empty for others, which a clone lacks."""
    if git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return ""
    return git("rev-parse", "--verify", "--quiet", f"{commit}:weft").stdout.strip()
