"""Grammars that would end a rank or hold it up are refused in one line; the next one is compiled all the same."""

import asyncio
import gc
import json
import threading
import time

import pytest

import weft
from tests.limits import ANSWER
from weft.engine import AsyncLLM, Engine, SamplingParams
from weft.engine import StructuredOutputsParams as Structured
from weft.models.builtin import PATH as BUILTIN
from weft.text import grammars
from weft.text.grammars import GrammarGuard, Guides, refusal
from weft.text.tokenizer import load_tokenizer
from weft.text.untrusted import RANK_STACK, TRIAL_STACK

pytest.importorskip("llguidance")
GOOD = Structured(regex="[7-9]{3}")


def chain(length, name="r"):
    rules = "".join(f"{name}{i}: {name}{i + 1}\n" for i in range(length))
    return f'start: {name}0\n{rules}{name}{length}: "1"\n'


def made(seconds=20.0):
    return GrammarGuard(load_tokenizer(BUILTIN), 15, [1], seconds)


@pytest.fixture(scope="module")
def guard():
    guard = made()
    yield guard
    guard.close()


UNSPELT = "no token of this model can begin a text that follows this grammar"
BEYOND = {
    "rules": {"grammar": chain(5000)},
    "terminals": {"grammar": chain(5000, "T")},
    "GBNF": {"grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(4500)) + 'r4500 ::= "1"\n'},
    "references": {
        "json": json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(5000)}
                | {"d5000": {"type": "integer"}},
            }
        )
    },
}
WRONG = {
    "regex": ({"regex": "a(b"}, "unclosed"),
    "nested regex": ({"regex": "(" * 5000 + "1" + ")" * 5000}, "invalid regex"),
    "nested rule": ({"grammar": "start: " + "(" * 5000 + '"1"' + ")" * 5000}, "too deeply nested"),
    "text without tokens": ({"json_object": True}, f"{UNSPELT}; its tokens are 0 1 2 3 4 5 6 7 8 9 + ="),
    "text with one": ({"regex": "12a"}, UNSPELT),
    "no begin": ({"regex": "[a-z]+"}, UNSPELT),
}


def test_what_overflows_the_stack_or_is_no_grammar_is_one_line_and_the_next_passes(guard):
    for name, asked in BEYOND.items():
        with pytest.raises(ValueError) as caught:
            guard.check([Structured(**asked)])
        assert str(caught.value) == (
            "structured_outputs: llguidance does not compile this grammar within its limits: its process ended, as for want of "
            "memory or by too deep a nesting; simplify it"
        ), name
    for name, (asked, said) in WRONG.items():
        with pytest.raises(ValueError, match="^structured_outputs: .+") as caught:
            guard.check([Structured(**asked)])
        assert said in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300, name
    guard.check([GOOD, Structured(regex="[1-9]"), GOOD, Structured(json={"enum": [712, 78, "a"]})])


def test_the_longest_chain_that_passes_is_compiled_by_a_rank_with_room(guard):
    """1,800 rules need most of the trial's stack, and half of a rank's."""
    asked = Structured(grammar=chain(1800))
    guard.check([asked])
    guides = Guides(load_tokenizer(BUILTIN), 15, [1])
    guide = guides.start(asked)
    assert guide.mask().tolist() == guides.start(Structured(regex="1")).mask().tolist()
    assert RANK_STACK == 2 * TRIAL_STACK and threading.stack_size() == 0


def test_a_trial_that_takes_too_long_is_ended_and_does_not_hold_up_others():
    """40,000 alternatives compile for half a minute on an idle machine."""
    guard = made(seconds=0.5)
    guard.check([GOOD])  # starts a process
    slow = Structured(grammar="start: " + " | ".join(f'"{n}" "{n}"' for n in range(40_000)))
    trial = guard.begin(slow)
    assert guard.begin(slow) is trial, "equal grammars are tried once"
    guard.check([Structured(regex="12")])
    with pytest.raises(ValueError, match=r"within its limits: it does not end within 0.5 s; simplify it$"):
        trial.future.result(timeout=ANSWER)
    guard.close()


def test_a_trial_that_nothing_waits_for_ends_its_process():
    guard = made(seconds=600.0)
    slow = Structured(grammar="start: " + " | ".join(f'"{n}" "{n}"' for n in range(40_000)))
    one, other = guard.begin(slow), guard.begin(slow)
    while one.process is None:
        time.sleep(0.01)
    process = one.process.process
    guard.leave(one)
    assert process.poll() is None
    guard.leave(other)
    assert process.wait(ANSWER) != 0
    again = guard.begin(slow)
    assert again is not one
    guard.close()
    with pytest.raises(ValueError):
        again.future.result(timeout=ANSWER)


def test_processes_are_used_again_and_end_with_the_guard(guard, monkeypatch):
    started = []
    process_of = grammars.LimitedProcess
    monkeypatch.setattr(grammars, "LimitedProcess", lambda *a, **k: started.append(process_of(*a, **k)) or started[-1])
    other = made()
    for text in ("1", "2", "1", "3"):
        other.check([Structured(regex=text)])
    assert len(started) == 1 and len(other._passed) == 3
    process = started.pop().process
    del other
    gc.collect()
    assert process.wait(ANSWER) is not None


def test_texts_of_the_library_become_one_clear_line():
    assert str(refusal("panicked at src/x.rs:1:2:\nindex out of bounds")) == (
        "structured_outputs: llguidance fails on this grammar by an error of its own; write it in another way"
    )
    assert str(refusal("too many states\n<state>\nTokens: secret\n</state>")) == "structured_outputs: too many states"


def test_all_ranks_refuse_what_rank_0_has_tried(monkeypatch):
    """By a call and by a submitted request; each rank goes on with the next."""
    tried = []
    check = GrammarGuard.check
    monkeypatch.setattr(GrammarGuard, "check", lambda self, asked: tried.append(len(asked)) or check(self, asked))

    def main(team):
        engine = Engine(None, team, mode="reference")
        bad = SamplingParams(structured_outputs=Structured(**BEYOND["rules"]))
        good = SamplingParams(structured_outputs=GOOD, max_tokens=8)
        said = []
        for call in (lambda: engine.answer(["1"], [bad]), lambda: engine.submit("1", bad)):
            with pytest.raises(ValueError) as caught:
                call()
            said.append(str(caught.value))
        [piece, *_] = list(engine.answer(["1+1="] * 2, [good] * 2))
        return said, piece.text

    found = weft.simulate(main, 2)
    assert found[0] == found[1] and "does not compile this grammar" in found[0][0][1] and found[0][1] in "789"
    assert tried == [1, 1, 1]


def test_a_request_is_refused_by_the_parent_and_others_go_on():
    async def main():
        llm = AsyncLLM(None, 2, device="sim", mode="reference")
        try:
            going = asyncio.create_task(llm.generate("1+1=", SamplingParams(max_tokens=20, ignore_eos=True)))
            bad = SamplingParams(structured_outputs=Structured(**BEYOND["rules"]))
            with pytest.raises(ValueError, match="does not compile this grammar within its limits"):
                await llm.generate("1+1=", bad)
            good = SamplingParams(structured_outputs=GOOD, max_tokens=8)
            return await going, await llm.generate("1+1=", good)
        finally:
            llm.close()

    going, good = asyncio.run(main())
    assert len(going.token_ids) == 20 and len(good.text) == 3 and set(good.text) <= set("789")
