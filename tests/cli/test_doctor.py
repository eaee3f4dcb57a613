"""`weft doctor` here and on machines that are made up: what is missing, what will be used, what mends it."""

import importlib
import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import triton
import yaml
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

import weft
from tests.limits import PROCESS
from weft.cli import app
from weft.runtime import capabilities, deep_gemm, doctor, links
from weft.runtime.team.shape import Shape


def named(findings, name):
    return next(finding for finding in findings if finding.name == name)


@pytest.fixture
def without(monkeypatch):
    """without(*modules): those cannot be imported."""
    real = importlib.import_module

    def hide(*hidden):
        def fake(name, *rest):
            if name in hidden:
                raise ModuleNotFoundError(name)
            return real(name, *rest)

        monkeypatch.setattr(doctor, "import_module", fake)

    return hide


@pytest.fixture
def gpus(monkeypatch):
    """gpus(count, cut): `count` H200s, of which the pairs in `cut` have no peer access."""

    def plug_in(count, cut=()):
        card = types.SimpleNamespace(
            name="NVIDIA H200", total_memory=140 << 30, major=9, minor=0, multi_processor_count=132
        )
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) not in cut)
        monkeypatch.setattr(doctor, "_output", lambda *command: TOPOLOGY)
        monkeypatch.setattr(doctor.shutil, "which", lambda name: name)

    return plug_in


TOPOLOGY = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tSYS\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-31\t0\t\tN/A
NIC0\tSYS\tSYS\t X

Legend:

  X    = Self
"""


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
def test_here_it_is_the_simulator():
    findings = doctor.examine()
    assert doctor.runnable(findings)
    assert named(findings, doctor.VERDICT).value == "the simulator"
    assert named(findings, "GPUs").value == "none"


def test_linked_gpus_are_used(gpus):
    gpus(2)
    findings = doctor.examine()
    assert named(findings, "GPUs").value == "2 x NVIDIA H200, 140 GiB"
    assert named(findings, "links").value == "NV18"
    assert named(findings, "peer access").value == "every pair"
    assert named(findings, "multicast").status == "unused"
    assert named(findings, doctor.VERDICT).value == "the GPUs"


def test_gpus_that_do_not_reach_each_other_are_named(gpus):
    gpus(3, cut=[(0, 2), (2, 0)])
    findings = doctor.examine()
    assert named(findings, "peer access").value == "not between 0-2, 2-0"
    assert named(findings, "peer access").remedy
    assert named(findings, doctor.VERDICT).value == "the simulator"


def test_one_gpu_is_one_rank(gpus):
    gpus(1)
    assert named(doctor.examine(), doctor.VERDICT).value == "the GPU"


@pytest.mark.parametrize(
    ("version", "variable", "value", "status"),
    [
        ("0.1.4", None, "0.1.4", "ok"),
        ("0.1.4", "0", "0.1.4, WEFT_DEEP_GEMM=0", "unused"),
        (None, None, "not installed", "unused"),
        (None, "1", "not installed", "missing"),
        ("0.1.4", "yes", "0.1.4", "wrong"),
    ],
)
def test_deep_gemm_is_named_on_hopper(gpus, monkeypatch, version, variable, value, status):
    gpus(1)
    monkeypatch.setattr(deep_gemm, "version", lambda: version)
    monkeypatch.delenv("WEFT_DEEP_GEMM", raising=False)
    if variable is not None:
        monkeypatch.setenv("WEFT_DEEP_GEMM", variable)
    found = named(doctor.examine(), "DeepGEMM")
    assert (found.value, found.status) == (value, status)
    remedies = {"missing": "pip install 'weft[deep-gemm]'", "wrong": "unset WEFT_DEEP_GEMM"}
    assert found.remedy == remedies.get(status, "")


def test_gpus_run_without_the_simulators_packages(gpus, without):
    gpus(2)
    without("greenlet", "ml_dtypes")
    findings = doctor.examine()
    assert doctor.runnable(findings)
    assert named(findings, "greenlet").status == "missing"


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
def test_without_anything_to_run_on_it_exits_with_1_and_says_what_to_type(without):
    without("greenlet", "ml_dtypes")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "pip install greenlet && pip install ml_dtypes" in result.stdout


def test_a_broken_package_does_not_hide_the_rest(monkeypatch):
    real = importlib.import_module

    def broken(name, *rest):
        if name == "numpy":
            raise OSError("libopenblas: wrong ELF class")
        return real(name, *rest)

    monkeypatch.setattr(doctor, "import_module", broken)
    findings = doctor.examine()
    assert "wrong ELF class" in named(findings, "NumPy").explanation
    assert named(findings, "Triton").status == "ok"


def test_a_triton_that_is_too_new_is_named(monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.10.1")
    finding = named(doctor.examine(), "Triton")
    assert finding.status == "missing"
    assert "< 3.10" in finding.explanation


def test_triton_s_own_interpreter_is_named_and_nothing_runs_with_it(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    findings = doctor.examine()
    found = named(findings, "TRITON_INTERPRET")
    assert (found.status, found.remedy) == ("wrong", "unset TRITON_INTERPRET")
    assert named(findings, doctor.VERDICT).value == "nothing: it cannot run" and not doctor.runnable(findings)


def test_json_has_every_field():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    for finding in json.loads(result.stdout):
        assert set(finding) == {"name", "value", "status", "explanation", "remedy"}
        assert finding["status"] in ("ok", "missing", "wrong", "unused")


def test_probed_capabilities_name_the_ranks_out_of_reach(gpus):
    gpus(4, cut=[(1, 3)])
    caps = capabilities.probe(torch.device("cuda", 1), peers=range(4))
    assert (caps.arch, caps.sms, caps.peer_access) == ("sm_90", 132, (True, True, True, False))


def test_ranks_of_a_gpu_that_is_not_shared_plan_as_the_others(gpus):
    gpus(2)
    assert [capabilities.probe(index, peers=[0, 1, 0]).sms for index in (0, 1, 0)] == [124] * 3


def test_a_cpu_has_no_capabilities_to_probe():
    with pytest.raises(ValueError, match="cpu is not a GPU"):
        capabilities.probe(torch.device("cpu"), peers=[0])
    assert capabilities.simulated(3).peer_access == (True, True, True)


LINKS = links.Links(
    shape=Shape(2, 1), hosts=["one", "two"], backend="gloo",
    links=[links.Link(one=0, other=1, kind="rail", microseconds=41.2, gb_per_s=2.75)],
)  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_prints_the_matrix_of_links(rank, monkeypatch):
    monkeypatch.setattr(links, "links_of_torchrun", lambda: (rank, LINKS))
    ended = CliRunner().invoke(app, ["doctor", "--nodes"])
    assert ended.exit_code == 0
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert lines[1:] == [] if rank else lines[2:] == [
        ["0", "one", "0", "rail", "41", "us", "2.8", "GB/s"], ["1", "two", "1", "rail", "41", "us", "2.8", "GB/s"],
    ]  # fmt: skip
    as_json = CliRunner().invoke(app, ["doctor", "--nodes", "--json"]).stdout
    assert as_json == "" if rank else json.loads(as_json)["links"][0]["kind"] == "rail"


def test_links_need_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    ended = CliRunner().invoke(app, ["doctor", "--nodes"])
    assert ended.exit_code == 2 and "start it on every machine with torchrun --nnodes M" in ended.output


def test_the_recipes_of_the_page_start_the_same_line():
    """Those of Kubernetes are YAML, whose words torchrun's own parser takes."""
    text = (Path(weft.__file__).parent.parent / "docs" / "nodes-launch.md").read_text()
    job, jobset = (yaml.safe_load(part.split("```")[0]) for part in text.split("```yaml\n")[1:])
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    slurm = text.split("srun ")[1].split("\n```")[0].replace("\\\n", "").split()
    for words in (job["spec"]["trainer"]["command"], pod["command"] + pod["args"], slurm):
        assert words[0] == "torchrun"
        parsed = get_args_parser().parse_args(words[1:])
        assert parsed.module and [parsed.training_script, *parsed.training_script_args] == ["weft", "doctor", "--nodes"]


@pytest.mark.sweep
@pytest.mark.skipif(torch.cuda.is_available(), reason="two agents of one machine would share its GPUs")
@pytest.mark.parametrize("by_variables", [False, True])
def test_two_agents_of_torchrun_are_two_nodes(by_variables):
    """Told by flags, or as Kubeflow's Trainer tells them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(weft.__file__).parent.parent)}
    told = {"nnodes": "2", "nproc-per-node": "2", "master-addr": "127.0.0.1", "master-port": str(port)}
    agents = []
    for node in range(2):
        told["node-rank"] = str(node)
        flags = [] if by_variables else [word for name, value in told.items() for word in (f"--{name}", value)]
        variables = (
            {f"PET_{name.upper().replace('-', '_')}": value for name, value in told.items()} if by_variables else {}
        )
        run = [sys.executable, "-m", "torch.distributed.run", *flags, "-m", "weft", "doctor", "--nodes", "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        agents.append(subprocess.Popen(run, env=here | variables, **pipes))
    first, second = [agent.communicate(timeout=PROCESS)[0] for agent in agents]
    found = json.loads(first)
    kinds = {(link["one"], link["other"]): link["kind"] for link in found["links"]}
    assert found["shape"] == [2, 2] and second == ""
    assert kinds == {(0, 1): "node", (0, 2): "rail", (1, 3): "rail", (2, 3): "node"}
