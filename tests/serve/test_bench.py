"""`weft bench serve` measures a server, and says what it could not measure."""

import json
import statistics

import pytest
from typer.testing import CliRunner

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
