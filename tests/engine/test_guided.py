"""Answers follow their grammar, whatever the model says, on every rank alike; what is no grammar is refused in one line."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import weft
from tests.engine.test_adjustments import over_ranks
from tests.engine.test_engine import PROMPTS
from weft.engine import Engine, SamplingParams
from weft.engine import StructuredOutputsParams as Structured
from weft.engine.answers import join_pieces
from weft.engine.graphs import FORWARD, Graphs
from weft.engine.params import joint_kind
from weft.engine.prompts import Shape
from weft.engine.slots import Adjusted, Entry
from weft.models.builtin import PATH as BUILTIN
from weft.text import grammars
from weft.text.grammars import Guides
from weft.text.tokenizer import load_tokenizer

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["weft", "warp"]}, "ranks": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "ranks"],
    "additionalProperties": False,
}
DRAWN = {"temperature": 1.0, "max_tokens": 60}
ASKED = [
    SamplingParams(structured_outputs=Structured(json=SCHEMA), seed=1, **DRAWN),
    SamplingParams(structured_outputs=Structured(regex="[a-f]{44}-[0-9]{2}"), seed=2, repetition_penalty=1.2, **DRAWN),
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(structured_outputs=Structured(choice=["positive", "negative"]), logprobs=1, max_tokens=20),
    SamplingParams(structured_outputs=Structured(grammar='root ::= "(" root ")" | "x"'), seed=5, **DRAWN),
]


def answers(directory, world_size=1, late=0, mode="reference", prompts=(*PROMPTS, "y", "z"), **engine):
    """Answers to `prompts` by the first of ASKED, and the number of preemptions."""

    def main(team):
        made = Engine(directory, team, mode=mode, **engine)
        made.batch._steps_late = late
        return join_pieces(made.answer(prompts, ASKED[: len(prompts)]), len(prompts)), made.stats.preemptions

    results = weft.simulate(main, world_size)
    assert all(result == results[0] for result in results)
    return results[0]


def test_answers_follow_their_grammars_in_slots_chunks_and_after_preemption(byte_model):
    """Also where the host launches a step ahead, as on GPUs."""
    found, _ = answers(byte_model)
    record = json.loads(found[0].text)
    assert set(record) == {"name", "ranks"} and record["name"] in ("weft", "warp") and 1 <= record["ranks"] <= 99
    assert len(found[1].text) == 47 and found[1].text[44] == "-"
    assert found[3].text in ("positive", "negative")
    assert found[4].text.strip("()") == "x" and found[4].text.count("(") == found[4].text.count(")")
    assert [one.finish_reason for one in found] == ["eos", "eos", "length", "eos", "eos"]
    again, preemptions = answers(byte_model, late=1, page_size=16, pages=1 + 5, max_batch=4, chunk_tokens=7)
    assert [one.token_ids for one in again] == [one.token_ids for one in found] and preemptions > 0
    assert [one.token_ids for one in answers(byte_model, 2)[0]] == [one.token_ids for one in found]


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["reference", "replicated", "sequence_parallel"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_mode_and_world_size_answers_alike(byte_model, mode, world_size):
    """The cache is split by heads: each of the five pages holds 16 tokens in every world size."""
    expected, _ = answers(byte_model)
    pool = {"page_size": 16, "pages": 1 + 5, "max_batch": 4, "context_parallel": False}
    found, preemptions = answers(byte_model, world_size, 1, mode, **pool)
    assert preemptions > 0 and [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["replicated", "sequence_parallel"])
@pytest.mark.parametrize(("world_size", "pages"), [(2, 1 + 4), (4, 1 + 3)])
def test_a_spread_cache_answers_alike(one_layer, mode, world_size, pages):
    """A page holds 16 tokens of each rank. Both prompts fit, and one page more; both requests grow beyond 64 tokens."""
    prompts = ["." * 45 + prompt for prompt in PROMPTS[:2]]
    expected, _ = answers(one_layer, prompts=prompts)
    pool = {"page_size": 16, "pages": pages, "max_batch": 4, "context_parallel": True}
    found, preemptions = answers(one_layer, world_size, 1, mode, prompts, **pool)
    assert preemptions > 0 and [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_the_built_in_model_spells_an_enum_and_ends_where_its_tokens_do_not_go_on():
    """Of both, all tokens behind the first one follow from the grammar."""
    enum = SamplingParams(structured_outputs=Structured(json={"enum": [712, 88]}), max_tokens=8)
    stuck = SamplingParams(structured_outputs=Structured(regex="7a|8b"), max_tokens=8)
    with weft.LLM(world_size=1, device="sim") as llm:
        [spelt, ended] = llm.generate(["1+1=", "2+2="], [enum, stuck])
    assert spelt.text in ("712", "88") and spelt.finish_reason == "eos"
    assert ended.text in "78" and ended.finish_reason == "error"
    assert "no token is left for place 1 of the answer: structured_outputs (regex) exclude all" in ended.error.message


def test_a_json_object_in_the_words_of_a_small_vocabulary():
    """The tokens' texts are joined as they are; a token that holds several characters, and one that nothing spells."""
    texts = ["<eos>", "<unk>", "{", "}", '"', ":", ",", " ", "a", "b", "1", "ab"]
    tokenizer = Tokenizer(models.WordLevel({text: token for token, text in enumerate(texts)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(texts[:2])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("ab|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    guides = Guides(tokenizer, 32, [0])
    guide = guides.start(Structured(json_object=True))
    for text in ("{", '"', "ab", "a", '"', ":", "1", "}"):
        [mask] = guide.mask().tolist()
        assert mask & 1 << texts.index(text), text
        guide.take(texts.index(text))
    assert guide.mask().tolist() == [1]
    guide = guides.start(Structured(json={"const": {"ab": 1}}))
    for text in ("{", '"', "ab", '"', ":"):
        assert guide.mask()[0] & 1 << texts.index(text), text
        guide.take(texts.index(text))
    with pytest.raises(ValueError, match="follows this grammar; its tokens are { } "):
        guides.start(Structured(json={"const": "abc"}))


@pytest.mark.parametrize("world_size", [1, 3])
def test_masks_reach_each_ranks_tokens(world_size):
    """40 tokens in words of 32 bits, over ranks of 14 that begin within a word."""
    bits = torch.zeros(64, dtype=torch.bool)
    bits[[0, 13, 14, 31, 32, 39]] = True
    words = (bits.view(2, 32).long() << torch.arange(32)).sum(1).int()

    def run(adjustments, columns):
        entry = Entry(adjusted=Adjusted(params=ASKED[0], ends=[], bad_words=[]), prompt=[1], answer=[])
        adjustments.enter(1, entry)
        adjustments.allow({1: words})
        return adjustments.adjust(
            torch.zeros(2, columns.stop - columns.start), slice(2), torch.tensor([1, 1]), guided=True
        )

    found = over_ranks(world_size, run)
    assert (found[0] == 0).all() and torch.equal(found[1] == 0, bits[:40])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "structured_outputs has nothing; pass one of json, regex, choice, grammar, json_object"),
        ({"json": "{}", "regex": "a"}, "structured_outputs has json and regex; pass one of"),
        ({"json": {"a": {1}}}, "json=.* is not a JSON schema"),
        ({"json": '{"type":'}, "json=.* is not a JSON schema"),
        ({"json": 5}, "json=5 is not text"),
        ({"choice": "ab"}, "choice='ab' is not a list of texts"),
        ({"choice": []}, "choice=.* is not a list of texts"),
        ({"json_object": False}, "json_object=False is not True"),
    ],
)
def test_structures_that_mean_nothing_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        Structured(**asked)


@pytest.mark.parametrize("asked", [{"regex": "a(b"}, {"json": {"type": "foo"}}, {"grammar": "root ::= ("}])
def test_what_is_no_grammar_is_refused_in_one_line(asked):
    guides = Guides(load_tokenizer(BUILTIN), 15, [1])
    with pytest.raises(ValueError, match="^structured_outputs: .+") as caught:
        guides.start(Structured(**asked))
    assert "\n" not in str(caught.value)


def test_equal_grammars_are_compiled_once_and_the_last_used_are_kept(monkeypatch):
    monkeypatch.setattr(grammars, "MOST_GRAMMARS", 2)
    guides, compiled, compile_one = Guides(load_tokenizer(BUILTIN), 15, [1]), [], Guides._compile
    monkeypatch.setattr(
        Guides, "_compile", lambda self, kind, text: compiled.append(text) or compile_one(self, kind, text)
    )
    for text in ("12", "1", "12", "2", "12", "1"):
        guides.start(Structured(regex=text))
    assert compiled == ["12", "1", "2", "1"]
    held = guides.prepare(Structured(regex="7"))
    for text in ("8", "9", "7"):
        guides.start(Structured(regex=text))
    assert compiled[4:] == ["7", "8", "9"] and held.done(), "one that is waited for is found"
    with pytest.raises(ValueError, match="structured_outputs: "):
        guides.start(Structured(regex="("))
    one, other = (guides.start(Structured(regex="7")) for _ in range(2))
    one.take(load_tokenizer(BUILTIN).token_to_id("7"))
    assert one.mask().tolist() == [1 << 1] != other.mask().tolist()


def test_a_missing_library_and_a_model_without_an_end_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="need an end-of-sequence token, and this model has none"):
        Guides(load_tokenizer(BUILTIN), 15, [])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"llguidance, which is not installed: pip install 'weft\[guided\]'"):
        Guides(load_tokenizer(BUILTIN), 15, [1])
    with pytest.raises(ValueError, match="min_tokens=2 with structured_outputs"):
        SamplingParams(min_tokens=2, structured_outputs=Structured(regex="a"))


def test_a_guide_stays_at_its_end_and_can_begin_again():
    tokenizer = load_tokenizer(BUILTIN)
    guide = Guides(tokenizer, 15, [1]).start(Structured(regex="12"))
    one, two = (tokenizer.token_to_id(text) for text in "12")
    masks = []
    for token in (one, two, 1, 5):
        masks.append(guide.mask().tolist())
        guide.take(token)
    assert masks == [[1 << one], [1 << two], [1 << 1], [1 << 1]] and guide.mask().tolist() == [1 << 1]
    guide.begin_again([one])
    guide.take(-1)  # no token could be chosen
    assert guide.mask().tolist() == [1 << two]
    guide.take(one)  # not allowed: a dead end
    assert guide.mask().tolist() == [0]


def test_graphs_give_the_same_answers_as_steps_that_are_launched(byte_model, monkeypatch):
    """As on GPUs, but that a graph's replay is the pass itself, after the two passes before a capture."""
    keys = set()

    def capture(graphs, key, run):
        keys.add((type(key[0]), key[1]))
        for _ in range(2):
            run()
        graphs._graphs[key] = SimpleNamespace(replay=run)

    expected, _ = answers(byte_model)
    monkeypatch.setattr(Graphs, "capture", capture)
    for name in ("LAUNCHED_FIRST", "RAGGED_FIRST"):
        monkeypatch.setattr(f"weft.engine.prompts.{name}", 0)

    def main(team):
        made = Engine(byte_model, team, mode="reference")
        made.batch.runner.cuda_graph, made.batch._steps_late = True, 1
        return join_pieces(made.answer([*PROMPTS, "y", "z"], ASKED), 5)

    [found] = weft.simulate(main, 1)
    assert found == expected
    guided = joint_kind(ASKED)
    assert {(int, FORWARD), (int, guided), (Shape, guided)} <= keys
