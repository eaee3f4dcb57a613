"""Warm-ups say a line for each tenth of their graphs: on stderr by commands, to the logger by LLM."""

import logging

from weft.cli.engine_flags import starting
from weft.engine.config import every_tenth, watchers_of
from weft.runtime import logs


def test_commands_without_a_terminal_say_ten_lines(capsys):
    logs.show(0)
    try:
        with starting(True) as watchers:
            for captured in range(1, 130):
                watchers["warm_up_progress"](captured, 129)
    finally:
        logs.hide()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and lines[-1] == "captured 129 of 129 CUDA graphs"


def test_few_graphs_have_a_line_each():
    lines = []
    for captured in (1, 2, 3):
        every_tenth(lines.append)(captured, 3)
    assert lines == [f"captured {captured} of 3 CUDA graphs" for captured in (1, 2, 3)]


def test_what_is_not_watched_is_logged(caplog):
    watchers, seen = watchers_of(None, None), []
    assert list(watchers) == ["warm_up_progress"]
    with caplog.at_level(logging.INFO, "weft.engine"):
        watchers["warm_up_progress"](2, 10)
    assert caplog.messages == ["captured 2 of 10 CUDA graphs"]
    watchers_of(None, lambda *counts: seen.append(counts))["warm_up_progress"](2, 10)
    assert seen == [(2, 10)]
