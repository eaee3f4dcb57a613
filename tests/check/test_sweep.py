"""The command that checks all ops: it goes on where its file ends."""

import argparse
import json
import sys

from tests.check import sweep


def swept(monkeypatch, file, *flags):
    """(exit status, rows of the file) of a sweep of barriers over two nodes."""
    command = ["sweep", "--op", "barrier", "--node-size", "1", "--world-size", "2", "--json", str(file), *flags]
    monkeypatch.setattr(sys, "argv", command)
    return sweep.command(), json.loads(file.read_text())["swept"]


def test_a_sweep_goes_on_where_its_file_ends(tmp_path, monkeypatch, capsys):
    file = tmp_path / "sweep.json"
    status, [row] = swept(monkeypatch, file, "--schedules", "2", "--resume")
    assert status == 0 and (row["op"], row["node_size"], row["schedules"]) == ("barrier", 1, 2)
    assert swept(monkeypatch, file, "--schedules", "2", "--resume") == (0, [row])
    assert capsys.readouterr().out.endswith("0 calls, 0 schedules, 0 with findings, 0 not complete\n")
    _, [longer] = swept(monkeypatch, file, "--schedules", "3", "--resume")
    assert longer["schedules"] == 3 and longer["seconds"] >= row["seconds"]  # the third alone was run
    _, [unchanged] = swept(monkeypatch, file, "--schedules", "9", "--resume", "--seconds", "0")
    assert unchanged == longer
    _, [several] = swept(monkeypatch, file, "--schedules", "25", "--resume")
    assert (several["schedules"], several["findings"]) == (25, [])
    file.write_text(json.dumps({"swept": [{**longer, "revision": f"0 ({several['revision'].rpartition('(')[2]}"}]}))
    _, [begun] = swept(monkeypatch, file, "--schedules", "4", "--resume")
    assert begun["schedules"] == 4 and begun["revision"].startswith("0 (")  # the same sources: begun there
    # Rows of other sources are kept if they suffice, and replaced by longer ones.
    file.write_text(json.dumps({"swept": [{**longer, "schedules": 4, "revision": "0 (weft/ 0)"}]}))
    _, [kept] = swept(monkeypatch, file, "--schedules", "4", "--resume")
    _, [anew] = swept(monkeypatch, file, "--schedules", "5", "--resume")
    assert kept["revision"] == "0 (weft/ 0)" and (anew["revision"], anew["schedules"]) == (row["revision"], 5)
    file.write_text(json.dumps({"swept": [{**longer, "findings": ["race"]}, {**longer, "op": "another"}]}))
    _, [again, kept] = swept(monkeypatch, file, "--schedules", "2", "--resume")
    assert (again["op"], again["schedules"], again["findings"], kept["op"]) == ("barrier", 2, [], "another")


def test_goals_name_calls_that_exist():
    for goal in sweep.GOALS:
        names = [call.name for call in sweep.calls(False, goal.world_size, goal.node_size)]
        for prefix in goal.prefixes:
            assert any(name.startswith(prefix) for name in names), f"{goal} has no call for {prefix}"


def test_calls_of_one_goal_advance_together_and_begun_ones_go_on():
    chosen = argparse.Namespace(goals=True, table=False, op="barrier,all_gather", seed=0)
    begun = {("barrier", 4, 2): sweep.Swept("barrier", 4, 2, "", schedules=490)}
    found = [share for share in sweep.shares(chosen, begun) if (share.world_size, share.node_size) == (4, 2)]
    assert [share.seed for share in found] == sorted(share.seed for share in found)
    assert [(share.seed, share.schedules) for share in found if share.key[0] == "barrier"] == [(490, 10)]
    assert sum(share.schedules for share in found if share.key[0] == "all_gather") == 500
