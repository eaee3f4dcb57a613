"""docs/training.md: its file runs and prints what the page shows."""

from tests.documents import ROOT, blocks, check_output, run, turns, write


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "training.md"
    for block in blocks(page):
        if block.language == "python":
            write(block, tmp_path, None)
        for command, expected in turns(block) if block.language == "console" else ():
            check_output(f"{page.name}:{block.line}: {command}", expected, run(command))
