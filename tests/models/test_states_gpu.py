"""On GPUs models with gated delta nets answer alike in CUDA graphs, with drafts, and from snapshots of states."""

import pytest
import torch

import weft
from tests.against_transformers import DELTA_NETS
from weft.engine import Engine

DENSE = {"family": "Qwen3Next", **DELTA_NETS, "mlp_only_layers": [0, 1, 2], "initializer_range": 0.2}
# Of one page and of several.
PROMPTS = [[5, 9, 200] * 4, [44, 45] * 40, [7, 31, 8], list(range(70))]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
LONGEST, VOCAB = 256, 257


class Known:
    """Drafter that knows the answers, on the device; every fifth token is wrong."""

    page_bytes = 0

    def __init__(self, runner, sequences):
        self.slots, self.sequences = runner.slots, sequences
        self.table = torch.zeros(
            len(runner.decoding.tokens), LONGEST, dtype=torch.int64, device=runner.pipeline.team.device
        )

    def read(self, chunks, rows): ...

    def accept(self, batch, tokens, counts): ...

    def enter(self, slot, tokens):
        whole = next(one for one in self.sequences if one[: len(tokens)] == tokens)
        self.table[slot, : len(whole)] = torch.tensor(whole, device=self.table.device)

    def move(self, moves):
        sources, targets = (torch.tensor(slots, device=self.table.device) for slots in zip(*moves, strict=True))
        self.table.index_copy_(0, targets, self.table[sources])

    def propose(self, batch, drafts):
        place = torch.arange(1, drafts + 1, device=self.table.device)
        at = (self.slots.positions[:batch, None] + place).clamp(0, LONGEST - 1)
        tokens = self.table[:batch].gather(1, at)
        return torch.where(at % 5 == 0, (tokens + 1) % VOCAB, tokens)


def answers(team, directory, mode):
    """By way to answer: tokens of each prompt, tokens of prompts that were found, accepted drafts."""
    options = {"mode": mode, "dtype": torch.float32, "page_size": 64, "max_seq_len": LONGEST, "max_batch": 4}
    ways = {
        "eager": {"cuda_graph": False, "prefix_caching": False},
        "graphs": {"prefix_caching": False},
        "drafts": {"speculative": DRAFTS, "prefix_caching": False},
        "snapshots": {"state_snapshot_tokens": 64},
        "both": {"speculative": DRAFTS},
    }
    found, sequences = {}, []
    for name, way in ways.items():
        engine = Engine(directory, team, **options, **way)
        if "speculative" in way:
            engine.batch.runner.verifying.drafter = Known(engine.batch.runner, sequences)
        tokens, hits = [], 0
        for prompts in (PROMPTS, PROMPTS[1:], *([prompt] for prompt in PROMPTS)):
            tokens += [one.token_ids for one in engine.generate(prompts, max_tokens=24, ignore_eos=True)]
            hits += engine.stats.hit_tokens
        sequences = sequences or [prompt + answer for prompt, answer in zip(PROMPTS, tokens, strict=False)]
        counts = engine.batch.speculation
        found[name] = tokens, hits, 0 if counts is None else counts.accepted_tokens
    return found


def check(by_rank):
    for found in by_rank:
        for name, (tokens, hits, accepted) in found.items():
            assert tokens == found["eager"][0], name
            assert (hits > 0) == (name in ("snapshots", "both")) and (accepted > 0) == (name in ("drafts", "both")), (
                name
            )


@pytest.mark.parametrize("world_size", [pytest.param(size, marks=pytest.mark.gpu(size)) for size in (1, 2)])
def test_answers_are_the_same_in_every_way(make_checkpoint, world_size):
    directory, _ = make_checkpoint(**DENSE)
    check(weft.launch(answers, world_size, "cuda", args=(directory, "replicated")))


def test_answers_are_the_same_on_virtual_ranks(make_checkpoint):
    directory, _ = make_checkpoint(**DENSE)
    check(weft.simulate(answers, 1, args=(directory, "torch")))
