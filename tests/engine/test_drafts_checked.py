"""Decode steps that draft, verify and accept have no race, and give the same tokens, under any schedule of their kernels."""

import pytest

import weft
import weft.check
from tests.engine.draft_heads import save_mtp
from tests.engine.test_speculative import Oracle
from weft.engine import Engine, SamplingParams
from weft.engine.answers import join_pieces
from weft.models.mtp_layouts import LAYOUTS

PROMPTS = [[5, 9, 5], [7]]
PARAMS = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (5, 3)]


class Both:
    """A drafter that runs, and an Oracle whose drafts are taken."""

    def __init__(self, verifying, plain):
        self.of, sequences = verifying.drafter, [prompt + tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)]
        self.oracle = Oracle(verifying.graph, sequences)
        self.read, self.accept = self.of.read, self.of.accept

    def propose(self, batch, drafts):
        self.of.propose(batch, drafts)
        return self.oracle.propose(batch, drafts)

    def enter(self, slot, tokens):
        self.of.enter(slot, tokens)
        self.oracle.enter(slot, tokens)

    def move(self, moves):
        self.of.move(moves)
        self.oracle.move(moves)


def answers(team, directory, plain=None, method=None):
    """Tokens without drafts; with them, `plain` ones but for some, the same, and the number of accepted ones instead."""
    speculative = method and {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    engine = Engine(
        directory, team, mode="replicated", fused=False, page_size=16, pages=9, max_batch=2, prefix_caching=False,
        speculative=speculative,
    )  # fmt: skip
    if method:
        engine.batch.runner.verifying.drafter = Both(engine.batch.runner.verifying, plain)
    tokens = [one.token_ids for one in join_pieces(engine.answer(PROMPTS, PARAMS), len(PROMPTS))]
    if plain is None:
        return tokens
    assert tokens == plain, f"rank {team.rank} answers {tokens}, without drafts {plain}"
    return engine.batch.speculation.accepted_tokens


METHODS = [pytest.param("ngram", marks=pytest.mark.sweep), "mtp"]


@pytest.fixture(scope="module")
def made(one_layer, tmp_path_factory):
    """(directory of a model with an MTP head, its answers without drafts)."""
    directory = tmp_path_factory.mktemp("checked") / "model"
    save_mtp(directory, one_layer, LAYOUTS[0])
    return directory, weft.simulate(answers, 1, args=(directory,))[0]


@pytest.mark.parametrize("method", METHODS)
def test_drafts_have_no_race(made, method):
    accepted = []
    report = weft.check.check(
        lambda team: answers(team, *made, method=method), 2, schedules=2, on_results=accepted.append
    )
    assert report.ok, str(report)
    assert len(accepted) == 2 and all(one == two > 0 for one, two in accepted)
