"""Refused arguments of vocab_embedding; its cases run with all others."""

import pytest
import torch

from weft import ops


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="tokens.dtype=torch.int32 is not one of int64"):
        ops.vocab_embedding(torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3), 0)
