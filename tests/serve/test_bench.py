"""`weft bench serve` measures a server, and says what it could not measure."""

import asyncio
import json
import statistics
import time

import httpx
import pytest
from typer.testing import CliRunner

from weft.bench.serving import client
from weft.cli import app


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


def test_mistakes_and_refusals_are_one_line(served):
    url = ("--url", f"{served.url}/v1")
    for arguments, message in [
        (("--url", "http://127.0.0.1:9/v1"), "no list of models comes from it"),
        ((*url, "--rates", "0"), "--rates 0 is not a positive number"),
        ((*url, "--input-tokens", "9-3"), "--input-tokens 9-3 is not a number of tokens"),
        ((*url, "--model", "x"), "none of 8 requests was answered; the first: ValueError: status 404"),
    ]:
        result = bench(*arguments)
        assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]


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
