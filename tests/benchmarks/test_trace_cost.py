"""benchmarks/trace_cost.py: times of both sides of a trace."""

import json

import weft
from benchmarks import trace_cost


def test_calls_are_timed_on_both_sides_of_a_trace(tmp_path):
    results = weft.launch(trace_cost.main, 2, "sim", args=(["all-reduce"], tmp_path / "trace.json"))
    eager, graph = results[0]
    assert eager["what"] == "all-reduce, 1 KiB, eager" and eager["untraced"]["us"] > 0 < eager["traced"]["us"]
    assert (graph["untraced"], graph["traced"]) == (None, None)  # there are no graphs on virtual ranks
    assert json.loads((tmp_path / "trace.json").read_text())["rows"] == [eager, graph]
