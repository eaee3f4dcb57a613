"""A process of `weft serve` answers OpenAI's client: chat, streams, tools, structured answers, and a mix of all."""

import asyncio
import re
import subprocess
import sys
import threading

import pytest

from scripts import clients
from tests.limits import ANSWER
from tests.serve import talking


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Of a server with the model of `talking` on two virtual ranks."""
    directory = talking.write(tmp_path_factory.mktemp("clients") / "adder")
    flags = ["--port", "0", "--world-size", "2", "--max-batch", "8", "--device", "sim", "--mode", "reference"]
    command = [sys.executable, "-m", "weft", "serve", str(directory), "--served-model-name", "adder", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        ending = threading.Timer(ANSWER, process.kill)
        ending.start()
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"at (http://\S+/v1)", line):
                break
        else:
            pytest.fail("".join(lines))
        ending.cancel()
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found[1]
        process.terminate()
        assert process.wait(timeout=ANSWER) == 0


@pytest.mark.slow
def test_a_loop_of_five_forced_calls_ends_by_a_streamed_sum(url):
    assert re.fullmatch(r"(\d\+\d= ?){5}\d{1,2}", clients.by_openai(url))


@pytest.mark.slow
def test_a_mix_of_requests_gets_its_answers(url):
    assert asyncio.run(clients.soak(url, 20)).count("4 ") == 5


@pytest.mark.sweep
def test_a_soak_of_two_thousand_requests(url):
    asyncio.run(clients.soak(url, 2000))
