"""Refused arguments of adjust_logits and note_tokens; their cases run with all others."""

import pytest
import torch

from weft import ops
from weft.ops.vocab.adjust_logits import NO_TOKEN


def changes(slots=2, vocab=8):
    """Of nothing."""

    def full(value, dtype, *shape):
        return torch.full((slots, *shape), value, dtype=dtype)

    return ops.LogitChanges(
        bias=full(0, torch.float32, vocab),
        seen=full(0, torch.int32, vocab),
        repetition=full(1, torch.float32),
        frequency=full(0, torch.float32),
        presence=full(0, torch.float32),
        ends=full(NO_TOKEN, torch.int64, 2),
        first_end=full(0, torch.int64),
        bad_words=full(NO_TOKEN, torch.int64, 2, 4),
        recent=full(NO_TOKEN, torch.int64, 3),
        allowed=full(-1, torch.int32, 2),
    )


def test_wrong_arguments_are_refused():
    logits, rows = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logits has shape \(2, 7\); it must be \(B, 8\)"):
        ops.adjust_logits(logits[:, :7], 0, changes(), rows, rows)
    with pytest.raises(ValueError, match=r"changes.recent has shape \(2, 4\); it must be \(2, 3\)"):
        ops.adjust_logits(logits, 0, changes()._replace(recent=torch.zeros(2, 4, dtype=torch.int64)), rows, rows)
    with pytest.raises(ValueError, match="changes.seen has strides"):
        ops.note_tokens(changes()._replace(seen=torch.zeros(8, 2, dtype=torch.int32).t()), 0, rows, rows, rows)
    with pytest.raises(ValueError, match=r"changes.ends has shape \(2, 3\); pad its rows to powers of two"):
        ops.adjust_logits(logits, 0, changes()._replace(ends=torch.zeros(2, 3, dtype=torch.int64)), rows, rows)
    with pytest.raises(ValueError, match=r"allowed has shape \(2, 2\); bits of 60 token ids from 10 on take 3 columns"):
        ops.adjust_logits(torch.zeros(2, 60), 10, changes(vocab=60), rows, rows, guided=True)
    with pytest.raises(ValueError, match=r"rows has shape \(\); it must be \(B,\)"):
        ops.note_tokens(changes(), 0, rows[0], rows, rows)
    with pytest.raises(ValueError, match="changes=None is not a LogitChanges"):
        ops.note_tokens(None, 0, rows, rows, rows)
