"""vocab_embedding compiled for every target, and refused arguments; its cases run with all others."""

import pytest
import torch

from tests.compiling import TARGETS, compiled
from tests.ops.test_compile_layer_kernels import LONGS, caps_of, check_compiles, check_machine_code
from weft import ops
from weft.ops.vocab.vocab_embedding import vocab_embedding_kernel
from weft.runtime.capabilities import launch_options


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
