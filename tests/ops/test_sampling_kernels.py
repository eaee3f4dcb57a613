"""sample_argmax and top_p_mass against plain torch, over ragged sizes, and compiled for every target."""

import pytest
import torch

from tests.compiling import TARGETS, compiled
from tests.ops.layer_cases import DEVICES, everywhere, random
from tests.ops.test_compile_layer_kernels import FP32, INTS, LONGS, caps_of
from tests.ops.test_compile_matmul import stack_bytes
from weft import ops
from weft.engine.sampling import gumbel
from weft.ops.vocab.sample_argmax import join_argmax, join_argmax_kernel, sample_argmax_kernel
from weft.ops.vocab.top_p_mass import LOWEST, SHIFTS, narrow, narrow_kernel, top_p_mass_kernel
from weft.runtime.capabilities import launch_options

SHAPES = [(1, 1), (1, 5000), (3, 1024), (5, 1025), (40, 70)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(batch, words, dtype, device):
    logits = random((batch, words), dtype, device) * 4
    logits[:, words // 3 : words // 3 + 2] = logits.amax(dim=1, keepdim=True)  # equal ones
    temperature = torch.linspace(0, 2, batch, device=device)
    seed, position = torch.arange(batch, device=device) * 12_345_678_901, torch.arange(batch, device=device)
    return logits, temperature, seed, position


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_best_words_are_those_of_the_scores(shape, dtype, device):
    def check(device):
        logits, temperature, seed, position = inputs(*shape, dtype, device)
        padded = torch.cat((logits, logits + 100), dim=1)[:, : shape[1]]  # strided rows
        assert join_argmax(ops.sample_argmax(padded, 7)).tolist() == (7 + logits.float().argmax(dim=1)).tolist()
        words = torch.arange(7, 7 + shape[1], device=device)
        scores = logits.float() + temperature[:, None] * gumbel(seed, position, words)
        floor = torch.full((shape[0],), LOWEST, dtype=torch.int32, device=device)
        for least in (None, floor):
            pairs = ops.sample_argmax(logits, 7, temperature, seed, position, least)
            assert join_argmax(pairs).tolist() == (7 + scores.argmax(dim=1)).tolist()
            torch.testing.assert_close(pairs[..., 0].amax(dim=0), scores.amax(dim=1), rtol=1e-5, atol=1e-5)
        # The floor is a logit as the integer of its bits, where it is positive.
        best = logits.float().amax(dim=1)
        positive = (best > 0).nonzero()[:, 0]
        pairs = ops.sample_argmax(logits, 0, temperature, seed, position, best.contiguous().view(torch.int32))
        kept = logits.float() == best[:, None]
        words = torch.arange(shape[1], device=device)
        scores = logits.float() + temperature[:, None] * gumbel(seed, position, words)
        expected = scores.masked_fill(~kept, -float("inf")).argmax(dim=1)
        assert join_argmax(pairs)[positive].tolist() == expected[positive].tolist()

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 5000), (3, 300), (17, 70)], ids=str)
def test_narrowing_ends_at_the_least_logit_that_top_p_keeps(shape, dtype, device):
    def check(device):
        logits, _, _, _ = inputs(*shape, dtype, device)
        batch = shape[0]
        temperature = torch.linspace(0.5, 2, batch, device=device)
        top_p = torch.linspace(0.3, 1.0, batch, device=device)
        low = torch.full((batch,), LOWEST, dtype=torch.int32, device=device)
        wanted = torch.zeros(batch, dtype=torch.int64, device=device)
        for shift in SHIFTS:
            above = ops.top_p_mass(logits, logits.float().amax(dim=1), temperature, low, shift)
            narrow(above, top_p, low, wanted, shift)
        for row in range(batch):
            if top_p[row] == 1:
                assert low[row] == LOWEST
                continue
            ordered, words = torch.softmax(logits[row].double() / temperature[row], -1).sort(descending=True)
            count = int((ordered.cumsum(-1) - ordered < top_p[row]).sum())
            least = logits[row, words[count - 1]].float()
            bits = (least + 0.0).view(torch.int32).item()
            assert low[row].item() == (bits if bits >= 0 else bits ^ 0x7FFFFFFF)

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("ranks", "parts", "batch"), [(1, 1, 1), (4, 3, 5), (2, 64, 2)])
def test_of_equal_scores_the_first_part_of_the_first_rank_has_the_word(ranks, parts, batch, device):
    def check(device):
        scores = random((ranks, parts, batch), torch.float32, device).round()
        words = torch.arange(scores.numel(), device=device).view_as(scores).float()
        expected = words.flatten(0, 1).gather(0, scores.flatten(0, 1).argmax(dim=0)[None])[0]
        found = join_argmax(torch.stack((scores, words), dim=-1))
        assert found.dtype == torch.int64 and found.tolist() == expected.tolist()

    everywhere(check, device)


def test_wrong_arguments_are_refused():
    logits, rows = torch.zeros(2, 8), torch.zeros(2)
    longs = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="a temperature needs random numbers; pass seed"):
        ops.sample_argmax(logits, 0, rows)
    with pytest.raises(ValueError, match=r"token ids 16777210 .. 16777217 are not in 0 .. 2\*\*24 - 1"):
        ops.sample_argmax(logits, (1 << 24) - 6)
    with pytest.raises(ValueError, match=r"seed has shape \(3,\); it must be \(2,\)"):
        ops.sample_argmax(logits, 0, rows, torch.zeros(3, dtype=torch.int64), longs)
    with pytest.raises(ValueError, match="logits.dtype=torch.int64 is not one of"):
        ops.sample_argmax(logits.long(), 0)
    with pytest.raises(ValueError, match=r"pairs has shape \(2, 8\); it must be \(.., B, 2\)"):
        join_argmax(logits)
    with pytest.raises(ValueError, match="shift=3 is not one of 28, 24"):
        ops.top_p_mass(logits, rows, rows, rows.int(), 3)


KERNELS = ("best", "drawn", "drawn with a floor", "join_argmax", "top_p_mass", "narrow", "narrow first")


def built(name, arch, dtype=torch.bfloat16):
    x, options = torch.zeros(16, dtype=dtype), launch_options(caps_of(arch))
    if name in KERNELS[:3]:
        sampled, floored = name != "best", name.endswith("floor")
        return compiled(
            sample_argmax_kernel, x, 16, FP32, LONGS, LONGS, INTS, FP32, 64, 32, 32, SAMPLED=sampled, FLOORED=floored,
            BLOCK=1024, arch=arch, **options,
        )  # fmt: skip
    if name == "join_argmax":
        return compiled(join_argmax_kernel, FP32, LONGS, 256, BLOCK=256, num_warps=1, arch=arch, **options)
    if name == "top_p_mass":
        constants = {"THRESHOLDS": 16, "BLOCK": 256}
        return compiled(
            top_p_mass_kernel, x, 16, FP32, FP32, INTS, LONGS, 64, 32, 28, arch=arch, **constants, **options
        )
    constants = {"FIRST": name.endswith("first"), "THRESHOLDS": 16, "num_warps": 1}
    return compiled(narrow_kernel, LONGS, FP32, INTS, LONGS, 8, 28, arch=arch, **constants, **options)


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles(arch, name):
    for dtype in DTYPES:
        kernel = built(name, arch, dtype)
        if arch.startswith("sm_"):
            assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (arch != "sm_80")


@pytest.mark.parametrize("name", KERNELS)
def test_machine_code_on_sm_90(name, tmp_path):
    kernel = built(name, "sm_90")
    ptx = kernel.asm["ptx"]
    assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]
    assert stack_bytes(kernel, tmp_path) == 0
