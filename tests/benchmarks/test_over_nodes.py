"""The model of GEMMs over nodes, and its tables in docs/nodes.md."""

import pytest

from benchmarks.over_nodes import (
    BATCHES,
    LATENCY,
    LIMITS,
    NODES,
    SHAPES,
    in_flight,
    modelled,
    staged,
    tables,
)
from benchmarks.pages import DOCS, with_tables
from weft.engine.graphs import pays


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


def test_a_microbatch_crosses_once_and_stages_follow_each_other():
    weights = 8192 * (8192 + 2 * 1024 + 8192 + 3 * 28672)
    prompt, decode = staged(8192, True, 4), staged(64, False, 2)
    assert (prompt.microbatches, decode.microbatches) == (4, 1)
    assert prompt.rails == pytest.approx([1e6 * (LATENCY + 2 * 2048 * 8192 / 8 / rate) for rate in (50e9, 100e9)])
    assert prompt.layers == pytest.approx(1e6 * 20 * 2 * 2048 * weights / 8 / LIMITS.flops)
    assert prompt.whole == pytest.approx(7 * (prompt.layers + 2 * prompt.rails[0]))
    assert decode.layers == pytest.approx(1e6 * 40 * 2 * weights / 8 / LIMITS.memory)
    assert decode.whole == pytest.approx(2 * (decode.layers + 2 * decode.rails[0]))


def test_groups_without_a_gap_save_reads_and_no_weights():
    times, few = in_flight(64, 32768, 2), in_flight(64, 1, 2)
    assert times.weights == pytest.approx(staged(64, False, 2).layers)
    assert times.reads == pytest.approx(1e6 * 64 * 32768 * 2 * 2 * 128 * 40 / LIMITS.memory)
    crossing = 1e6 * (LATENCY + 2 * 64 * 1024 / 50e9)
    assert times.one_pass - times.groups == pytest.approx(times.reads - 2 * crossing)
    assert times.groups < times.one_pass and few.groups > few.one_pass
    # Cutting one pass pays once reads take longer than 2 weights, but for its crossings.
    saved = times.one_pass - times.cut
    assert saved == pytest.approx(times.reads / 2 - times.weights - 4 * crossing)

    # The engine takes what the table says is less.
    for sequences, cached in BATCHES:
        for nodes in NODES:
            times = in_flight(sequences, cached, nodes)
            read, weights = (int(us * 1e-6 * LIMITS.memory) for us in (times.reads, times.weights))
            assert pays(nodes, read, weights) == (times.groups < times.one_pass), (sequences, cached, nodes)


def test_the_page_has_the_tables_of_today():
    text = (DOCS / "nodes.md").read_text()
    assert with_tables(text, {"over_nodes": "\n".join(tables())}) == text, "run: python -m benchmarks.over_nodes"
