"""On GPUs every method drafts in CUDA graphs as it does without them, answers are those without drafts, and no step waits.

In fp32: a bf16 logit is often as large as the next. One launch a world size does all methods: starting the ranks takes longer.
"""

from contextlib import contextmanager

import pytest
import torch

import weft
from tests.engine.draft_heads import deeper, save_eagle3, save_mtp
from weft.engine import Engine, SamplingParams
from weft.engine.answers import join_pieces
from weft.models.mtp_layouts import LAYOUTS
from weft.runtime.copying import upload

VOCAB, DRAFTS, MAX_BATCH = 257, 3, 4
# More than slots, of several pages and of none; they end one after the other.
PROMPTS = [[5, 9, 200] * 4, [44, 45] * 20, [7, 31, 8], list(range(37)), [1, 2] * 3]
PARAMS = [SamplingParams(max_tokens=9 + 3 * index, ignore_eos=True) for index in range(len(PROMPTS))]
LONGEST = 96


class Known:
    """Drafter that runs another one, and gives the known answers in place of its drafts; every fifth token is wrong.

    drafted  [max_batch, DRAFTS], the other one's drafts of the step that runs
    """

    def __init__(self, engine, sequences):
        runner = engine.batch.runner
        self.of, self.slots, self.sequences = runner.verifying.drafter, runner.slots, sequences
        self.page_bytes, self.read, self.accept = self.of.page_bytes, self.of.read, self.of.accept
        self.table, self.drafted = (
            torch.zeros(MAX_BATCH, width, dtype=torch.int64, device=engine.team.device) for width in (LONGEST, DRAFTS)
        )

    def enter(self, slot, tokens):
        self.of.enter(slot, tokens)
        whole = next(one for one in self.sequences if one[: len(tokens)] == tokens)
        self.table[slot, : len(whole)].copy_(upload(torch.tensor(whole), self.table.device))

    def move(self, moves):
        self.of.move(moves)
        sources, targets = (upload(torch.tensor(slots), self.table.device) for slots in zip(*moves, strict=True))
        self.table.index_copy_(0, targets, self.table[sources])

    def propose(self, batch, drafts):
        place, newest = torch.arange(1, drafts + 1, device=self.table.device), self.slots.positions[:batch, None]
        at = newest + place
        drafted = (newest >= 0) & (at <= self.slots.last[:batch, None])
        self.drafted[:batch].copy_(torch.where(drafted, self.of.propose(batch, drafts), -1))
        at = at.clamp(0, LONGEST - 1)
        tokens = self.table[:batch].gather(1, at)
        return torch.where(at % 5 == 0, (tokens + 1) % VOCAB, tokens)


@contextmanager
def waiting(device, mode):
    """`mode` "error": an operation in which the host waits for the GPU raises, except for waits for events."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def watch(engine, noted):
    """Note the drafts of each step, and let no step wait but to capture its graph."""
    batch, runner, device = engine.batch, engine.batch.runner, engine.team.device
    replay, decode, capture = runner.replay, batch._decode, runner.capture

    def replay_and_note(size, *arguments):
        replay(size, *arguments)
        drafter = runner.verifying.drafter
        noted.append((drafter.drafted if isinstance(drafter, Known) else runner.verifying.drafts)[: size.batch].clone())

    def capture_waiting(*arguments):
        with waiting(device, "default"):
            capture(*arguments)

    def decode_without_waiting(*arguments):
        with waiting(device, "error" if runner.cuda_graph else "default"):
            return decode(*arguments)

    runner.replay, runner.capture, batch._decode = replay_and_note, capture_waiting, decode_without_waiting


def sees_waiting(device):
    """True if an operation that waits raises where `watch` lets none wait."""
    x = torch.ones(1, device=device)
    try:
        with waiting(device, "error"):
            x.item()
    except RuntimeError:
        return True
    return False


def answers(team, directory, methods, mode):
    """Tokens without drafts, and by method and way: tokens, drafts of all steps, accepted drafts."""
    options = {"mode": mode, "dtype": torch.float32, "page_size": 16, "max_seq_len": LONGEST, "max_batch": MAX_BATCH}

    def ask(engine):
        completions = join_pieces(engine.answer(PROMPTS, PARAMS), len(PROMPTS))
        return [one.token_ids for one in completions]

    plain = ask(Engine(directory, team, cuda_graph=False, **options))
    sequences = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)]
    found = {}
    for method, more in methods.items():
        speculative = {"method": method, "num_speculative_tokens": DRAFTS, "adaptive": False, **more}
        for way, cuda_graph, known in (("eager", False, True), ("graphs", True, True), ("own", True, False)):
            engine = Engine(directory, team, cuda_graph=cuda_graph, speculative=speculative, **options)
            if known:
                engine.batch.runner.verifying.drafter = Known(engine, sequences)
            noted = []
            watch(engine, noted)
            tokens = ask(engine)
            found[method, way] = tokens, [step.tolist() for step in noted], engine.batch.speculation.accepted_tokens
    return plain, found, sees_waiting(team.device)


def check(by_rank, on_gpu):
    for plain, found, seen in by_rank:
        assert seen == on_gpu
        for (method, way), (tokens, drafted, accepted) in found.items():
            assert tokens == plain, (method, way)
            assert drafted == by_rank[0][1][method, way][1] and len(drafted) > 10, (method, way)
            assert accepted > 20 or way == "own", (method, way)
        for method in {method for method, _ in found}:
            eager, graphs = (found[method, way][1] for way in ("eager", "graphs"))
            assert graphs == eager, method
            assert any(token >= 0 for step in eager for row in step for token in row), method


@pytest.fixture(scope="module")
def made(byte_model, tmp_path_factory):
    """(directory of a model with an MTP head, options of each method)."""
    directory = tmp_path_factory.mktemp("drafts")
    save_mtp(directory / "model", deeper(byte_model, directory / "bare", 3), LAYOUTS[0])
    eagle3 = save_eagle3(directory / "eagle3")
    small = {"draft_model": {"model": str(byte_model)}, "eagle3": {"model": str(eagle3)}}
    return directory / "model", {"ngram": {"prompt_lookup_min": 1}, **small, "mtp": {}}


@pytest.mark.parametrize("world_size", [pytest.param(size, marks=pytest.mark.gpu(size)) for size in (1, 2)])
def test_all_methods_in_graphs(made, world_size):
    check(weft.launch(answers, world_size, "cuda", args=(*made, "replicated")), on_gpu=True)


@pytest.mark.parametrize("chosen", [["mtp"], pytest.param(["ngram", "draft_model", "eagle3"], marks=pytest.mark.sweep)])
def test_all_methods_on_a_virtual_rank(made, chosen):
    directory, methods = made
    methods = {method: methods[method] for method in chosen}
    check(weft.simulate(answers, 1, args=(directory, methods, "torch")), on_gpu=False)
