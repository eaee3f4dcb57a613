"""docs/moe.md: its files run and print what the page shows."""

import pytest

from tests.documents import ROOT, blocks, check_output, run, turns, write


def test_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "moe.md"
    for block in blocks(page):
        if block.language == "python":
            write(block, tmp_path, None)
        for command, expected in turns(block) if block.language == "console" else ():
            check_output(f"{page.name}:{block.line}: {command}", expected, run(command))
