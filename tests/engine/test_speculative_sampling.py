"""Tokens sampled with drafts have the model's own distribution: chi-square at several positions, given the tokens before."""

from collections import Counter

import pytest
import torch

import weft
from tests.teacher_forced import all_logits
from weft.engine import Engine, SamplingParams
from weft.engine.speculation.options import SpeculativeConfig
from weft.engine.speculation.verify import VerifyGraph
from weft.models import DecoderConfig

VOCAB, TOKENS, DRAWS = 5, 4, 3072
TINY = DecoderConfig.from_dict(
    {
        "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "dtype": "float32",
    }
)  # fmt: skip
# N-grams of it stand earlier for most tokens that may follow.
PROMPT = [0, 1, 2, 3, 4, 0, 2, 4, 1, 3, 0, 3, 1, 4, 2, 0, 1]
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, adaptive=False)
DRAFT_MODEL = SpeculativeConfig(method="draft_model", model=TINY, num_speculative_tokens=3, adaptive=False)


def sharpen(model):
    """Logits that tell tokens apart: random weights are small."""
    model.lm_head.weight.data *= 10


def draws(team, speculative, temperature):
    """(tokens of every answer, log-probabilities after every prefix of them, tokens accepted)"""
    engine = Engine(TINY, team, mode="reference", page_size=16, max_batch=64, max_seq_len=32, speculative=speculative)
    sharpen(engine.model)
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seed, ignore_eos=True) for seed in range(DRAWS)
    ]
    pieces = engine.answer([PROMPT] * DRAWS, params)
    answers = [tuple(one.token_ids) for one in weft.engine.answers.join_pieces(pieces, DRAWS)]
    prefixes = sorted({answer[:length] for answer in answers for length in range(TOKENS)})
    padded = torch.tensor([PROMPT + [*prefix, *[0] * (TOKENS - len(prefix))] for prefix in prefixes])
    logits = all_logits(engine.model, padded)
    last = logits[torch.arange(len(prefixes)), [len(PROMPT) + len(prefix) - 1 for prefix in prefixes]]
    of_prefix = dict(zip(prefixes, (last.double() / temperature).softmax(-1).tolist(), strict=True))
    return answers, of_prefix, engine.batch.draft_length.counts.accepted_tokens


def p_value(answers, of_prefix, position):
    """Chi-square of the tokens at a position, given all tokens before it; cells of few draws are one cell of their prefix."""
    statistic, freedom = 0.0, 0
    for prefix, count in Counter(answer[:position] for answer in answers).items():
        tokens = Counter(answer[position] for answer in answers if answer[:position] == prefix)
        cells = [(tokens[token], count * share) for token, share in enumerate(of_prefix[prefix])]
        large = [cell for cell in cells if cell[1] >= 5]
        rest = [sum(column) for column in zip(*(cell for cell in cells if cell[1] < 5), strict=True)]
        if rest and rest[1] >= 5:
            large.append(tuple(rest))
        elif rest and large:
            smallest = min(large, key=lambda cell: cell[1])
            large.remove(smallest)
            large.append((smallest[0] + rest[0], smallest[1] + rest[1]))
        statistic += sum((seen - expected) ** 2 / expected for seen, expected in large)
        freedom += max(len(large) - 1, 0)
    assert freedom >= 4
    return torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()).item()


def p_values(speculative, temperature=1.0, world_size=1):
    answers, of_prefix, accepted = weft.simulate(draws, world_size, args=(speculative, temperature))[0]
    assert accepted > DRAWS / 4
    return [p_value(answers, of_prefix, position) for position in range(TOKENS)]


@pytest.mark.parametrize(
    ("speculative", "temperature"), [(NGRAM, 1.0), (DRAFT_MODEL, 0.6)], ids=["ngram", "draft_model"]
)
def test_sampled_tokens_have_the_distribution_of_the_model(speculative, temperature):
    assert min(p_values(speculative, temperature)) > 1e-3


def take_all_drafts(self, size, kind, logits, rows, position):
    """Accept every draft, whatever token was drawn."""
    wide = logits.view(size.batch, size.drafts + 1, -1).clone()
    others = torch.arange(wide.shape[-1]) != rows[:, 1:, None]
    wide[:, :-1].masked_fill_((rows[:, 1:, None] >= 0) & others, -torch.inf)
    return CHOOSE(self, size, kind, wide.view(logits.shape), rows, position)


def accept_one_more(self, size, kind, logits, rows, position):
    """The token after the first rejected draft counts, though it was drawn after the rejected one."""
    before = self.graph.slots.positions[: size.batch].clone()
    CHOOSE(self, size, kind, logits, rows, position)
    counts, positions = self.results[: size.batch, -2], self.graph.slots.positions[: size.batch]
    more = (before >= 0) & (counts <= size.drafts) & (rows.gather(1, counts.clamp(max=size.drafts)[:, None])[:, 0] >= 0)
    counts += more
    positions += more
    last = self.results[: size.batch].gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
    self.graph.tokens[: size.batch].copy_(torch.where(more, last, self.graph.tokens[: size.batch]))


CHOOSE = VerifyGraph._choose


@pytest.mark.parametrize(
    ("rule", "speculative"),
    [(take_all_drafts, NGRAM), (take_all_drafts, DRAFT_MODEL), (accept_one_more, DRAFT_MODEL)],
    ids=["all-ngram", "all-draft_model", "one_more-draft_model"],
)
def test_a_wrong_rule_of_acceptance_is_seen(monkeypatch, rule, speculative):
    monkeypatch.setattr(VerifyGraph, "_choose", rule)
    values = p_values(speculative)
    assert values[0] > 1e-3  # no draft is before the first token
    assert min(values[1:]) < 1e-9
