"""ngram_drafts, draft_rows and accept_drafts: planted bugs and refused arguments; all cases run elsewhere."""

import pytest
import torch

import weft
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import mutated
from weft import ops
from weft.ops.case import Draw
from weft.ops.vocab import accept_drafts, draft_rows, ngram_drafts

# Module, name of its op, source that changes, what to.
PLANTED = {
    "an n-gram that ends with the newest token itself": (
        ngram_drafts, "NGRAM_DRAFTS", "equal = at < position\n", "equal = at <= position\n"),
    "the first n-gram of equally long ones": (
        ngram_drafts, "NGRAM_DRAFTS", "count * length + at, -1", "count * length - at, -1"),
    "n-grams that reach before the sequence": (ngram_drafts, "NGRAM_DRAFTS", "there = equal & (at >= back)", "there = equal"),
    "shorter n-grams than asked for": (ngram_drafts, "NGRAM_DRAFTS", "count >= LEAST", "count >= LEAST - 1"),
    "the newest token of the step before": (
        ngram_drafts, "NGRAM_DRAFTS", "                wanted = token\n", "                wanted = tl.load(row + position)\n"),
    "the newest token not noted": (ngram_drafts, "NGRAM_DRAFTS", "mask=position < length)", "mask=position < 0)"),
    "places beyond the newest token": (
        ngram_drafts, "NGRAM_DRAFTS", "% tl.maximum(position + 1 - first, 1)", "% tl.maximum(position + 2 - first, 1)"),
    "one draft more": (accept_drafts, "ACCEPT_DRAFTS", "place, ROWS), axis=0)\n", "place + 1, ROWS), axis=0)\n"),
    "a draft after a rejected one": (
        accept_drafts, "ACCEPT_DRAFTS", "tl.min(tl.where(rejected, place, ROWS), axis=0)",
        "1 + tl.sum((drafted & ~rejected).to(tl.int32), axis=0)"),
    "a draft compared with its row's own token": (accept_drafts, "ACCEPT_DRAFTS", "+ place - 1, mask", "+ place, mask"),
    "a slot without a sequence goes on": (accept_drafts, "ACCEPT_DRAFTS", "tl.where(first >= 0, count, 0)", "count"),
    "the rejected draft for the newest token": (
        accept_drafts, "ACCEPT_DRAFTS", "place == count - 1, token", "place == count - 1, row"),
    "rows without a draft counted": (
        accept_drafts, "ACCEPT_DRAFTS", "drafted = (place > 0) & (row >= 0)", "drafted = place > 0"),
    "a row after a missing draft": (draft_rows, "DRAFT_ROWS", "(place < missing)", "((draft >= 0) | (place == 0))"),
    "a row beyond the last position": (draft_rows, "DRAFT_ROWS", "(begin + place <= end)", "(begin + place <= end + 1)"),
    "rows of an empty slot": (draft_rows, "DRAFT_ROWS", "begin >= 0", "begin >= -1"),
    "the draft of another place": (draft_rows, "DRAFT_ROWS", "* stride + place - 1", "* stride + (place - 1) // 2"),
    "the newest token counted as known": (draft_rows, "DRAFT_ROWS", "tl.where(place == 0, 0, tokens)", "tokens"),
    "tokens drawn for their rows' places": (draft_rows, "DRAFT_ROWS", "begin + place + 1, 0)", "begin + place, 0)"),
}  # fmt: skip


def differs(op, reference):
    """True if the op gives something else than the reference for some case."""

    def main(team):
        for case in reference.cases():
            inputs = reference.inputs(case, 0, Draw(case, 0, 0, "cpu"))
            expected = reference.reference(case, 0, [inputs])
            arguments = [x.clone() for x in inputs]
            result = op.forward(*arguments, *(case.field("options") or ()))
            written = {"ngram_drafts": arguments[:1], "accept_drafts": arguments[2:], "draft_rows": []}[op.name]
            given = (*(result if isinstance(result, tuple) else (result,)), *written)
            if any(not torch.equal(*pair) for pair in zip(given, expected, strict=True)):
                return True
        return False

    return weft.simulate(main, 1)[0]


@pytest.mark.parametrize("name", ["", *PLANTED])
def test_the_cases_find_a_planted_bug(name, tmp_path):
    whole = [
        (one, one.__name__.rpartition(".")[2].upper(), "", "") for one in (ngram_drafts, accept_drafts, draft_rows)
    ]
    for module, op, old, new in [PLANTED[name]] if name else whole:
        mutant = mutated(module, old, new, f"drafts_mutant_{len(name)}", tmp_path)
        assert differs(getattr(mutant, op), getattr(module, op)) == bool(name)


def test_wrong_arguments_are_refused():
    history, longs = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"newest has shape \(3,\); it must be \(2,\)"):
        ops.ngram_drafts(history, torch.zeros(3, dtype=torch.int64), longs, 2, 1, 2)
    with pytest.raises(ValueError, match=r"least=3 is not an integer in 1 .. 2"):
        ops.ngram_drafts(history, longs, longs, 2, 3, 2)
    with pytest.raises(ValueError, match="history has strides"):
        ops.ngram_drafts(torch.zeros(8, 2, dtype=torch.int32).t(), longs, longs, 2, 1, 2)
    rows = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"chosen has shape \(2, 0\); pass 1 or more rows"):
        ops.accept_drafts(rows[:, :0], rows[:, :0], longs, rows)
    with pytest.raises(ValueError, match="results has 4 columns; it needs 5"):
        ops.accept_drafts(rows, rows, longs, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"rows has shape \(2, 2\); it must be \(2, 3\)"):
        ops.accept_drafts(rows, rows[:, 1:], longs, torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"last has shape \(3,\); it must be \(2,\)"):
        ops.draft_rows(longs, torch.zeros(3, dtype=torch.int64), longs, rows)
    with pytest.raises(ValueError, match=r"proposed has shape \(2,\); it must be \(2, k\)"):
        ops.draft_rows(longs, longs, longs, longs)
    with pytest.raises(ValueError, match="proposed.dtype=torch.int32 is not one of int64"):
        ops.draft_rows(longs, longs, longs, rows.int())


def test_an_empty_batch_is_no_launch():
    def main(team):
        none = torch.zeros(0, dtype=torch.int64)
        drafts = ops.ngram_drafts(torch.zeros(0, 8, dtype=torch.int32), none, none, 3, 1, 2)
        counts = ops.accept_drafts(none.view(0, 4), none.view(0, 4), none, none.view(0, 6))
        assert_identical(drafts, none.view(0, 3))
        assert_identical(counts, none)
        assert ops.draft_rows(none, none, none, none.view(0, 3)).known.shape == (0, 4)

    weft.simulate(main, 1)
