"""The model of GEMMs over nodes, and its tables in docs/nodes.md."""

import pytest

from benchmarks.over_nodes import LATENCY, LIMITS, PAGE, SHAPES, modelled, with_tables


def test_a_shard_crosses_once_and_is_spread_in_the_node():
    gather, scatter, reduce = SHAPES
    shard = 2 * 8192 * 8192 // 16
    times = modelled(gather, 2)
    assert times.rails == pytest.approx([1e6 * (LATENCY + shard / rate) for rate in (50e9, 100e9)])
    assert times.node == pytest.approx(1e6 * (LIMITS.latency + 2 * 7 * shard / LIMITS.link))
    assert times.gemm == pytest.approx(1e6 * 2 * 8192 * 57344 * 8192 / 16 / LIMITS.flops)
    assert modelled(scatter, 2).rails == times.rails
    # There and back; a GEMM of few rows takes the time of its weights.
    assert modelled(reduce, 4).rails[0] == pytest.approx(1e6 * (2 * LATENCY + 2 * 3 * 2 * 64 * 8192 / 32 / 50e9))
    assert modelled(reduce, 4).gemm == pytest.approx(1e6 * 2 * 8192 * 28672 / 32 / LIMITS.memory)


def test_the_page_has_the_tables_of_today():
    text = PAGE.read_text()
    assert with_tables(text) == text, "run: python -m benchmarks.over_nodes"
