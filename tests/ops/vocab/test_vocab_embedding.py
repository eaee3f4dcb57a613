"""vocab_embedding against plain torch, over ragged sizes, and compiled for every target."""

import pytest
import torch

from tests.compiling import TARGETS, compiled
from tests.ops.layer_cases import DEVICES, everywhere, random
from tests.ops.test_compile_layer_kernels import LONGS, caps_of, check_compiles, check_machine_code
from weft import ops
from weft.ops.vocab.vocab_embedding import vocab_embedding_kernel
from weft.runtime.capabilities import launch_options


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "rows", "width"), [(1, 4, 8), (7, 5, 1030), (40, 100, 96), (0, 3, 8)])
def test_a_rank_has_the_rows_of_its_own_token_ids(tokens, rows, width, dtype, device):
    def check(device):
        weight = random((rows, width), dtype, device)
        token_ids = torch.randint(0, 3 * rows, (tokens,), generator=torch.Generator().manual_seed(1)).to(device)
        expected = torch.cat((torch.zeros_like(weight), weight, torch.zeros_like(weight)))[token_ids]
        assert torch.equal(ops.vocab_embedding(token_ids, weight, rows), expected)

    everywhere(check, device)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="tokens.dtype=torch.int32 is not one of int64"):
        ops.vocab_embedding(torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3), 0)


def built(arch):
    x, options = torch.zeros(16, dtype=torch.bfloat16), launch_options(caps_of(arch))
    return compiled(vocab_embedding_kernel, LONGS, x, x, 3, 8, WIDTH=5120, BLOCK=1024, arch=arch, **options)


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles(arch):
    check_compiles(built(arch), arch)


def test_machine_code_on_sm_90(tmp_path):
    check_machine_code(built("sm_90"), tmp_path)
