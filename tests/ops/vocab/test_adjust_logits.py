"""adjust_logits and note_tokens compiled for every target, and refused arguments; their cases run with all others."""

import re

import pytest
import torch

from tests.compiling import TARGETS, compiled
from tests.ops.test_compile_layer_kernels import FP32, INTS, LONGS, caps_of, check_compiles, check_machine_code
from weft import ops
from weft.ops.vocab.adjust_logits import ANY_TOKEN, NO_TOKEN, adjust_logits_kernel
from weft.ops.vocab.note_tokens import note_tokens_kernel
from weft.runtime.capabilities import launch_options


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


def built(name, arch):
    options = launch_options(caps_of(arch))
    if name == "note_tokens":
        return compiled(
            note_tokens_kernel, INTS, LONGS, LONGS, LONGS, LONGS, 64, 3, LENGTH=16, num_warps=1, arch=arch, **options
        )
    of = ops.LogitChanges(FP32, INTS, FP32, FP32, FP32, LONGS, LONGS, LONGS, LONGS, INTS)
    constants = {"ENDS": 64, "WORDS": 128, "LENGTH": 16, "ALLOWED": 100, "ANY": ANY_TOKEN, "BLOCK": 1024}
    constants |= {"GUIDED": name.endswith("guided"), "enable_fp_fusion": False, **options}
    arguments = torch.zeros(16, dtype=torch.bfloat16), 16, LONGS, LONGS, of, FP32, 64, 3, 32
    return compiled(adjust_logits_kernel, *arguments, arch=arch, **constants)


KERNELS = ("adjust_logits", "adjust_logits guided", "note_tokens")


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles(arch, name):
    check_compiles(built(name, arch), arch)


@pytest.mark.parametrize("name", KERNELS)
def test_machine_code_on_sm_90(name, tmp_path):
    kernel = built(name, "sm_90")
    check_machine_code(kernel, tmp_path)
    assert not re.search(r"\bfma\.|div\.full|div\.approx", kernel.asm["ptx"])  # the reference's bits
