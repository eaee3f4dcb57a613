"""weft.integrations.vllm without vLLM: when it does nothing, what it leaves alone, and the calls that it decides."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import weft
from weft.integrations import vllm as plugin
from weft.integrations.fallback import Fallback


def config(*, ubatching=False, captured=256, fuses=False):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(use_ubatching=ubatching),
        compilation_config=SimpleNamespace(
            max_cudagraph_capture_size=captured, pass_config=SimpleNamespace(fuse_allreduce_rms=fuses)
        ),
    )


def test_nothing_of_vllm_is_touched_unless_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import would raise
    for value in (None, "0", ""):
        monkeypatch.delenv("WEFT_VLLM", raising=False)
        if value is not None:
            monkeypatch.setenv("WEFT_VLLM", value)
        plugin.register()
    monkeypatch.setenv("WEFT_VLLM", "1")
    with pytest.raises(ImportError):
        plugin.register()


def test_other_platforms_are_left_with_one_line(monkeypatch, caplog):
    monkeypatch.setenv("WEFT_VLLM", "1")
    platform = SimpleNamespace(is_cuda=lambda: False, device_name="cpu")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    plugin.register()
    assert "vLLM runs on cpu, not on CUDA; nothing is replaced" in caplog.text


def test_settings_and_reasons_of_the_config():
    assert plugin.reason_against(config(), False) is plugin.reason_against(None, False) is None
    assert plugin.reason_against(config(ubatching=True), False).startswith("two microbatches")
    assert plugin.reason_against(config(), True).startswith("VLLM_BATCH_INVARIANT=1")
    assert plugin.settings_of(config(fuses=True)) == (256, True)
    assert plugin.settings_of(config(captured=None)) == (0, False)
    team = SimpleNamespace(caps=SimpleNamespace(multicast=True))
    groups = [plugin.Group(SimpleNamespace(team=team), 256, fuses) for fuses in (False, True)]
    assert [plugin.displaces_fusion(group) for group in groups] == [False, True]


def test_sums_and_row_parallel_layers_on_virtual_ranks():
    """The all-reduce of a communicator and the op of the layers, on weft and left to vLLM."""

    def main(team):
        group = plugin.Group(Fallback(team), 256, False)
        x = torch.full((3, 16), team.rank + 1.0)
        out = group.all_reduce(x, lambda: pytest.fail("left to vLLM"))
        assert torch.equal(out, torch.full((3, 16), 3.0))
        assert group.all_reduce(x.int(), lambda: "vllm") == "vllm"
        assert group.all_reduce(x.new_empty(0, 16), lambda: "vllm") == "vllm"
        a, b = (torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)) for rows in (5, 16))
        whole, parts = a @ b.t(), (a.chunk(2, 1)[team.rank], b.chunk(2, 1)[team.rank].contiguous())
        torch.testing.assert_close(group.row_parallel_linear(*parts, None), whole)
        return len(group.fallback._pays)

    assert weft.simulate(main, 2) == [4, 4]


def test_a_step_larger_than_captured_ones_is_vllm_s_unless_it_pays(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    team = SimpleNamespace(device=torch.device("cuda"), is_simulated=False, exchange=pytest.fail)
    group = plugin.Group(Fallback(team), 2, False)
    for _ in range(2):
        assert group.all_reduce(torch.ones(3, 16), lambda: "vllm") == "vllm", "without asking the other ranks"


def test_the_entry_point_names_the_function():
    project = (Path(weft.__file__).parents[1] / "pyproject.toml").read_text()
    entry = f'[project.entry-points."vllm.general_plugins"]\nweft = "{plugin.__name__}:{plugin.register.__name__}"\n'
    assert entry in project
