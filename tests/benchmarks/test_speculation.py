"""benchmarks/speculation.py counts the bytes that a draft reads, and runs each drafter's pass."""

from dataclasses import replace

import torch

import weft
from benchmarks import speculation
from tests.engine.conftest import CONFIG
from weft.models import Qwen3Config
from weft.models.eagle3 import Eagle3Config

MODEL = replace(Qwen3Config.from_dict(CONFIG), num_hidden_layers=3)


def test_a_pass_of_each_drafter_is_timed_beside_its_bytes(monkeypatch):
    shapes = []
    monkeypatch.setattr(speculation, "pass_us", lambda team, run: shapes.append(run().shape) or 10.0)
    monkeypatch.setattr(speculation, "LONGEST", 64)
    monkeypatch.setattr(speculation, "PAGE", 16)
    monkeypatch.setattr(speculation, "CONTEXT", 20)
    monkeypatch.setattr(speculation, "BATCHES", (1, 2))
    eagle3 = Eagle3Config(sizes=replace(MODEL, num_hidden_layers=1), draft_vocab_size=100, layers=(0, 1, 2))
    drafters = {
        "mtp": {"method": "mtp"},
        "eagle3": {"method": "eagle3", "model": eagle3},
        "small": {"method": "draft_model", "model": replace(MODEL, num_hidden_layers=1)},
    }
    for rows in weft.simulate(speculation.heads, 2, args=(MODEL, drafters)):
        assert [(row["drafter"], row["batch"]) for row in rows] == [(name, b) for name in drafters for b in (1, 2)]
        read = {row["drafter"]: row["bytes"] for row in rows}
        width, item = CONFIG["hidden_size"], 4
        head = item * width * (CONFIG["vocab_size"] + 1) // 2
        assert abs(read["mtp"] - read["small"] - item * 2 * width**2) < 4096  # eh_proj, but for norms and padding
        assert read["small"] > 2 * head > 0
        assert all(row["ratio"] == 10.0 / row["bytes us"] for row in rows)
    assert shapes == [torch.Size((b, n)) for n in (2, 2, 1) for b in (1, 2) for _ in range(2)]


def test_drafters_of_published_models():
    assert list(speculation.drafters_of("qwen3-32b")) == ["mtp", "mtp, fp8 head", "eagle3", "qwen3-0.6b"]
    assert list(speculation.drafters_of("qwen3.6-27b")) == ["mtp", "mtp, fp8 head"]
