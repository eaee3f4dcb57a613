"""The command that checks all ops: it goes on where its file ends."""

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
    assert capsys.readouterr().out.endswith("0 calls, 0 schedules, 0 with findings\n")
    _, [longer] = swept(monkeypatch, file, "--schedules", "3", "--resume")
    assert longer["schedules"] == 3
    file.write_text(json.dumps({"swept": [{**longer, "findings": ["race"]}, {**longer, "op": "another"}]}))
    _, [again, kept] = swept(monkeypatch, file, "--schedules", "2", "--resume")
    assert (again["op"], again["schedules"], again["findings"], kept["op"]) == ("barrier", 2, [], "another")
