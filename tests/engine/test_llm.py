"""LLM: from one process over virtual ranks, what an Engine answers on each of them; its mistakes in one line."""

import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from tests.limits import ANSWER, PROCESS
from tests.runtime.sockets import listening
from weft import SamplingParams
from weft.engine import Completion, loop, params
from weft.engine import llm as llm_module
from weft.engine.answers import join_pieces
from weft.engine.batch import Batch
from weft.engine.llm import Calls
from weft.engine.ranks import VirtualRanks
from weft.errors import CheckpointError, NotEnoughGPUs, WeftError
from weft.models import Qwen3Config
from weft.models.config import check_simulable
from weft.text.tokenizer import load_tokenizer

PROMPTS = ["a prompt", "x"]


@pytest.fixture(scope="module")
def llm(byte_model):
    with weft.LLM(byte_model, 2, device="sim", mode="torch") as llm:
        yield llm


def engine_answers(directory, prompts, params):
    def main(team):
        engine = weft.Engine(directory, team, mode="torch")
        tokens = [[] for _ in prompts]
        for piece in engine.answer(prompts, params):
            tokens[piece.prompt].append(piece.token_id)
        return tokens

    return weft.simulate(main, 1)[0]


def test_answers_are_those_of_an_engine(llm, byte_model):
    params = [SamplingParams(max_tokens=6), SamplingParams(max_tokens=4, temperature=1.0, seed=2)]
    found = llm.generate(PROMPTS, params)
    assert [one.token_ids for one in found] == engine_answers(byte_model, PROMPTS, params)
    assert all(isinstance(one, Completion) and one.finish_reason == "length" for one in found)
    assert llm.stats.new_tokens == 10


def test_one_set_of_parameters_serves_all_prompts_and_none_is_the_default(llm):
    both = llm.generate(PROMPTS, SamplingParams(max_tokens=5))
    assert [len(one.token_ids) for one in both] == [5, 5]
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=5)) == both[:1]
    assert len(llm.generate([[1, 2, 3]])[0].token_ids) <= 64


def test_one_prompt_given_several_times_has_several_answers_as_of_an_engine(llm, byte_model):
    def main(team):
        return weft.Engine(byte_model, team, mode="torch").generate(["7"] * 4, max_tokens=6, temperature=3.0, seed=5)

    params = SamplingParams(max_tokens=6, temperature=3.0, seed=5)
    found = llm.generate(["7"] * 4, params)
    assert [found] == weft.simulate(main, 1)
    assert len({tuple(one.token_ids) for one in found}) == 4
    assert llm.generate(["7"] * 2, [params] * 2) == [found[0]] * 2


def test_pieces_stream_and_an_undrawn_rest_is_in_nobodys_way(llm):
    pieces = llm.stream(PROMPTS, SamplingParams(max_tokens=5))
    assert next(pieces).prompt == 0
    whole = list(llm.stream(PROMPTS, SamplingParams(max_tokens=5)))
    assert [piece.prompt for piece in whole] == [0, 1] * 5


class GatedSteps:
    """Counts the batches' steps on each rank; a rank that begins the third waits until it is let go on."""

    def __init__(self, monkeypatch):
        self.ran, self.reached, self.go_on = {}, threading.Event(), threading.Event()
        step = Batch.advance

        def counting(batch):
            self.ran[batch.team.rank] = self.ran.get(batch.team.rank, 0) + 1
            if self.ran[batch.team.rank] == 3:
                self.reached.set()
                assert self.go_on.wait(timeout=ANSWER)
            return step(batch)

        monkeypatch.setattr(Batch, "advance", counting)


@pytest.mark.parametrize("drawn", [0, 1])
@pytest.mark.parametrize("closed", [True, False])
def test_a_stream_that_is_left_ends_with_the_step_that_runs_on_all_virtual_ranks(llm, monkeypatch, drawn, closed):
    steps = GatedSteps(monkeypatch)
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=80, ignore_eos=True))
    for _ in range(drawn):
        next(stream)
    assert steps.reached.wait(timeout=ANSWER)
    if closed:
        stream.close()
    del stream
    steps.go_on.set()
    with VirtualRanks.turn:  # it has ended
        pass
    assert steps.ran == {0: 3, 1: 3}
    assert len(llm.generate("x", SamplingParams(max_tokens=5))[0].token_ids) == 5


@contextmanager
def interrupted_when(ready):
    """A KeyboardInterrupt is expected: SIGINT comes once `ready()` is true and the main thread has had time to wait."""

    def press():
        while not ready():
            time.sleep(0.01)
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()


def test_interrupts_during_answers_and_close_leave_an_llm_that_works(byte_model, monkeypatch):
    params = SamplingParams(max_tokens=5)
    with weft.LLM(byte_model, 2, device="sim", mode="torch") as llm:
        expected = llm.generate("x", params)
        steps = GatedSteps(monkeypatch)
        with interrupted_when(steps.reached.is_set):
            llm.generate("x", SamplingParams(max_tokens=80, ignore_eos=True))
        for call in (lambda: llm.generate("x", params), llm.close, llm.close):  # while the first still runs
            with interrupted_when(lambda: True):
                call()
        steps.go_on.set()
        assert llm.generate("x", params) == expected
    with pytest.raises(WeftError, match="this LLM is closed; make a new one"):
        llm.generate("x", params)
    with weft.LLM(byte_model, 2, device="sim", mode="torch") as other:
        assert other.generate("x", params) == expected


def test_a_closed_llm_computes_no_further_step_of_a_stream_that_is_held(byte_model, monkeypatch):
    steps = GatedSteps(monkeypatch)
    llm = weft.LLM(byte_model, 2, device="sim", mode="torch")
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=80, ignore_eos=True))
    assert next(stream).prompt == 0 and steps.reached.wait(timeout=ANSWER)
    left = llm._ranks.left
    closing = threading.Thread(target=llm.close)
    closing.start()
    assert left.wait(timeout=ANSWER)
    steps.go_on.set()
    closing.join(timeout=ANSWER)
    assert steps.ran == {0: 3, 1: 3}
    with pytest.raises(WeftError, match="this LLM is closed"):
        list(stream)


def test_llms_of_one_process_and_its_threads_wait_for_each_other(llm, byte_model):
    params = SamplingParams(max_tokens=5)
    expected = {prompt: llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS}
    undrawn = llm.stream(PROMPTS[0], params)
    with weft.LLM(byte_model, 1, device="sim", mode="torch") as other:
        found = {}
        threads = [
            threading.Thread(target=lambda one=one, prompt=prompt: found.update({prompt: one.generate(prompt, params)}))
            for one, prompt in zip((llm, other), PROMPTS, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=ANSWER)
        assert {prompt: answer.token_ids for prompt, [answer] in found.items()} == expected
    assert [piece.token_id for piece in undrawn] == expected[PROMPTS[0]]


END_OF_A_PROCESS = """
import atexit, sys, threading
steps, ending = [], threading.Event()
atexit.register(lambda: print(len(steps) < 40, [thread.name for thread in threading.enumerate()]))  # the last of all
import weft
from weft.engine.batch import Batch
from weft.engine.llm import Calls

def counted(batch, step=Batch.advance):
    steps.append(batch)
    if len(steps) == 3:
        ending.wait(timeout=30)
    return step(batch)

llm = weft.LLM(sys.argv[1], 1, device="sim", mode="torch")
Batch.advance = counted
stream = llm.stream("x", weft.SamplingParams(max_tokens=80, ignore_eos=True))
print(next(stream).prompt)
atexit.register(ending.set)  # the first
"""


def test_a_process_ends_with_an_answer_that_is_held_undrawn(byte_model):
    command = [sys.executable, "-c", END_OF_A_PROCESS, str(byte_model)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\nTrue ['MainThread']\n", "")


def test_a_chat_is_the_rendered_text(byte_model, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(llm_module, "load_tokenizer", lambda path: read.append(path) or load_tokenizer(path))
    directory = shutil.copytree(byte_model, tmp_path / "chat")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ style }}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=5)
    with weft.LLM(directory, 1, device="sim", mode="torch") as llm:
        assert llm.chat(messages, params, variables={"style": "!"}) == llm.generate("[user]hi!", params)
        assert llm.chat([messages, messages], params) == llm.generate(["[user]hi"] * 2, params)
        assert list(llm.stream_chat(messages, params)) == list(llm.stream("[user]hi", params))
        with pytest.raises(ValueError, match="a message is not text that UTF-8 can hold"):
            llm.chat([{"role": "user", "content": "\ud800"}])
        with pytest.raises(ValueError, match="messages is empty"):
            llm.chat([])
        for wrong, says in (
            (messages[0], "of messages, or of lists"),
            ("hi", "of messages, or of lists"),
            ([3], "messages=3 is"),
        ):
            with pytest.raises(ValueError, match=says):
                llm.chat(wrong)
    assert len(read) == 1


def with_defaults(byte_model, path, **content):
    directory = shutil.copytree(byte_model, path)
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def test_a_call_without_parameters_follows_the_checkpoint(byte_model, tmp_path, caplog):
    settings = {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "max_new_tokens": 12, "top_k": 20}
    directory = with_defaults(byte_model, tmp_path / "copy", **settings, repetition_penalty=1.1, num_beams=2)
    params = SamplingParams(temperature=2.0, top_p=0.9, top_k=20, max_tokens=12, repetition_penalty=1.1)
    with weft.LLM(directory, 1, device="sim", mode="torch") as llm:
        assert llm.defaults == params
        assert llm.generate(PROMPTS) == llm.generate(PROMPTS, params)
        assert llm.generate(PROMPTS) != llm.generate(PROMPTS, SamplingParams(max_tokens=12))
    # Once, though virtual ranks load the model for every call.
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{directory}: generation_config.json: not used: num_beams=2 (weft follows ")


def test_an_engine_follows_the_checkpoint_where_it_is_told_nothing(byte_model, tmp_path, caplog):
    directory = with_defaults(byte_model, tmp_path / "copy", do_sample=True, temperature=2.0, top_k=0, max_new_tokens=9)

    def main(team):
        engine = weft.Engine(directory, team, mode="torch")
        return [
            engine.generate("x"),
            engine.generate("x", temperature=2.0, max_tokens=9),
            engine.generate("x", temperature=0.0, max_tokens=9),
            weft.Engine(byte_model, team, mode="torch").generate("x", max_tokens=9),
        ]

    [(found, same, greedy, expected)] = weft.simulate(main, 1)
    assert found == same and len(found[0].token_ids) == 9
    assert found != greedy == expected
    assert not caplog.records


def test_defaults_that_mean_nothing_are_refused(byte_model, tmp_path):
    for index, (content, message) in enumerate(
        [
            ({"do_sample": True, "temperature": -1.0}, r"generation_config.json: temperature=-1.0 is not 0"),
            ({"max_new_tokens": 0}, "generation_config.json: max_tokens=0 is not a positive integer"),
            ({"stop_strings": 3}, "generation_config.json: stop=3 is not a string"),
        ]
    ):
        directory = with_defaults(byte_model, tmp_path / str(index), **content)
        with pytest.raises(CheckpointError, match=message):
            weft.LLM(directory, 1, device="sim", mode="torch")


def test_weights_that_are_no_numbers_give_one_line(byte_model, tmp_path, caplog):
    directory = shutil.copytree(byte_model, tmp_path / "copy")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"][-1] = math.nan  # of <eos>
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with weft.LLM(directory, 2, device="sim", mode="torch") as llm:
        [found] = llm.generate("x")
    assert (found.token_ids, found.finish_reason) == ([], "error") and "not finite" in found.error.message
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"{directory}: NaN or infinite weights in float32, so answers mean nothing: lm_head.weight"


def test_what_is_wrong_is_said_once_and_the_next_request_is_answered(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\]='' is empty"):
        llm.generate(["x", ""])
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        llm.generate(PROMPTS, [SamplingParams()])
    with pytest.raises(ValueError, match="params=3 is not a SamplingParams or a list of SamplingParams"):
        llm.generate("x", 3)
    assert len(llm.generate("x", SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_a_model_that_cannot_run_is_refused_when_the_llm_is_made(byte_model, monkeypatch):
    with pytest.raises(ValueError, match="no such directory"):
        weft.LLM("/nowhere", 2, device="sim")
    with pytest.raises(ValueError, match="world_size=3; use a world size of 1, 2, 4"):
        weft.LLM(byte_model, 3, device="sim")
    with pytest.raises(ValueError, match="world_size=0 is not a positive integer"):
        weft.LLM(byte_model, 0, device="sim")
    for world_size in ("2", 2.0, True):
        with pytest.raises(ValueError, match=f"world_size={world_size!r} is not a positive integer"):
            weft.LLM(byte_model, world_size, device="sim")
    with pytest.raises(ValueError, match="model='' names no directory"):
        weft.LLM("", 1, device="sim")
    with pytest.raises(ValueError, match="page_size=0 is not one of 16, 32, 64, 128, 256"):
        weft.LLM(byte_model, 1, device="sim", page_size=0)
    with pytest.raises(ValueError, match="device='tpu' is not one of auto, cuda, sim"):
        weft.LLM(byte_model, 2, device="tpu")
    gpus = torch.cuda.device_count()
    with pytest.raises(NotEnoughGPUs, match="needs 1024 GPUs and this machine has .*device sim"):
        weft.LLM(byte_model, 1024, device="cuda")
    for name, value in (("RANK", "9"), ("WORLD_SIZE", "10"), ("LOCAL_RANK", "9"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    says = rf"torchrun started 10 ranks, and this machine has {gpus} GPUs; .* LLM\(world_size=10, device='sim'\)"
    with pytest.raises(WeftError, match=says):
        weft.LLM(byte_model)


LARGE = {"hidden_size": 4096, "intermediate_size": 8192, "vocab_size": 1000}  # 0.27 billion parameters


def test_the_heap_is_as_large_as_was_asked_for(byte_model, as_processes, monkeypatch):
    def asks():
        with weft.LLM(byte_model, 1, heap_bytes=3 << 20) as llm:
            llm.generate("x", SamplingParams(max_tokens=1))

    sizes = []

    def engine(model, team, **options):
        sizes.append(team.largest_free_bytes() >> 20)
        return weft.Engine(model, team, **options)

    monkeypatch.setattr(llm_module, "Engine", engine)
    asks()
    loop.Processes(1, partial(engine, byte_model), 3 << 20, {}, lambda *told: None).close()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    weft.simulate(lambda team: asks(), 1)
    assert sizes == [2, 2, 2, 2]  # without what the team itself has of three


def test_a_large_checkpoint_does_not_become_a_simulation(byte_model, tmp_path, monkeypatch):
    config = json.loads((byte_model / "config.json").read_text()) | LARGE
    (tmp_path / "config.json").write_text(json.dumps(config))
    says = r"has 0\.2. billion parameters, and simulated ranks take at most 0.2 \(2 with mode='reference'\); "
    with pytest.raises(ValueError, match=rf"model='{tmp_path}' {says}run it on GPUs"):
        weft.LLM(tmp_path, 2, device="sim")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for model in (tmp_path, Qwen3Config.from_dict(config)):
        with pytest.raises(ValueError, match=f"{says}world_size=4 needs 4 GPUs and this machine has 2"):
            weft.LLM(model, 4)


def test_virtual_ranks_take_larger_models_in_mode_reference():
    for mode in ("reference", "torch"):  # the model itself would be 8 GB of random numbers
        check_simulable("qwen3-1.7b", Qwen3Config.named("qwen3-1.7b"), "", mode=mode)
    with pytest.raises(ValueError, match=r"has 33 billion parameters, and simulated ranks take at most 2; run it"):
        weft.LLM(Qwen3Config.named("qwen3-32b"), 2, device="sim", mode="reference")
    with pytest.raises(ValueError, match=r"has 33 billion parameters, and simulated ranks take at most 0.2; run it"):
        weft.LLM(Qwen3Config.named("qwen3-32b"), 2, device="sim")


def test_an_llm_on_a_virtual_rank_is_refused_by_what_to_use(byte_model):
    def main(team):
        with pytest.raises(WeftError, match=r"one that exists already; use weft.Engine\(model, team\)"):
            weft.LLM(byte_model, device="sim")

    weft.simulate(main, 1)


class OfOneRank:
    """A client of calls, as LLM is one, of a rank that stays."""

    def __init__(self, make, watchers):
        self.calls = Calls(lambda command: self.ranks.put(command))
        self.ranks = loop.Processes(1, make, None, watchers, self.calls.take)
        self.ask, self.close = self.calls.ask, self.ranks.close


@pytest.fixture
def as_processes(monkeypatch):
    """What talks to processes that stay, talking to a virtual rank that stays: only where it runs differs. One, because a
    virtual rank that waits for its parent keeps the others from running."""

    def launch_on_pipes(main, pipes, started, failed, early, args, heap_bytes):
        return weft.simulate(lambda team: main(team, pipes[team.rank], *args), len(pipes), heap_bytes=heap_bytes)

    monkeypatch.setattr(loop, "launch_on_pipes", launch_on_pipes)

    def start(directory, progress=None, engine=weft.Engine):
        return OfOneRank(partial(engine, directory, mode="torch"), {"progress": progress} if progress else {})

    return start


def tokens_of(pieces):
    return [piece.token_id for piece in pieces]


def test_a_rank_that_stays_answers_as_an_engine_until_it_dies(byte_model, as_processes, monkeypatch):
    """What tests/engine/test_processes.py says of the protocol, with an engine."""
    params = [SamplingParams(max_tokens=6), SamplingParams(max_tokens=4, temperature=1.0, seed=2)]
    expected = engine_answers(byte_model, PROMPTS, params)
    [first], [second] = (engine_answers(byte_model, [prompt], params[:1]) for prompt in PROMPTS)
    loaded, stats, engines, steps = [], [], [], []

    def noted(*given, **named):
        engines.append(weft.Engine(*given, **named))
        return engines[-1]

    before = listening()
    ranks = as_processes(byte_model, lambda done, total: loaded.append((done, total)), engine=noted)
    assert listening() == before  # no stranger can connect to the pipes' ends
    assert loaded == sorted(loaded) and loaded[-1][0] == loaded[-1][1] > 0

    def ask(prompts=PROMPTS, params=params):
        return ranks.ask((prompts, params), stats.append)

    def answers():
        pieces = list(ask())
        return [[piece.token_id for piece in pieces if piece.prompt == prompt] for prompt in range(2)]

    assert answers() == expected
    for given, says in (
        (([""], params[:1]), r"prompts\[0\]='' is empty"),
        (([], []), "prompts is empty"),
        ((["x"], [{"temperature": 1.0}]), "params={'temperature': 1.0} is not a SamplingParams"),
    ):
        with pytest.raises(ValueError, match=says):
            ask(*given)
    one, other = (ask([prompt], params[:1]) for prompt in PROMPTS)  # the first is not drawn, but not lost
    assert (tokens_of(other), tokens_of(one)) == (second, first)
    assert [one.new_tokens for one in stats] == [10, 6, 6]

    step = Batch.advance
    monkeypatch.setattr(Batch, "advance", lambda self: steps.append(self) or step(self))
    stream = ask(params=[SamplingParams(max_tokens=80, ignore_eos=True)] * 2)
    for _ in range(3):
        next(stream)
    stream.close()
    with pytest.raises(ValueError, match="prompts is empty"):
        ask([], [])
    scheduler = engines[0].batch.scheduler
    assert 1 <= len(steps) < 80 and scheduler.idle and scheduler.pool.free == scheduler.pool.capacity
    assert answers() == expected and len(stats) == 4

    def fall(self):
        raise RuntimeError("a GPU fell off")

    monkeypatch.setattr(Batch, "advance", fall)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a GPU fell off"):
            list(ask())
    ranks.close()
    assert not ranks.ranks._processes.is_alive() and not ranks.ranks._talker.is_alive()


@pytest.fixture
def without_tokenizer(byte_model, tmp_path):
    copied = shutil.copytree(byte_model, tmp_path / "copy")
    (copied / "tokenizer.json").unlink()
    return copied


IDS = [[120, 32, 61], [7]]


def test_token_ids_need_no_tokenizer(byte_model, without_tokenizer):
    params = [SamplingParams(max_tokens=6, stop_token_ids=[9]), SamplingParams(max_tokens=4, temperature=1.0, seed=2)]
    with weft.LLM(byte_model, 2, device="sim", mode="torch") as llm:
        expected = llm.generate(IDS, params)
    with weft.LLM(without_tokenizer, 2, device="sim", mode="torch") as llm:
        found = llm.generate(IDS, params)
        assert found == [dataclasses.replace(one, text=None) for one in expected]
        assert {piece.text for piece in llm.stream(IDS, params)} == {None}
        with pytest.raises(
            ValueError, match=r"prompts\[1\]='x' is text, and .* has no tokenizer.json; pass token ids$"
        ):
            llm.generate([IDS[0], "x"], params)
        with pytest.raises(
            ValueError, match=r"stop=\('x',\) needs text, and .* has no tokenizer.json; pass stop_token_ids$"
        ):
            llm.generate(IDS, SamplingParams(stop="x"))
        (without_tokenizer / "chat_template.jinja").write_text("{{ messages[0].content }}")
        with pytest.raises(ValueError, match="no tokenizer.json in it; save the model's fast tokenizer there"):
            llm.chat([{"role": "user", "content": "x"}])
        assert llm.generate(IDS, params) == found


def test_ranks_that_cannot_load_raise_one_error(as_processes):
    with pytest.raises(ValueError, match="no such directory"):
        as_processes("/nowhere")


def test_under_torchrun_every_rank_asks_and_gets_the_answers(byte_model, monkeypatch):
    with weft.LLM(byte_model, 2, device="sim", mode="torch") as llm:
        expected = llm.generate(["a", "bc"], SamplingParams(max_tokens=5))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)

    def main(_):
        # weft.init() finds the virtual ranks here, and torchrun's where there are some.
        with weft.LLM(byte_model, mode="torch") as llm:
            found = [llm.generate(["a", "bc"], SamplingParams(max_tokens=5)) for _ in range(2)]
            with pytest.raises(ValueError, match=r"prompts\[0\]='' is empty"):
                llm.generate("")
            scheduler = llm._engine.batch.scheduler
            for drawn in range(4):
                pieces = llm.stream(["a", "bc"], SamplingParams(max_tokens=50))
                for _ in range(drawn):
                    next(pieces)
                assert scheduler.idle == (drawn == 0)
                pieces.close()
                assert scheduler.idle and scheduler.pool.free == scheduler.pool.capacity
            assert llm.generate(["a", "bc"], SamplingParams(max_tokens=5)) == found[0]
            return found, llm.world_size, llm.stats.new_tokens

    assert weft.simulate(main, 2) == [([expected, expected], 2, 10)] * 2
    with pytest.raises(ValueError, match="world_size=3, but torchrun has started 2 ranks; leave it out"):
        weft.LLM(byte_model, 3)


def test_several_answers_of_a_prompt_are_those_of_their_own_seeds(byte_model):
    params = SamplingParams(n=3, max_tokens=6, temperature=2.0, seed=5, prompt_logprobs=0, ignore_eos=True)
    with weft.LLM(byte_model, 2, device="sim", mode="torch") as llm:
        found = llm.generate(["ab", "c"], [params, replace(params, n=1)])
        pieces = list(llm.stream(["ab"], params))
        alone = llm.generate(["ab"] * 3, params.answers())
    assert [one.index for one in found] == [0, 1, 2, 0]
    assert [one.token_ids for one in found[:3]] == [one.token_ids for one in alone]
    assert len({tuple(one.token_ids) for one in found[:3]}) == 3
    assert [one.prompt_logprobs is None for one in found] == [False, True, True, False]
    assert join_pieces(iter(pieces), 1) == found[:3] and {piece.prompt for piece in pieces} == {0}
    assert len(SamplingParams(n=2).answers()) == 2  # equal ones


def test_checks_of_sampling_parameters_leave_defaults_as_they_are():
    """So parameters that have them are not checked."""
    assert params._PLAIN.keys() == params._DEFAULTS.keys()
    for name, default in params._DEFAULTS.items():
        plain = params._PLAIN[name](name, default)
        assert (type(plain), plain) == (type(default), default), name


def test_greedy_parameters_of_a_call_are_one_instance_and_sampled_ones_have_seeds():
    greedy = params.one_each(SamplingParams(), 3)
    assert len({id(one) for one in greedy}) == 1 and greedy[0] == SamplingParams()
    assert len({one.seed for one in params.one_each(SamplingParams(temperature=0.5), 3)}) == 3
