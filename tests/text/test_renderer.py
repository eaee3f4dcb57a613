"""A chat template that loops, eats memory or writes for ever is ended in time, and the next one is rendered all the same."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from tests.limits import ANSWER
from weft.errors import WeftError
from weft.runtime import limited_process
from weft.text import chat as module
from weft.text.chat import ChatTemplate, Renderer, RenderError, as_json

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def renderer():
    made = Renderer(seconds=0.5, characters=10_000, memory=256 << 20)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (LOOP, "it does not end within 0.5 s"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ('x' * x) | length }}", "MemoryError"),
        ("{{ 'x' * 10001 }}", "it writes more than 10,000 characters"),
        ("{% for a in range(1001) %}{{ '%010d' % a }}{% endfor %}", "it writes more than 10,000 characters"),
        ("{{ '(' * 9 }}" + "{{ " + "(" * 100_000 + ")" * 100_000 + " }}", ""),
    ],
    ids=["loop", "recursion", "memory", "piece", "pieces", "nesting"],
)
def test_what_does_not_end_well_is_refused_in_time(renderer, source, said):
    started = time.monotonic()
    with pytest.raises(RenderError) as caught:
        renderer.render(source, {"x": 1 << 30})
    assert time.monotonic() - started < 10
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert renderer.render("fine: {{ x }}", {"x": "ä\ud800\n"}) == "fine: ä\ud800\n"


def test_a_chat_with_a_template_that_loops_is_one_line(tmp_path, renderer):
    (tmp_path / "chat_template.jinja").write_text(LOOP)
    with pytest.raises(ValueError, match="^the chat template fails on these messages: it does not end within 0.5 s$"):
        ChatTemplate(tmp_path, renderer).render([{"role": "user", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_text("{{ 'x' * 10**9 }}")
    with pytest.raises(ValueError, match="^the chat template fails on these messages: MemoryError$"):
        ChatTemplate(tmp_path, renderer).render([])


def test_one_process_renders_all_and_an_interrupt_does_not_mix_up_answers(renderer, monkeypatch):
    renderer.render("x", {})
    process = renderer._process
    for number in (signal.SIGINT, signal.SIGTERM):  # which reach all processes of a group; the parent ends this one
        os.kill(process.process.pid, number)
    started = time.monotonic()
    assert [renderer.render("{{ n }}", {"n": n}) for n in range(50)] == [str(n) for n in range(50)]
    assert renderer._process is process and time.monotonic() - started < 2

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(limited_process.os, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            renderer.render("old", {})
    assert renderer.render("new", {}) == "new"


def test_the_process_ends_with_its_renderer_and_with_this_process():
    made = Renderer()
    made.compile("x")
    process, end = made._process.process, made._process.end
    assert end.atexit and process.poll() is None
    del made
    gc.collect()
    assert process.poll() is not None


def test_a_process_that_has_lost_its_parent_ends():
    for request, status in (
        ([], 0),
        ([{"source": LOOP, "variables": {}, "seconds": -0.9, "characters": 1}], -signal.SIGALRM),
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", str(limited_process._MAIN), str(module._WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for message in ({"path": sys.path, "memory": 1 << 30}, *request):
            process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.close()
        assert process.wait(ANSWER) == status


def test_the_process_neither_takes_this_folders_modules_nor_writes_files(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(f'{__file__} was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Renderer()
    assert made.render("ok", {}) == "ok"
    assert "Max file size             0 " in Path(f"/proc/{made._process.process.pid}/limits").read_text()
    made.close()


def test_a_process_that_does_not_start_is_said(monkeypatch):
    monkeypatch.setattr(limited_process.sys, "path", [])
    with pytest.raises(WeftError, match="the process of untrusted.py does not start"):
        Renderer().render("x", {})


def test_values_that_json_cannot_hold_are_refused_by_their_place():
    assert as_json("x", {"a": (1, numpy.int64(2), [numpy.float32(0.5), None, True])}) == {
        "a": [1, 2, [0.5, None, True]]
    }
    for value, said in (
        ({"a": [{1}]}, r"variables\['a'\]\[0\] is a set, which chat templates do not get"),
        ({1: 2}, r"variables has the key 1, which is not text"),
        ([[os]], r"variables\[0\]\[0\] is a module"),
    ):
        with pytest.raises(ValueError, match=said):
            as_json("variables", value)
