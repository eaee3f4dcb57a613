"""Kernels of the vocabulary and of the numbers of a step, compiled for every target; their machine code on sm_90."""

import re

import pytest
import torch

from tests.compiling import TARGETS, compiled
from tests.ops.test_compile_layer_kernels import FP32, INTS, LONGS, caps_of, check_compiles, check_machine_code
from tests.ops.vocab.test_sample_argmax import DTYPES
from weft import ops
from weft.ops.attention.decode_metadata import decode_metadata_kernel
from weft.ops.vocab import accept_drafts, draft_rows, ngram_drafts
from weft.ops.vocab.adjust_logits import ANY_TOKEN, adjust_logits_kernel
from weft.ops.vocab.note_tokens import note_tokens_kernel
from weft.ops.vocab.sample_argmax import join_argmax_kernel, sample_argmax_kernel
from weft.ops.vocab.top_p_mass import narrow_kernel, top_p_mass_kernel
from weft.ops.vocab.vocab_embedding import vocab_embedding_kernel
from weft.runtime.capabilities import launch_options


def sampling(x, **constants):
    arguments = x, 16, FP32, LONGS, LONGS, INTS, FP32, 64, 32, 32
    return sample_argmax_kernel, arguments, {"SAMPLED": True, "FLOORED": False, "BLOCK": 1024} | constants


def masses(x, **constants):
    arguments = x, 16, FP32, FP32, INTS, INTS, LONGS, 64, 32, 28
    return top_p_mass_kernel, arguments, {"COUNT": False, "FLOORED": False, "THRESHOLDS": 16, "BLOCK": 256} | constants


def narrowing(first):
    constants = {"FIRST": first, "THRESHOLDS": 16, "AT_ONCE": 64}
    return narrow_kernel, (LONGS, FP32, INTS, LONGS, 8, 28), constants


def adjusting(guided):
    of = ops.LogitChanges(FP32, INTS, FP32, FP32, FP32, LONGS, LONGS, LONGS, LONGS, INTS)
    constants = {"ENDS": 64, "WORDS": 128, "LENGTH": 16, "ALLOWED": 100, "ANY": ANY_TOKEN, "BLOCK": 1024}
    arguments = torch.zeros(16, dtype=torch.bfloat16), 16, LONGS, LONGS, of, FP32, 64, 3, 32
    return adjust_logits_kernel, arguments, constants | {"GUIDED": guided, "enable_fp_fusion": False}


def embedding():
    x = torch.zeros(16, dtype=torch.bfloat16)
    return vocab_embedding_kernel, (LONGS, x, x, 3, 8), {"WIDTH": 5120, "BLOCK": 1024}


PLACES = {"ROWS": 5, "PLACES": 8, "num_warps": 1}
# Kernel, arguments, constants; of the first ones for logits of a dtype.
OF_LOGITS = {
    "sample_argmax": lambda x: sampling(x, SAMPLED=False),
    "sample_argmax, drawn": sampling,
    "sample_argmax, with a floor": lambda x: sampling(x, FLOORED=True),
    "top_p_mass": masses,
    "top_p_mass, count": lambda x: masses(x, COUNT=True),
    "top_p_mass, with a floor": lambda x: masses(x, FLOORED=True),
}
KERNELS = {
    "join_argmax": lambda: (join_argmax_kernel, (FP32, LONGS, 256), {"BLOCK": 256, "num_warps": 1}),
    "narrow": lambda: narrowing(False),
    "narrow, first": lambda: narrowing(True),
    "adjust_logits": lambda: adjusting(False),
    "adjust_logits, guided": lambda: adjusting(True),
    "note_tokens": lambda: (note_tokens_kernel, (INTS, *[LONGS] * 4, 64, 3), {"LENGTH": 16, "num_warps": 1}),
    "accept_drafts": lambda: (accept_drafts.accept_drafts_kernel, (*[LONGS] * 5, 11), PLACES),
    "draft_rows": lambda: (
        draft_rows.draft_rows_kernel, (*[LONGS] * 4, 12, draft_rows.DraftRows(*[LONGS] * 5)), PLACES,
    ),
    "ngram_drafts": lambda: (
        ngram_drafts.ngram_drafts_kernel, (INTS, LONGS, LONGS, LONGS, 4097),
        {"DRAFTS": 4, "LEAST": 2, "MOST": 5, "PLACES": 4, "BLOCK": 1024, "num_warps": 4},
    ),
    "vocab_embedding": embedding,
    "decode_metadata": lambda: (
        decode_metadata_kernel, (LONGS, INTS, LONGS, LONGS, INTS, INTS, 2, 40, 4, 0),
        {"PAGE": 64, "RANKS": 1, "QUERIES": 1, "BLOCK": 128},
    ),
}  # fmt: skip


def built(name, arch, dtype=torch.bfloat16):
    made = OF_LOGITS[name](torch.zeros(16, dtype=dtype)) if name in OF_LOGITS else KERNELS[name]()
    kernel, arguments, constants = made
    return compiled(kernel, *arguments, arch=arch, **constants, **launch_options(caps_of(arch)))


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", [*OF_LOGITS, *KERNELS])
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles(arch, name):
    for dtype in DTYPES if name in OF_LOGITS else DTYPES[1:2]:
        check_compiles(built(name, arch, dtype), arch)


@pytest.mark.parametrize("name", [*OF_LOGITS, *KERNELS])
def test_machine_code_on_sm_90(name, tmp_path):
    kernel = built(name, "sm_90")
    check_machine_code(kernel, tmp_path)
    if name.startswith(("adjust_logits", "note_tokens")):
        assert not re.search(r"\bfma\.|div\.full|div\.approx", kernel.asm["ptx"])  # the reference's bits
