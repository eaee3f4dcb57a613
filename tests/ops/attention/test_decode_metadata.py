"""Refused arguments of decode_metadata; its cases run with all others."""

import pytest
import torch

from weft import ops


def test_wrong_arguments_are_refused():
    longs, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"pages has shape \(2, 3\); it must be \(3, max_pages\)"):
        ops.decode_metadata(torch.zeros(3, dtype=torch.int64), table, 16, 2)
    with pytest.raises(ValueError, match="positions.dtype=torch.int32 is not one of int64"):
        ops.decode_metadata(longs.int(), table, 16, 2)
