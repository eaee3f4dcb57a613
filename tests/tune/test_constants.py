"""`weft doctor --measure` without a GPU: its file by fake measurements, its refusals."""

import json

import pytest
import torch
from typer.testing import CliRunner

from weft.cli import app
from weft.costs.gpu import CONSTANTS, named, read, write
from weft.runtime import capabilities
from weft.tune import constants

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
MEASURED = {"memory": 2.9e6, "flops": 6e8, "launch": 0.6}
LINKS = {"hop": 2.2, "stores": 2.5e5, "one_link": 2.5e5, "link": 3e5, "copy": 5.0}


def test_measured_constants_take_the_place_of_the_nearest_gpu_s(tmp_path):
    gpu, sources = constants.assembled("Some GPU", "sm_90", 114, MEASURED)
    assert (gpu.gpu, gpu.sms, gpu.memory, gpu.measured) == ("Some GPU", 114, 2.9e6, True)
    assert gpu.hop == named("h100").hop and sources["hop"] == "of NVIDIA H100 80GB HBM3: not measured here"
    assert set(sources) == set(CONSTANTS) and sources["memory"] == "a copy of 1 GiB"
    gpu, sources = constants.assembled("NVIDIA H200", "sm_90", 132, MEASURED | LINKS)
    assert gpu.link == 3e5 and not any("not measured" in source for source in sources.values())
    write(tmp_path / "x.json", gpu, sources)
    assert read(tmp_path / "x.json") == gpu


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_measurement_that_cannot_be_is_refused(value):
    with pytest.raises(ValueError, match="memory=.* is not positive"):
        constants.assembled("Some GPU", "sm_90", 114, MEASURED | {"memory": value})


@pytest.mark.parametrize("count", [1, 2])
def test_all_that_a_machine_can_measure_is_in_the_file(count, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: True)
    caps = capabilities.simulated(1, like="a100")
    monkeypatch.setattr(capabilities, "probe", lambda *arguments: caps)
    monkeypatch.setattr(constants, "on_one_gpu", lambda caps: dict(MEASURED))
    monkeypatch.setattr(constants, "of_copies", lambda: {"link": 3e5, "copy": 5.0})
    monkeypatch.setattr(
        "weft.runtime.launch.launch", lambda main, *how: [{"hop": 2.2, "stores": 2.5e5, "one_link": 2.5e5}]
    )
    lines, file = [], tmp_path / "folder" / "x.json"
    gpu, path = constants.measure(file, lines.append)
    assert path == file and read(file) == gpu and len(lines) == (3 if count == 1 else 8)
    assert (gpu.link == 3e5) == (count == 2)


def test_without_a_gpu_the_command_says_so(tmp_path):
    result = CliRunner().invoke(app, ["doctor", "--measure", "--costs", str(tmp_path / "x.json")])
    assert result.exit_code != 0 and "--measure: there is no GPU" in result.output and not list(tmp_path.iterdir())


def test_the_command_prints_the_constants(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "measure", lambda file, say: (say("memory 3e+06"), (named("h200"), file))[1])
    file = tmp_path / "x.json"
    result = CliRunner().invoke(app, ["doctor", "--measure", "--costs", str(file)])
    assert result.exit_code == 0 and result.output == f"memory 3e+06\nNVIDIA H200: {file}\n"
    result = CliRunner().invoke(app, ["doctor", "--measure", "--json", "--costs", str(file)])
    assert json.loads(result.output)["gpu"] == "NVIDIA H200"
