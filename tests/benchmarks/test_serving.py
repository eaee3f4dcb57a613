"""benchmarks/serving.py: two servers one after the other, both ended whatever happens, and the table of their figures."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import weft
from benchmarks import serving
from tests.limits import ANSWER
from weft.bench.harness.machine import revision

# A server without torch, and a process below it that never ends by itself.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
print("child", child.pid, flush=True)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(STATUS)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""


def server(name, status=200):
    return serving.Server(name=name, command=[sys.executable, "-c", SERVER.replace("STATUS", str(status))])


def child_of(log):
    return int(log.read_text().split()[1])


def has_ended(pid):
    deadline = time.monotonic() + ANSWER
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        return True
    return False


def test_servers_run_one_after_the_other_and_leave_nothing(tmp_path, monkeypatch, capsys):
    driven = []

    def drive(one, url, load, out):
        assert serving.is_ready(url.replace("/v1", "/health"))
        assert all(has_ended(child_of(tmp_path / f"{name}.log")) for name in driven)
        driven.append(one.name)
        return {"points": []}

    monkeypatch.setattr(serving, "drive", drive)
    assert list(serving.run([server("weft"), server("vllm")], [], tmp_path)) == ["weft", "vllm"]
    assert has_ended(child_of(tmp_path / "vllm.log")) and "vllm: ready after" in capsys.readouterr().out


def test_a_server_that_fails_is_an_error_with_its_log_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "READY_SECONDS", 0.5)
    with pytest.raises(SystemExit, match="vllm was not ready after 0 s; the end of its log:\nchild "):
        serving.run([server("vllm", 503)], [], tmp_path)
    assert has_ended(child_of(tmp_path / "vllm.log"))
    falls = serving.Server(name="vllm", command=[sys.executable, "-c", "raise SystemExit('no GPU')"])
    with pytest.raises(SystemExit, match="vllm ended with status 1 before it was ready; the end of its log:\nno GPU"):
        serving.run([falls], [], tmp_path)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "READY_SECONDS", 30)
    monkeypatch.setattr(serving, "drive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serving.run([server("weft")], [], tmp_path)
    assert has_ended(child_of(tmp_path / "weft.log"))


def test_servers_run_with_packages_of_archives():
    chosen = SimpleNamespace(
        model="qwen3-30b-a3b", world_size=2, max_length=64, max_sequences=8, archives="a/vllm.tar.xz,a/sglang.tar.xz",
        quantization="fp8", vllm_python=None,
    )  # fmt: skip
    packages = ["bash", "benchmarks/engine_packages.sh"]
    vllm, sglang = serving.vllm_server(chosen), serving.sglang_server(chosen)
    assert vllm.command[:6] == [*packages, "vllm", chosen.archives, sys.executable, "-m"]
    assert sglang.command[:7] == [*packages, "sglang", chosen.archives, sys.executable, "-m", "sglang.launch_server"]
    option = sglang.command.index("--flashinfer-allreduce-fusion-backend")
    assert sglang.command[option + 1] == "trtllm"
    folder = Path(sglang.command[sglang.command.index("--model-path") + 1])
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == 151_936


def test_packages_come_from_the_archives_of_an_engine(tmp_path):
    """The order of two archives of one engine, and the variables, by a stand-in for what unpacks them."""
    script = f"""
        . {serving.ROOT}/benchmarks/engine_packages.sh
        archives=x/vllm2.tar.xz,x/vllm-flashinfer.tar.xz,x/sglang.tar.xz
        archives_of vllm
        with_packages vllm printenv PYTHONPATH VLLM_FLASHINFER_ALLREDUCE_BACKEND TORCH_SYMM_MEM_DISABLE_MULTICAST"""
    lines = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True
    ).stdout.split()
    assert lines[:2] == ["x/vllm2.tar.xz", "x/vllm-flashinfer.tar.xz"]
    assert lines[2].startswith(f"{tmp_path}:/tmp/vllm-site:") and lines[3:] == ["trtllm", "1"]


def test_a_load_that_takes_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "LOAD_SECONDS", 0.1)
    (tmp_path / "weft.log").write_text("slow\n")
    with pytest.raises(SystemExit, match="weft: its load was not over after 0 s; the end of its log:\nslow"):
        serving.drive(server("weft"), "http://127.0.0.1:9/v1", [], tmp_path)


def test_records_hold_no_folders_of_the_machine(tmp_path, monkeypatch):
    target = tmp_path / "weft.json"

    def client(command, environment):
        assert command[-1] == str(target)
        record = {"command": f"weft bench serve --json {target}", "points": []}
        return serving_nothing(lambda: target.write_text(json.dumps(record)))

    @contextmanager
    def serving_nothing(write):
        yield SimpleNamespace(wait=lambda timeout: write() * 0)

    monkeypatch.setattr(serving, "started", client)
    one = serving.Server(name="weft", command=["/opt/bin/python", "-m", "weft", "serve", "/tmp/x/model"])
    report = serving.drive(one, "http://127.0.0.1:9/v1", [], tmp_path)
    assert report == json.loads(target.read_text()) == {
        "command": "weft bench serve --json weft.json", "points": [], "environment": {},
        "server": ["python", "-m", "weft", "serve", "model"], "revision": revision(Path(weft.__file__).parent),
    }  # fmt: skip


def point(ttft, tpot, throughput, rate=None, failed=0):
    spread = {"p50": ttft, "p99": 2 * ttft}
    return {
        "rate": rate, "concurrency": None if rate else 4, "failed": failed, "ttft": spread, "tokens_per_second": throughput,
        "tpot": {"p50": tpot, "p99": 2 * tpot} if tpot else {},
    }  # fmt: skip


def test_the_table_marks_what_is_lost_and_what_failed():
    ours = {"points": [point(10, 2, 100), point(10, 2, 90, rate=4, failed=3), point(1, 1, 1, rate="inf")]}
    other = {"points": [point(15, 1, 90), point(10, None, 100, rate=4)]}
    lines = serving.table({"weft": ours, "vllm": other}).splitlines()
    assert lines[0] == "| load | figure | weft | vllm | weft to vllm |"
    assert "| 4 at a time | first token p50, ms | 10.00 | 15.00 | 1.50 x |" in lines
    assert "| 4 at a time | per token p99, ms | 4.00 | 2.00 | 0.50 x, lost |" in lines
    assert "| 4 a second | requests of weft that failed: 3 | | | |" in lines
    assert "| 4 a second | throughput, tokens/s | 90.00 | 100.00 | 0.90 x, lost |" in lines
    assert "| 4 a second | per token p50, ms | 2.00 | none | not measured |" in lines
    assert "| inf a second | per token p50, ms | 1.00 | not measured | not measured |" in lines


@pytest.mark.sweep
def test_two_servers_of_the_built_in_model(tmp_path):
    model = ["serve", "--device", "sim", "--world-size", "1", "--mode", "reference"]
    servers = [serving.Server(name=name, command=[sys.executable, "-m", "weft", *model]) for name in ("weft", "other")]
    load = ["--requests", "4", "--warmup", "1", "--input-tokens", "4", "--output-tokens", "3", "--vocab-size", "12"]
    reports = serving.run(servers, [*load, "--concurrency", "2", "--rates", "inf"], tmp_path)
    assert [one["completed"] for report in reports.values() for one in report["points"]] == [4] * 4
    record = json.loads((tmp_path / "other.json").read_text())
    assert record["server"] == [Path(sys.executable).name, *servers[1].command[1:]]
    assert record["command"].endswith("--rates inf --json other.json")
    command = [sys.executable, "-m", "benchmarks.serving", "--table", "--out", str(tmp_path), "--servers", "weft"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=serving.ROOT, env=dict(os.environ))
    assert "| 2 at a time | throughput, tokens/s |" in found.stdout, found.stderr
