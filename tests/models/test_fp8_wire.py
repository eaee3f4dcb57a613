"""Models whose sums travel in fp8 between virtual ranks: near the exact sums, alike on all ranks, refused by name."""

import pytest
import torch

import weft
from tests.against_transformers import prompt, reference_logits, relative_rms
from weft import ops
from weft.engine import EngineConfig
from weft.layers import plan_step
from weft.models import Decoder
from weft.models.builtin import PATHS


def logits_of(team, directory, tokens, mode, wire):
    model = Decoder.from_pretrained(directory, team, mode=mode, dtype=torch.bfloat16, fused=True, wire=wire)
    cache, table = model.new_cache(4, 16), torch.tensor([[1], [2], [3]], dtype=torch.int32)
    logits = model(tokens.flatten(), model.prefill_step([(0, tokens.shape[1])] * 3, table, 16), cache)
    return model.lm_head.gather(logits).view(*tokens.shape, -1), str(model.plan(3))


@pytest.mark.parametrize("mode", ["replicated", "sequence_parallel"])
def test_logits_are_near_those_of_exact_sums(make_checkpoint, monkeypatch, mode):
    directory, reference = make_checkpoint(num_hidden_layers=1)
    tokens = prompt(3, 4)
    expected = reference_logits(reference, tokens)
    wires = []
    for name in ("all_reduce_rms_norm", "matmul_reduce_scatter"):
        op = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda *given, op=op, **more: wires.append(more.get("wire")) or op(*given, **more)
        )
    apart = {}
    for wire in ("same", "fp8"):
        wires.clear()
        (first, text), *rest = weft.simulate(logits_of, 2, args=(directory, tokens, mode, wire))
        assert all(torch.equal(logits, first) for logits, _ in rest)
        apart[wire] = relative_rms(first, expected)
        assert ("sums travel in fp8" in text) == (wire == "fp8")
        # The embedding is added up exactly: of three sums before norms the first.
        assert wires.count("fp8") == (0 if wire == "same" else 4)
        assert len(wires) == (6 if mode == "replicated" else 4)
    assert apart["same"] < 0.5 * apart["fp8"] < 0.05, apart


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire": "fp4"}, "wire='fp4' is not one of same, fp8, auto"),
        ({"wire": "fp8", "mode": "reference"}, "wire='fp8' with mode='reference', whose sums travel in their dtype"),
        ({"wire": "fp8", "dtype": torch.float32}, r"wire='fp8' with dtype=torch\.float32: it is for bfloat16 and"),
        ({"wire": "auto", "name": "adder-moe"}, "wire='auto' with a mixture of experts, whose sums have no such form"),
    ],
)
def test_models_that_cannot_are_refused_by_name(options, message):
    def main(team):
        name = options.get("name", "adder")
        rest = {key: value for key, value in options.items() if key != "name"}
        with pytest.raises(ValueError, match=message):
            Decoder.from_pretrained(PATHS[name], team, **{"dtype": torch.bfloat16, **rest})

    weft.simulate(main, 2)


def test_over_nodes_and_with_adapters_it_is_refused():
    def main(team):
        with pytest.raises(ValueError, match="wire='fp8' with a team of .*: it is for one node; leave wire out"):
            Decoder.from_pretrained(PATHS["adder"], team, dtype=torch.bfloat16, wire="fp8")

    weft.simulate(main, 4, node_size=2)
    with pytest.raises(ValueError, match="wire='fp8' with invariant=True: sums of another number of ranks"):
        EngineConfig(wire="fp8", invariant=True)
    with pytest.raises(ValueError, match="lora with wire='auto': sums with adapters travel in 16 bits; leave out one"):
        EngineConfig(wire="auto", lora={"a": "folder"})
    for wire in ("bf16", None):
        with pytest.raises(ValueError, match=f"wire={wire!r} is not one of"):
            EngineConfig(wire=wire)

    def adapters(team):
        model = Decoder.from_pretrained(PATHS["adder"], team, dtype=torch.bfloat16, wire="fp8")
        with pytest.raises(ValueError, match="lora with wire='fp8': sums with adapters travel in 16 bits"):
            model.load_adapters({"one": "nowhere"})

    weft.simulate(adapters, 2)


def test_recipes_that_send_no_sums_refuse_it():
    def main(team):
        plan = plan_step(4, mode="reference", hidden_size=64, dtype=torch.bfloat16, team=team)
        with pytest.raises(ValueError, match="wire='fp8': sums of .* travel in their dtype; leave it out"):
            plan.recipe.with_wire("fp8")

    weft.simulate(main, 2)


def test_an_engine_with_sums_in_fp8_still_adds():
    def main(team):
        options = {"dtype": torch.bfloat16, "mode": "replicated", "wire": "fp8", "fused": False}
        engine = weft.Engine(PATHS["adder"], team, max_seq_len=64, max_batch=8, warn=False, **options)
        assert "sums travel in fp8" in str(engine.model.plan(1))
        answers = engine.generate(["12+34=", "7+8="], max_tokens=8, temperature=0)
        return [answer.text.strip() for answer in answers]

    for said in weft.simulate(main, 2):
        assert said == ["46", "15"]
