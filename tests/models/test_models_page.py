"""The page of models: its table is complete, and its example runs."""

import json
import re

from tests.documents import ROOT, follow
from weft.models.config import DecoderConfig
from weft.models.families import FAMILIES, PUBLISHED

PAGE = ROOT / "docs" / "models.md"


def test_the_table_has_all_families_and_sizes():
    rows = re.findall(r"^\| `weft/models/(\w+)\.py` \| `(\w+)` \|.*\|(.*)\|$", PAGE.read_text(), flags=re.MULTILINE)
    assert {model_type: re.findall(r"`([^`]+)`", sizes) for _, model_type, sizes in rows} == {
        name: [*family.published] for name, family in FAMILIES.items()
    }


def test_a_checkpoint_with_the_line_of_the_page_has_yarn():
    [line] = re.findall(r'^    ("rope_scaling": .*)$', PAGE.read_text(), flags=re.MULTILINE)
    content = PUBLISHED["qwen3-32b"] | json.loads(f"{{{line}}}")
    assert DecoderConfig.from_dict(content).max_position_embeddings == 131072


def test_the_example_runs(tmp_path):
    follow(PAGE, tmp_path)
