"""`weft serve`, `vllm serve` and SGLang's server under the same load, one after the other on the same GPUs.

    python -m benchmarks.serving --model qwen3-8b --world-size 1 --out RUNS [--vllm-python ENVIRONMENT/bin/python]
    python -m benchmarks.serving --servers weft,vllm,sglang --archives vllm.tar.xz,sglang.tar.xz --world-size 2 --out RUNS
    python -m benchmarks.serving --table --out RUNS

Each server has random weights of a published model's sizes, the same longest sequence and number of sequences, and else its
own defaults, as its authors recommend it: vLLM with torch.compile and CUDA graphs, and with FlashInfer's sampler where that is
installed; weft with its warm-up. None has a tokenizer but SGLang, whose API sends text alone. `weft bench serve` drives all, by
the same requests: closed loops, then Poisson arrivals. RUNS gets NAME.json and NAME.log of each server, and the table prints
every row, those that weft loses too. --archives are those of benchmarks/engines.sh: packages that are not installed.

A server that ends, that is not ready in time, or whose load is not over in time is an error with the last lines of its log. All
processes of a server are ended before the next begins, also after an error or an interrupt.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import weft
from benchmarks.engines import all_reduce_fusion, config_of, folder_of
from weft.bench.harness.machine import check_clean, revision
from weft.models.families import PUBLISHED
from weft.runtime.files import put

ROOT = Path(__file__).parents[1]
READY_SECONDS, LOAD_SECONDS, END_SECONDS = 900.0, 3600.0, 60.0
# (figure, its unit, whether more is better, its value in a point of `weft bench serve`)
FIGURES: tuple[tuple[str, str, bool, Callable[[dict[str, Any]], float | None]], ...] = (
    ("first token p50", "ms", False, lambda point: point["ttft"].get("p50")),
    ("first token p99", "ms", False, lambda point: point["ttft"].get("p99")),
    ("per token p50", "ms", False, lambda point: point["tpot"].get("p50")),
    ("per token p99", "ms", False, lambda point: point["tpot"].get("p99")),
    ("throughput", "tokens/s", True, lambda point: point["tokens_per_second"]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Server to be measured.

    command  without its port, which is appended
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


def weft_server(chosen: argparse.Namespace) -> Server:
    lengths = ["--max-seq-len", str(chosen.max_length), "--max-batch", str(chosen.max_sequences)]
    model = ["--dummy-weights", "--world-size", str(chosen.world_size), "--device", "cuda"]
    form = ["--quantization", chosen.quantization] if chosen.quantization else []
    return Server(
        name="weft",
        command=[sys.executable, "-m", "weft", "serve", chosen.model, "--no-warm-up-late", *model, *form, *lengths],
    )


def python_of(engine: str, archives: str) -> list[str]:
    """Command of a Python with an engine's packages from archives."""
    return ["bash", "benchmarks/engine_packages.sh", engine, archives, sys.executable]


def vllm_server(chosen: argparse.Namespace) -> Server:
    python, environment = [chosen.vllm_python], {"HF_HUB_OFFLINE": "1"}
    if chosen.archives:
        python = python_of("vllm", chosen.archives)
    else:
        flashinfer = subprocess.run([*python, "-c", "import flashinfer.sampling"], capture_output=True, timeout=300)
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = str(int(flashinfer.returncode == 0))
    model = ["--load-format", "dummy", "--skip-tokenizer-init", "--tensor-parallel-size", str(chosen.world_size)]
    lengths = ["--max-model-len", str(chosen.max_length), "--max-num-seqs", str(chosen.max_sequences)]
    folder = str(folder_of(chosen.model, chosen.quantization))
    command = [*python, "-m", "vllm.entrypoints.cli.main", "serve", folder, *model, *lengths]
    return Server(name="vllm", command=[*command, "--served-model-name", chosen.model], environment=environment)


def sglang_server(chosen: argparse.Namespace) -> Server:
    folder = folder_of(chosen.model, chosen.quantization)
    add_tokenizer(folder)
    python = python_of("sglang", chosen.archives or "-")
    model = ["--model-path", str(folder), "--load-format", "dummy", "--tp-size", str(chosen.world_size)]
    lengths = ["--context-length", str(chosen.max_length), "--max-running-requests", str(chosen.max_sequences)]
    fusion = all_reduce_fusion(config_of(chosen.model), chosen.world_size)
    options = [part for name, value in fusion.items() for part in (f"--{name.replace('_', '-')}", value)]
    command = [*python, "-m", "sglang.launch_server", *model, *lengths, *options, "--served-model-name", chosen.model]
    return Server(name="sglang", command=command)


def add_tokenizer(folder: Path) -> None:
    """A tokenizer for each id of a model with config.json alone."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    config = json.loads((folder / "config.json").read_text())
    size = config.get("text_config", config)["vocab_size"]
    vocabulary = {f"t{number}": number for number in range(size)}
    put(folder / "tokenizer.json", Tokenizer(WordLevel(vocabulary, unk_token="t0")).to_str())
    put(folder / "tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


SERVERS = {"weft": weft_server, "vllm": vllm_server, "sglang": sglang_server}


@contextmanager
def started(command: Sequence[str], environment: dict[str, str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, of which nothing is left behind the context: it is asked to end, then killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        **options,
    )
    try:
        yield process
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_SECONDS)
    finally:
        with suppress(ProcessLookupError):  # ranks and clients may outlive their parent
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def running(server: Server, log: Path) -> Iterator[str]:
    """URL of a server that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command, begin = [*server.command, "--host", "127.0.0.1", "--port", str(port)], time.monotonic()
    with (
        log.open("wb") as output,
        started(command, server.environment, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        while not is_ready(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None:
                raise SystemExit(f"{server.name} ended with status {process.returncode} before it was ready{tail(log)}")
            if time.monotonic() - begin > READY_SECONDS:
                raise SystemExit(f"{server.name} was not ready after {READY_SECONDS:.0f} s{tail(log)}")
            time.sleep(0.2)
        print(f"{server.name}: ready after {time.monotonic() - begin:.0f} s", flush=True)
        yield f"http://127.0.0.1:{port}/v1"


def is_ready(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # by no proxy that the environment names
    try:
        with direct.open(url, timeout=10):
            return True
    except (OSError, http.client.HTTPException):
        return False


def tail(log: Path) -> str:
    return "; the end of its log:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def drive(server: Server, url: str, load: Sequence[str], out: Path) -> dict[str, Any]:
    """What `weft bench serve` measures of a server, which also goes to NAME.json."""
    target, log = out / f"{server.name}.json", out / f"{server.name}.log"
    command = [sys.executable, "-m", "weft", "bench", "serve", "--url", url, *load, "--json", str(target)]
    with started(command, {}) as client:
        try:
            status = client.wait(timeout=LOAD_SECONDS)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{server.name}: its load was not over after {LOAD_SECONDS:.0f} s{tail(log)}") from None
    if status not in (0, 1):  # 1: some requests failed, which the table says
        raise SystemExit(f"{server.name}: weft bench serve ended with status {status}{tail(log)}")
    report = json.loads(target.read_text())
    report["command"] = shlex.join(without_folders(shlex.split(report["command"])))
    report |= {"server": without_folders(server.command), "environment": server.environment}
    report["revision"] = revision(Path(weft.__file__).parent)  # of weft: its server, or the client of another
    put(target, json.dumps(report, indent=1) + "\n")
    return report


def without_folders(command: Sequence[str]) -> list[str]:
    """A command for a record: of absolute paths, which hold on one machine only, the last names."""
    return [Path(part).name if Path(part).is_absolute() else part for part in command]


def table(reports: dict[str, dict[str, Any]]) -> str:
    """Figures side by side as Markdown, weft's first. Ratios above 1 are weft's gain."""
    ours, *others = reports.values()
    names = list(reports)
    lines = [f"| load | figure | {' | '.join(names)} | {' | '.join(f'{names[0]} to {other}' for other in names[1:])} |"]
    lines.append("|---|---|" + "---:|" * (2 * len(names) - 1))
    for index, point in enumerate(ours["points"]):
        load = f"{point['concurrency']} at a time" if point["rate"] is None else f"{point['rate']} a second"
        points = [point, *(other["points"][index] for other in others if index < len(other["points"]))]
        for name, one in zip(names, points, strict=False):
            if one["failed"]:
                empty = " |" * (2 * len(names) - 1)
                lines.append(f"| {load} | requests of {name} that failed: {one['failed']} |{empty}")
        for figure, unit, more, value in FIGURES:
            values = [value(one) for one in points]
            cells = [f"{one:.2f}" if one is not None else "none" for one in values]
            ratios = [ratio(values[0], other, more) for other in values[1:]]
            missing = ["not measured"] * (len(names) - len(points))
            lines.append(f"| {load} | {figure}, {unit} | {' | '.join([*cells, *missing, *ratios, *missing])} |")
    return "\n".join(lines)


def ratio(ours: float | None, other: float | None, more: bool) -> str:
    if not ours or not other:
        return "not measured"
    gain = ours / other if more else other / ours
    return f"{gain:.2f} x" + (", lost" if gain < 1 else "")


def run(servers: Sequence[Server], load: Sequence[str], out: Path) -> dict[str, dict[str, Any]]:
    """Measure servers one after the other."""
    reports = {}
    for server in servers:
        with running(server, out / f"{server.name}.log") as url:
            reports[server.name] = drive(server, url, load, out)
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--table", action="store_true", help="print the table of FOLDER's runs; measure nothing")
    parser.add_argument("--model", default="qwen3-8b", choices=PUBLISHED, help="sizes of a published model")
    parser.add_argument("--world-size", type=int, default=1, help="GPUs, tensor parallel")
    parser.add_argument("--servers", default="weft,vllm", help="of weft, vllm and sglang, with commas between")
    parser.add_argument("--vllm-python", default=shutil.which("python"), help="interpreter of vLLM's environment")
    parser.add_argument(
        "--archives", help="of vLLM's and SGLang's packages, with commas between; without: all are installed"
    )
    parser.add_argument("--quantization", choices=["fp8"], help="block fp8; without it bf16")
    parser.add_argument("--max-length", type=int, default=8192, help="tokens of a prompt and its answer")
    parser.add_argument("--max-sequences", type=int, default=128, help="requests that run at once")
    parser.add_argument("--concurrency", default="1,16,64", help="closed loops")
    parser.add_argument("--rates", default="1,4,16", help="Poisson arrivals a second")
    parser.add_argument("--requests", type=int, default=128, help="of each load")
    parser.add_argument("--input-tokens", default="1024")
    parser.add_argument("--output-tokens", default="128")
    parser.add_argument("--clients", type=int, default=4, help="processes that send requests")
    chosen = parser.parse_args()
    names = chosen.servers.split(",")
    if unknown := [name for name in names if name not in SERVERS]:
        parser.error(f"--servers {unknown[0]} is not weft, vllm or sglang")
    if chosen.table:
        print(table({name: json.loads((chosen.out / f"{name}.json").read_text()) for name in names}))
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        check_clean("--out", chosen.out / f"{name}.json")
    options = "concurrency", "rates", "requests", "input_tokens", "output_tokens", "clients"
    load = [part for name in options for part in (f"--{name.replace('_', '-')}", str(getattr(chosen, name)))]
    print(table(run([SERVERS[name](chosen) for name in names], load, chosen.out)))


if __name__ == "__main__":
    # SIGTERM ends the running server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
