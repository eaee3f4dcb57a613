"""The model of decode attention over 1 to 32 GPUs."""

from dataclasses import replace

import pytest

from benchmarks import sharded_decode as model
from benchmarks.sharded_decode import Shape, modelled
from tests.bench import canned
from weft.bench.harness import report

LONG = Shape(1, 32, 4, 128, 1 << 20)


def test_a_rank_reads_its_share_and_the_exchange_is_a_measured_one():
    measured = model.exchanges(model.RESULTS)
    whole = 2 * (1 << 20) * 4 * 128 * 2 / 4.3e12 * 1e6
    assert modelled(LONG, 1, measured) == pytest.approx(whole)
    # 16 heads of 129 fp32 numbers to each of two ranks: the all-to-all of 64 KiB.
    of_64_kib = dict(measured[2])[64 << 10]
    assert modelled(LONG, 2, measured) == pytest.approx(whole / 2 + of_64_kib)
    # Two nodes: the rails take longer than the node's links.
    far = 5.0 + 8 * 2 * 129 * 4 / 50e9 * 1e6
    assert modelled(LONG, 16, measured) == pytest.approx(whole / 16 + far)


def test_measurements_are_shown_with_the_error_of_the_model(tmp_path):
    assert "No row of the op has been measured yet" in model.section(tmp_path)
    one = canned.all_reduce()
    row = replace(one.rows[0], shape=(*LONG, 2), provider="weft.auto", role="weft", median_us=300.0, chain_us=277.0)
    made = replace(one, op=model.OP, world_size=2, rows=[row])
    report.write(tmp_path / "h200-x2" / f"{model.OP}.w2.json", [made])
    assert "| 4 KV heads x 128, 1M, batch 1 | 2 | 277.0 | 251.8 | +10% |" in model.section(tmp_path)
