"""docs/weft-or.md: its times stand in results, its counts are the code's, and each section has both sides, and a date."""

import json
import re

from benchmarks.pictures.engines import LAB
from tests.documents import ROOT
from weft.models.families import FAMILIES

PAGE = " ".join((ROOT / "docs" / "weft-or.md").read_text().split("\n"))


def times(engine: str) -> set[tuple]:
    """(folder, model, form of weights, prompts, tokens, version, ms a token) of all rows of an engine on two GPUs."""
    reports = [(file.parent.name, json.loads(file.read_text())) for file in LAB.glob("h200-x2-*/*.json")]
    return {
        (folder, report["model"], report.get("quantization"), row["prompts"], row["tokens"])
        + (report["version"], f"{row['per_token_ms']:.2f}")
        for folder, report in reports
        if isinstance(report, dict) and report.get("engine") == engine
        for row in report["rows"]
    }


def test_times_beside_vllm_are_rows_of_one_folder():
    pairs = re.findall(r"([\d.]+) ms a token beside ([\d.]+) of vLLM (\d+\.\d+\.\d+)", PAGE)
    rows = {
        (ours[-1], other[-1], other[-2]) for ours in times("weft") for other in times("vllm") if ours[:5] == other[:5]
    }
    assert len(pairs) >= 3 and {*pairs} <= rows


def test_the_number_of_families_is_that_of_the_code():
    assert f"[{len(FAMILIES)} families](models.md)" in PAGE


def test_each_section_has_both_sides_and_a_date():
    sections = PAGE.split("## ")[1:-1]  # without the last one, of what weft cannot say
    assert len(sections) == 6
    for section in sections:
        assert re.search(r"Take (it|them|NVSHMEM)\b", section) and "Take weft " in section, section[:30]
        assert re.search(r"2026-\d\d", section), section[:30]
