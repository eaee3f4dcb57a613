"""`weft bench serve` measures a server, and says what it could not measure."""

import asyncio
import http.server
import json
import re
import statistics
import threading
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from weft.bench.serving import client, points
from weft.bench.serving.command import _without
from weft.cli import app
from weft.console import api_key_of
from weft.runtime.files import text_of


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])


def test_open_and_closed_loops_are_measured_and_written(served, tmp_path):
    out, prompts = tmp_path / "found.json", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "12+3=", "max_tokens": 4}\n{"prompt": [1, 2]}\n')
    url = ("--url", f"{served.url}/v1", "--requests", 6, "--warmup", 2, "--output-tokens", 3, "--json", out)
    result = bench(*url, "--rates", "200,inf", "--concurrency", "2", "--input-tokens", "2-5", "--vocab-size", 12)
    assert result.exit_code == 0, result.output
    points = json.loads(out.read_text())["points"]
    assert [(point["rate"], point["concurrency"]) for point in points] == [(200, None), ("inf", None), (None, 2)]
    for point in points:
        assert point["completed"] == 6 and point["tokens"] == 18 and 12 <= point["prompt_tokens"] <= 30
        assert 0 < point["ttft"]["p50"] <= point["ttft"]["p99"] < point["e2e"]["p99"]
    assert bench(*url, "--file", prompts, "--concurrency", 3).exit_code == 0
    assert json.loads(out.read_text())["points"][0]["tokens"] == 3 * 4 + 3 * 3


def test_a_file_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(points, "text_of", lambda file: text_of(file, 20))
    result = bench("--file", "/dev/zero")
    assert result.exit_code == 2
    assert result.stderr.startswith("weft: --file /dev/zero cannot be read: it holds more than 20 bytes; pass a file")


def test_mistakes_and_refusals_are_one_line(served):
    url = ("--url", f"{served.url}/v1")
    for arguments, message in [
        (("--url", "http://127.0.0.1:9/v1"), "; start weft serve there, or pass another --url"),
        ((*url, "--rates", "0"), "--rates 0 is not a positive number"),
        ((*url, "--input-tokens", "9-3"), "--input-tokens 9-3 is not a number of tokens"),
        (
            (*url, "--file", "x", "--vocab-size", "1000"),
            "--vocab-size is of random prompts, and --file x names prompts",
        ),
        ((*url, "--model", "x"), "none of 8 requests was answered; the first: ValueError: status 404"),
    ]:
        result = bench(*arguments)
        assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]


LISTS = {
    "empty": (200, b'{"object": "list", "data": []}', "its list of models is empty; pass --model"),
    "html": (200, b"<html>", "no list of models of OpenAI's API; pass the URL up to /v1"),
    "other": (200, b"[1]", "no list of models"),
    "numbers": (200, b'{"data": [{"id": 1}]}', "no list of models"),
    "deep": (200, b"[" * 100_000, "no list of models"),
    "key": (401, b'{"error": {}}', "status 401 for its list of models; pass the server's key by --api-key-file"),
    "path": (404, b"Not Found", "status 404 for its list of models; pass the URL up to /v1"),
    "moved": (307, b"", "status 307 for its list of models"),
    "broken": (500, b"", "status 500 for its list of models; see the server's log"),
    "leaves": (0, b"", "no list of models comes from it"),
}
# Ends of a stream, and what a request says of it.
STREAMS = {
    "usage": (b'data: {"usage": {"completion_tokens": 1}}\n\n', "the stream ended without its usage"),
    "text": (b'data: {"usage": {"prompt_tokens": "1", "completion_tokens": "1"}}\n\n', "without its usage"),
    "nested": (b"data: {" + b'"a":[' * 50_000 + b"\n\n", "the first: "),
    "html": (b"<html>", "the stream ended without its usage"),
}


# Lines that end otherwise than weft's, no blank after the colon, and the usage beside the last token.
CRLF = (
    b'data:{"choices": [{"text": "ab"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\r\n\r\n'
    b"data: [DONE]\r\n\r\n"
)


class Foreign(http.server.BaseHTTPRequestHandler):
    """A server that is none of OpenAI's API; its paths say how."""

    def do_GET(self):
        self.answer(*LISTS.get(self.path.split("/")[1], LISTS["empty"])[:2])

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, STREAMS.get(self.path.split("/")[1], [CRLF])[0])

    def answer(self, status, body):
        if status:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *given):
        pass


def test_events_may_end_in_carriage_returns(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as foreign:
        threading.Thread(target=foreign.serve_forever, daemon=True).start()
        url, file = f"http://127.0.0.1:{foreign.server_port}/crlf", tmp_path / "x.json"
        # More clients than requests: one is enough.
        flags = "--requests", 1, "--warmup", 0, "--concurrency", 4, "--clients", 2, "--json", file
        result = bench("--url", url, "--model", "m", *flags)
        assert result.exit_code == 0, result.output
        [point] = json.loads(file.read_text())["points"]
        assert point["failed"] == 0 and point["tokens"] == 2 and point["e2e"]["p50"] > 0
        foreign.shutdown()


def test_servers_that_are_none_of_openais_api_are_one_line():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as foreign:
        threading.Thread(target=foreign.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{foreign.server_port}"
        cases = [(("--url", f"{url}/{name}"), said) for name, (_, _, said) in LISTS.items()]
        cases += [(("--url", f"{url}/{name}", "--model", "m"), said) for name, (_, said) in STREAMS.items()]
        cases += [(("--url", one), "is no URL of a server") for one in ("localhost:8000/v1", "http://[::1/v1", "x")]
        for arguments, said in cases:
            result = bench(*arguments, "--requests", 1, "--warmup", 0, "--concurrency", 1)
            [line] = result.stderr.splitlines()[-1:]
            assert result.exit_code == 2 and said in line and line.startswith("weft: "), (arguments, result.stderr)
        foreign.shutdown()


def test_a_key_comes_from_a_flag_a_file_or_the_environment_and_is_in_no_output(tmp_path, monkeypatch):
    (file := tmp_path / "key").write_text("from a file\n")
    (bad := tmp_path / "bad").write_text("two\nlines")
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    assert api_key_of(None, None) is None
    monkeypatch.setenv("WEFT_API_KEY", "from the environment")
    assert api_key_of(None, None) == "from the environment"
    assert api_key_of("flag", None) == "flag" and api_key_of(None, file) == "from a file"
    for key, path, said in [
        ("", None, "--api-key is no key: it is empty"),
        (" secret", None, "--api-key is no key"),
        ("secret", file, f"--api-key and --api-key-file {file} are both given; leave one out"),
        (None, bad, f"--api-key-file {bad} is no key"),
        (None, tmp_path, "cannot be read"),
        (None, Path("/dev/zero"), "holds more than 4,096 characters"),
    ]:
        with pytest.raises(ValueError, match=re.escape(said)) as caught:
            api_key_of(key, path)
        assert "secret" not in str(caught.value) and "lines" not in str(caught.value)
    monkeypatch.setenv("WEFT_API_KEY", "")  # as of a secret that was not found: no server without a key
    for command in (["serve"], ["bench", "serve"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2 and "WEFT_API_KEY in the environment is no key: it is empty" in result.stderr
    assert _without("sec", ["--api-key", "sec", "--api-key=sec"]) == ["--api-key", "KEY", "--api-key=KEY"]


def test_arrivals_are_a_poisson_process_and_percentiles_are_values():
    from weft.bench.serving.client import Answered, Ask
    from weft.bench.serving.points import Load, summed, timed

    asks = timed([Ask(prompt=[1], tokens=1)] * 2000, 50, 0)
    gaps = [later.at - earlier.at for earlier, later in zip(asks, asks[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1) and asks[0].at == 0
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)
    answers = [Answered(sent=n, first=n + 1, last=n + 1 + n * 2, tokens=3, prompt_tokens=5) for n in range(1, 101)]
    found = summed(Load(rate=1), [*answers, Answered(sent=0, error="gone")], 0.5)
    assert (found.completed, found.failed, found.error, found.tokens) == (100, 1, "gone", 300)
    assert found.tpot == {"mean": 50_500, "p50": 51_000, "p99": 100_000} and found.ttft["p99"] == 1000


def test_a_client_asks_for_something_else_first_and_sends_no_request_before_the_start(monkeypatch):
    log = []

    async def get(http, path):
        log.append(path)
        raise httpx.ConnectError("no list of models")

    async def answer(http, model, ask):
        log.append(ask.prompt)
        return time.monotonic(), time.monotonic(), {"prompt_tokens": 1, "completion_tokens": 1}

    monkeypatch.setattr(httpx.AsyncClient, "get", get)
    monkeypatch.setattr(client, "_answer", answer)
    asks, target = [client.Ask(prompt=[one], tokens=1) for one in range(3)], client.Target(url="http://x/v1", model="m")
    for concurrency in (2, None):
        start = time.monotonic() + 0.05
        answers, busy = asyncio.run(client.run(target, asks, concurrency, start))
        assert log == ["/models", [0], [1], [2]] and 0 <= busy < 1
        assert [one.error for one in answers] == [None] * 3 and all(one.sent >= 0 for one in answers)
        log.clear()
