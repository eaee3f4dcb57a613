"""The scripts of benchmarks/doors on virtual ranks, with small shapes and one call each: what they compare must be equal."""

import json

import pytest
import torch
from torch.distributed import _symmetric_memory as symm_mem

from benchmarks.doors import timing, torch_tp
from tests.integrations.virtual_groups import simulate_mesh  # noqa: F401
from weft.integrations import torch as door


@pytest.fixture
def one_call(monkeypatch):
    for name in ("CALLS", "ROUNDS", "WARM_UP"):
        monkeypatch.setattr(timing, name, 1)
    monkeypatch.setattr(timing.in_a_row, "__defaults__", (1, 1))


@pytest.fixture
def torchs_ops_on_cpus():
    """torch's fused ops, whose kernels are CUDA's, by torch's own decomposition."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symm_mem._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symm_mem._fused_matmul_reduce_scatter_fallback, "CPU")
    yield
    door.uninstall()
    library._destroy()


def test_a_row_names_the_timed_calls_that_were_replayed_and_launched():
    from itertools import count
    from types import SimpleNamespace

    from weft.transport.replays import Replays

    graphs, new_addresses = Replays(lambda run: run, [], lambda: None), count()
    team = SimpleNamespace(
        device=torch.device("cpu"),
        barrier=lambda: None,
        exchange=lambda item: [item, item],
        workspace=lambda *of: graphs,
    )

    def call():
        graphs.submit("the same addresses", lambda: None)
        graphs.submit(next(new_addresses), lambda: None)

    counts = timing.in_a_row(team, call, calls=8, rounds=7)
    assert {name: of for name, of in counts.items() if not name.endswith("us")} == {
        "replays": [56, 56], "launches": [56, 56], "captures": [0, 0], "failures": [0, 0],
    }  # fmt: skip


def test_torchs_ops_and_styles_have_the_same_answers_on_weft(
    simulate_mesh,  # noqa: F811
    one_call,
    torchs_ops_on_cpus,
    tmp_path,
    capsys,
):
    sizes = {"gathers": ((16, 32, 32),), "scatters": ((16, 32, 32),), "layers": ((16, 32, 64),)}
    file = tmp_path / "torch.json"

    def main(mesh, team):
        return torch_tp.measure(team, mesh, ["ops", "styles"], sizes, file)

    rows, _ = simulate_mesh(main, 2, sms=4)
    assert [row["what"] for row in rows[:3]] == [
        "AG-GEMM 16x32x32",
        "GEMM-RS 16x32x32",
        "16x32x64, sharded tokens, forward",
    ]
    assert all(row["on weft"] for row in rows[:2]) and len(rows) == 6
    assert json.loads(file.read_text())["rows"] == rows
    printed = capsys.readouterr().out
    assert "| what | torch | weft | gain |" in printed and "16x32x64, replicated, forward and backward" in printed


def test_a_llama_by_its_plan_and_with_replaced_layers_has_the_same_logits(simulate_mesh, one_call, monkeypatch, capsys):  # noqa: F811
    pytest.importorskip("transformers", "5.17")
    from benchmarks.doors import transformers_llama as door

    sizes = door.SIZES | {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 48,
    }  # fmt: skip
    for name in ("NEW", "REPEATS", "CALLS"):
        monkeypatch.setattr(door, name, 1)
    refused = door.Way("refused", lambda *of: 1 / 0, ("prompt",))
    ways = (*door.WAYS[:3], door.Way("of no row", lambda *of: 1 / 0, ()), refused)  # none of the compiler's

    def main(mesh, team):
        table = door.Rows(team, {kind: ((2, 8) if kind == "prompt" else (1, 4),) for kind in door.KINDS}, None)
        return door.measure(team, mesh, (1, sizes), ways, table, None)

    rows, _ = simulate_mesh(main, 2, sms=4)
    assert [row["what"] for row in rows] == ["prompt 2x8", "step 1x4", "captured 1x4", "token 1x4", "static 1x4"]
    timed = [row for row in rows if row["what"].split()[0] in ("prompt", "step", "token")]
    assert all(row[way] for row in timed for way in ("tp_plan", "tp_plan on weft", "replace")), rows
    assert rows[0]["refused: reason"] == "ZeroDivisionError: division by zero"
    assert "| what | tp_plan | tp_plan on weft | replace | refused | gain |" in capsys.readouterr().out


def vllm_row(answers, likely, first=20.0):
    steps = [[{str(token): p for token, p in step.items()} for step in of] for of in likely]
    return {"prompts": 1, "tokens": 4, "first_ms": first, "per_token_ms": 2.0, "answers": answers, "likely": steps}


def test_tokens_of_vllm_may_differ_at_a_near_tie_only():
    from benchmarks.doors import vllm_plugin

    def report(*row):
        return {"vllm": "0.26.0", "model": "qwen3-8b", "world_size": 2, "gpu": "H", "rows": [vllm_row(*row)]}

    off = report([[5, 7, 9]], [[{5: -1.0}, {7: -1.00, 8: -1.05}, {9: -1.0}]])
    on = report([[5, 8, 3]], [[{5: -1.0}, {7: -1.04, 8: -1.00}, {3: -1.0}]], 16.0)
    printed = vllm_plugin.table(vllm_plugin.joined(off, on))
    assert "| 1x4 | 20.0 / 2.00 | 16.0 / 2.00 | 1.25 / 1.00 | 1, from token 1 on, by 0.050 |" in printed
    assert printed.splitlines()[-1].endswith("by 0.050 |") and vllm_plugin.table(vllm_plugin.joined(off, off)).endswith(
        "| 0 |"
    )
    far = report([[6, 7, 9]], [[{6: -0.5, 5: -1.0}, {7: -1.0}, {9: -1.0}]])
    with pytest.raises(ValueError, match=r"tokens differ by more than 0\.1 at 1x4"):
        vllm_plugin.table(vllm_plugin.joined(off, far))


def test_the_entry_point_of_the_plugin_is_found_from_a_source_tree(tmp_path, monkeypatch):
    from importlib.metadata import entry_points

    from benchmarks.doors import vllm_plugin

    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    vllm_plugin.offer_plugin(tmp_path)
    offered = [one for one in entry_points(group="vllm.general_plugins") if one.dist.name == "weft-door"]
    assert [one.load().__module__ for one in offered] == ["weft.integrations.vllm"]


def test_modules_that_torchtitan_imports_and_does_not_use_have_stand_ins(monkeypatch):
    import sys

    from torch.distributed import fsdp

    from benchmarks.doors.torchtitan_llama import StandIns, complete_torch

    monkeypatch.setattr(sys, "meta_path", [StandIns(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(fsdp, "DataParallelMeshDims", None, raising=False)
    monkeypatch.delattr(fsdp, "DataParallelMeshDims")
    complete_torch()
    import wandb
    from torchdata.stateful_dataloader import StatefulDataLoader

    assert type("Mine", (StatefulDataLoader, wandb.Run), {})() and fsdp.DataParallelMeshDims()
    for name in [name for name in sys.modules if name.split(".")[0] in ("wandb", "torchdata")]:
        monkeypatch.delitem(sys.modules, name)
