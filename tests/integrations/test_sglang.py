"""weft.integrations.sglang with stand-ins for SGLang's modules, and the calls that its sources make."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.integrations.virtual_groups import simulate_mesh  # noqa: F401
from weft.integrations import sglang
from weft.integrations import torch as weft_torch


@pytest.fixture
def engine(monkeypatch):
    """SGLang 0.5.23 as far as the plugin sees it, and what was done there."""
    done = []
    group = SimpleNamespace(world_size=2, device_group="the group")
    modules = {
        "sglang": {}, "sglang.srt": {}, "sglang.srt.layers": {},
        "sglang.srt.distributed": {},
        "sglang.srt.distributed.bootstrap": {"initialize_layernorm_sp": lambda **o: done.append(o)},
        "sglang.srt.layers.layernorm_sp": {"layernorm_sp_enabled": lambda: state.enabled},
        "sglang.srt.runtime_context": {"get_parallel": lambda: SimpleNamespace(tp_group=group)},
    }  # fmt: skip
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    monkeypatch.setattr(weft_torch, "install", lambda group: done.append(group) or True)
    monkeypatch.setenv("WEFT_SGLANG", "1")
    bootstrap = sys.modules["sglang.srt.distributed.bootstrap"]
    state = SimpleNamespace(enabled=True, done=done, group=group, bootstrap=bootstrap)
    return state


def test_weft_is_installed_after_the_engine_has_read_the_model(engine):
    for _ in range(2):  # plugins may be loaded twice
        sglang.register()
    engine.bootstrap.initialize_layernorm_sp(model_config="Qwen3")
    assert engine.done == [{"model_config": "Qwen3"}, "the group"]


def test_it_is_left_alone_unless_asked_for_and_where_it_is_off_or_too_old(engine, monkeypatch, caplog):
    monkeypatch.setenv("WEFT_SGLANG", "0")
    theirs = engine.bootstrap.initialize_layernorm_sp
    sglang.register()
    assert engine.bootstrap.initialize_layernorm_sp is theirs
    monkeypatch.setenv("WEFT_SGLANG", "1")
    sglang.register()
    engine.enabled = False
    engine.bootstrap.initialize_layernorm_sp(model_config="Qwen3")
    engine.enabled, engine.group.world_size = True, 1
    engine.bootstrap.initialize_layernorm_sp(model_config="Qwen3")
    assert engine.done == [{"model_config": "Qwen3"}] * 2
    del engine.bootstrap.initialize_layernorm_sp
    sglang.register()
    assert "--enable-layernorm-sp is off" in caplog.text and "needs 0.5.19 or newer" in caplog.text


def test_the_calls_of_its_sources_run_on_weft(simulate_mesh):  # noqa: F811
    """By keywords, with tokens padded to the ranks, as layernorm_sp.py of 0.5.23 makes them."""

    def main(mesh, team):
        assert weft_torch.install(mesh)
        name, fused = mesh.get_group().group_name, torch.ops.symm_mem
        torch.manual_seed(team.rank)
        shard, weight, x, down = torch.randn(4, 16), torch.randn(24, 16), torch.randn(8, 12), torch.randn(16, 12)
        _, outs = fused.fused_all_gather_matmul(shard.contiguous(), [weight.t()], gather_dim=0, group_name=name)
        part = fused.fused_matmul_reduce_scatter(x, down.t(), "sum", scatter_dim=0, group_name=name)
        by_rank = team.exchange((shard, x, down))
        torch.testing.assert_close(outs[0], torch.cat([one[0] for one in by_rank]) @ weight.t())
        summed = sum(one[1] @ one[2].t() for one in by_rank)
        torch.testing.assert_close(part, summed.chunk(2)[team.rank])

    try:
        simulate_mesh(main, 2)
    finally:
        weft_torch.uninstall()
