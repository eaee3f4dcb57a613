"""decode_metadata and vocab_embedding against plain torch, over ragged sizes, and compiled for every target."""

import pytest
import torch

from tests.compiling import TARGETS, compiled
from tests.ops.layer_cases import DEVICES, everywhere, random
from tests.ops.test_compile_layer_kernels import INTS, LONGS, caps_of
from tests.ops.test_compile_matmul import stack_bytes
from weft import ops
from weft.ops.attention.decode_metadata import decode_metadata_kernel
from weft.ops.vocab.vocab_embedding import vocab_embedding_kernel
from weft.runtime.capabilities import launch_options


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 1), (5, 2), (200, 1), (3, 100)])
def test_a_token_goes_where_the_page_table_says(batch, kv_heads, page_size, device):
    def check(device):
        generator = torch.Generator().manual_seed(batch)
        pages = torch.randperm(batch * 4, generator=generator).view(batch, 4).to(torch.int32)
        positions = torch.randint(-1, 4 * page_size, (batch,), generator=generator)
        found = ops.decode_metadata(positions.to(device), pages.to(device), page_size, batch * kv_heads)
        at, slots, lengths, tickets = (one.cpu() for one in found)
        for row, position in enumerate(positions.tolist()):
            real = position >= 0
            expected = int(pages[row, position // page_size]) * page_size + position % page_size if real else -1
            assert (at[row], slots[row], lengths[row]) == (max(position, 0), expected, position + 1)
        assert tickets.tolist() == [0] * (batch * kv_heads)
        assert (at.dtype, slots.dtype, lengths.dtype, tickets.dtype) == (torch.int64,) * 2 + (torch.int32,) * 2

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "rows", "width"), [(1, 4, 8), (7, 5, 1030), (40, 100, 96), (0, 3, 8)])
def test_a_rank_has_the_rows_of_its_own_words(tokens, rows, width, dtype, device):
    def check(device):
        weight = random((rows, width), dtype, device)
        words = torch.randint(0, 3 * rows, (tokens,), generator=torch.Generator().manual_seed(1)).to(device)
        expected = torch.cat((torch.zeros_like(weight), weight, torch.zeros_like(weight)))[words]
        assert torch.equal(ops.vocab_embedding(words, weight, rows), expected)

    everywhere(check, device)


def test_wrong_arguments_are_refused():
    longs, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"pages has shape \(2, 3\); it must be \(3, max_pages\)"):
        ops.decode_metadata(torch.zeros(3, dtype=torch.int64), table, 16, 2)
    with pytest.raises(ValueError, match="positions.dtype=torch.int32 is not one of int64"):
        ops.decode_metadata(longs.int(), table, 16, 2)
    with pytest.raises(ValueError, match="tokens.dtype=torch.int32 is not one of int64"):
        ops.vocab_embedding(longs.int(), torch.zeros(2, 3), 0)


KERNELS = ("decode_metadata", "vocab_embedding")


def built(name, arch):
    options = launch_options(caps_of(arch))
    if name == "decode_metadata":
        constants = {"PAGE": 64, "BLOCK": 128}
        return compiled(
            decode_metadata_kernel, LONGS, INTS, LONGS, LONGS, INTS, INTS, 2, 40, 4, arch=arch, **constants, **options
        )
    x = torch.zeros(16, dtype=torch.bfloat16)
    return compiled(vocab_embedding_kernel, LONGS, x, x, 3, 8, WIDTH=5120, BLOCK=1024, arch=arch, **options)


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles(arch, name):
    kernel = built(name, arch)
    if arch.startswith("sm_"):
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (arch != "sm_80")


@pytest.mark.parametrize("name", KERNELS)
def test_machine_code_on_sm_90(name, tmp_path):
    kernel = built(name, "sm_90")
    ptx = kernel.asm["ptx"]
    assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]
    assert stack_bytes(kernel, tmp_path) == 0
