"""Plans that an engine follows: options taken, differences refused in a line, measured steps beside predicted ones."""

import json
import logging
import math

import pytest
import torch

import weft
from weft.engine import Engine, EngineConfig, followed
from weft.engine.followed import FEWEST, Measured, StepPlanned

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
BUILTIN = {
    "hidden_size": None, "intermediate_size": None, "num_hidden_layers": None, "num_attention_heads": None,
    "num_key_value_heads": None, "vocab_size": None,
}  # fmt: skip


def sizes_of_builtin():
    from weft.models import DecoderConfig
    from weft.models.builtin import PATH
    from weft.models.checkpoint import Checkpoint

    config = DecoderConfig.of(Checkpoint(PATH))
    return {name: getattr(config, name) for name in BUILTIN}


def content(**server):
    options = {"max_batch": 3, "page_size": 32, "max_seq_len": 48, "pages": 9, "context_parallel": False}
    return {
        "model": {"name": "adder", **sizes_of_builtin()},
        "gpus": {"gpu": "NVIDIA H200", "count": 2},
        "server": {"world_size": 2, "engine": options} | server,
        "decode_steps": [{"batch": 1, "length": 32, "seconds": 0.002, "error": 0.06}],
    }


@pytest.fixture
def plan(tmp_path):
    file = tmp_path / "plan.json"
    followed.write(file, content())
    return file


def test_options_are_taken(plan):
    config = EngineConfig.of(None, {"plan": plan})
    assert (config.max_batch, config.page_size, config.max_seq_len, config.pages) == (3, 32, 48, 9)
    assert config.plan.world_size == 2
    assert EngineConfig.of(config, {}) == config


def test_an_equal_option_is_let_through_and_another_one_is_refused_in_a_line(plan):
    assert EngineConfig.of(None, {"plan": plan, "max_batch": 3}).max_batch == 3
    with pytest.raises(ValueError, match="max_batch=5 differs from max_batch=3 of plan") as caught:
        EngineConfig.of(None, {"plan": plan, "max_batch": 5})
    assert "\n" not in str(caught.value)
    assert str(plan) in str(caught.value)
    assert "leave it out, or plan again" in str(caught.value)
    with pytest.raises(ValueError, match="page_size=16 differs"):
        EngineConfig.of(EngineConfig(page_size=16), {"plan": str(plan)})
    with pytest.raises(ValueError, match="world_size=4 differs from world_size=2"):
        weft.LLM(world_size=4, device="sim", plan=plan)


def test_an_engine_answers_by_a_plan_and_says_nothing_of_virtual_times(plan):
    with weft.LLM(device="sim", plan=plan) as llm:
        assert llm.world_size == 2
        [answer] = llm.generate("2+3=", weft.SamplingParams(max_tokens=4))
    assert answer.text.startswith("5")


def test_another_model_or_gpu_is_refused(plan, tmp_path):
    other = content()
    other["model"]["hidden_size"] += 1
    followed.write(tmp_path / "other.json", other)

    def main(team):
        with pytest.raises(ValueError, match=r"is for adder: hidden_size=\d+, and this model has \d+; plan this one"):
            Engine(None, team, plan=tmp_path / "other.json")
        engine = Engine(None, team, plan=plan)
        assert engine.against_plan() == []
        return engine.config.max_batch

    assert weft.simulate(main, 2) == [3, 3]
    with pytest.raises(ValueError, match="is for NVIDIA H200, and this machine has NVIDIA A100"):
        weft.simulate(lambda team: Engine(None, team, plan=plan), 2, like="a100")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.pop("server"), "server is missing; run weft plan again"),
        (lambda d: d.__setitem__("schema", 7), "it is not a plan of weft plan, schema 1"),
        (lambda d: d.__setitem__("kind", "load"), "it is not a plan of weft plan"),
        (lambda d: d["server"]["engine"].__setitem__("fast", 1), "server.engine.fast is not one of"),
        (lambda d: d["server"].__setitem__("world_size", 0), "server.world_size=0 is not a positive integer"),
        (lambda d: d["decode_steps"][0].__setitem__("seconds", "x"), "could not convert"),
        (lambda d: d["decode_steps"][0].__setitem__("batch", math.inf), "cannot convert float infinity"),
        (lambda d: d["model"].pop("vocab_size"), "vocab_size is missing"),
    ],
)
def test_a_damaged_plan_is_refused_with_its_field(change, reason, plan):
    document = json.loads(plan.read_text())
    change(document)
    plan.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="plan .*plan.json: ") as caught:
        followed.read(plan)
    assert reason in str(caught.value)


def test_a_file_that_is_no_plan(tmp_path, plan):
    file, flat = tmp_path / "x.json", tmp_path / "flat.json"
    file.write_text("{")
    flat.write_text(json.dumps({**json.loads(plan.read_text()), "server": {"world_size": 1, "engine": []}}))
    for path in (file, flat, tmp_path / "none.json"):
        with pytest.raises(
            ValueError, match="flat.json: |cannot be read as JSON: .*; write one by weft plan MODEL --out FILE"
        ):
            followed.read(path)


def measured(*steps):
    plan = followed.ServingPlan(
        file="p", model="m", sizes=(), gpu="g", world_size=1, options=(),
        steps=(StepPlanned(1, 32, 0.002, 0.06), StepPlanned(4, 32, 0.003, 0.06)),
    )  # fmt: skip
    made, now = Measured(plan), 0.0
    for batch, seconds, reads in steps:
        now += seconds
        made.note(batch, now, reads=reads)
    return made


def test_measured_steps_stand_beside_predicted_ones():
    made = measured(*[(4, 0.0033, False)] * (FEWEST + 1), *[(1, 0.001, False)] * 3, *[(2, 0.001, False)] * (FEWEST + 1))
    assert made.lines() == [
        "plan: decode of 2: measured 1.00 ms, not in the plan",
        "plan: decode of 4: measured 3.30 ms in 8 steps, predicted 3.00 ms ± 6% at 32 tokens: ratio 1.10",
    ]


def test_steps_beside_prompts_and_after_changes_do_not_count():
    made = measured(
        (1, 9.0, True), (1, 9.0, False), (1, 0.5, False), (4, 7.0, False), (4, 0.25, False), (0, 9.0, False)
    )
    assert made.median(1) == 0.5
    assert made.median(4) == 0.25
    assert made.median(2) == 0.0


def test_the_request_loop_says_measured_times_at_its_end(plan, monkeypatch, caplog):
    monkeypatch.setattr(Engine, "against_plan", lambda engine: ["plan: a line"] * (engine.team.rank == 0))
    with caplog.at_level(logging.INFO, "weft.cli"), weft.LLM(device="sim", plan=plan) as llm:
        llm.generate("2+3=", weft.SamplingParams(max_tokens=2))
    assert [record.getMessage() for record in caplog.records].count("plan: a line") == 1
