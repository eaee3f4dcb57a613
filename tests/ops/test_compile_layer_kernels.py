"""The local kernels of a decode layer compile for every target and fit it."""

import re

import pytest
import torch

from tests.compiling import SHARED, TARGETS, broken_sums, compiled, stack_bytes, sums_of
from tests.sampled import sampled
from weft.kernels.fp8 import E4M3, RowFormat, rows_argument
from weft.kernels.online_softmax import PrefillTile, ScoreRule
from weft.kernels.paged_cache import CacheSizes, PagedCache, Sequences
from weft.kernels.projected import Projected, ProjectedSizes
from weft.kernels.rotary import HeadNorms
from weft.kernels.split_kv import HeadGates, Partials
from weft.ops.attention.decode_attention import decode_attention_kernel
from weft.ops.attention.decoding import DecodingCall, is_turned, programs_per_sm, split_kv_for, tile_of
from weft.ops.attention.paged_attention import paged_attention_kernel
from weft.ops.attention.paged_prefill_attention import (
    PrefillCall,
    key_blocks_for,
    paged_prefill_attention_kernel,
)
from weft.ops.attention.qk_norm_rope import TILE, qk_norm_rope_kernel
from weft.ops.attention.sequence_ranges import SequenceRanges
from weft.ops.elementwise.add_rms_norm import add_rms_norm_kernel, warps_of
from weft.ops.elementwise.sigmoid_mul import sigmoid_mul_kernel
from weft.ops.elementwise.silu_mul import silu_mul_kernel
from weft.runtime.capabilities import Capabilities, launch_options

KERNELS = (
    "silu_mul", "sigmoid_mul", "add_rms_norm", "qk_norm_rope", "qk_norm_rope_of_parts", "paged_attention",
    "paged_attention_whole", "paged_attention_few", "decode_attention", "decode_attention_of_parts",
    "paged_prefill_attention",
)  # fmt: skip
# Heads that are only rotated, with a bias; a window of 100 tokens; GELU; norms' weights in fp32; sinks and a soft cap; squares
# that are added in pairs.
WITH_OPTIONS = (
    "qk_norm_rope_biased", "decode_attention_biased_window", "paged_attention_window", "paged_prefill_attention_window",
    "paged_attention_few_window", "silu_mul_gelu", "add_rms_norm_wide", "qk_norm_rope_wide", "decode_attention_wide",
    "decode_attention_scored", "decode_attention_gated", "paged_attention_scored", "paged_attention_few_window_scored",
    "paged_prefill_attention_window_scored", "add_rms_norm_invariant",
    "qk_norm_rope_of_parts_invariant",
)  # fmt: skip
# New tokens of a sequence in paged_attention_few.
FEW = 4
# With results in fp8.
IN_FP8 = (
    "silu_mul_fp8", "add_rms_norm_fp8", "add_rms_norm_beside_fp8", "decode_attention_of_parts_fp8",
    "paged_prefill_attention_fp8", "decode_attention_gated_fp8",
)  # fmt: skip
INTS, LONGS, FP32 = (torch.zeros(16, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.float32))


def caps_of(arch):
    return Capabilities(device_name=arch, arch=arch, sms=132, memory_bytes=0, peer_access=(True,))


def built(name, arch, dtype=torch.bfloat16, D=128, group=8, page=64, pairs=2):
    x, caps = torch.zeros(16, dtype=dtype), caps_of(arch)
    options = launch_options(caps)
    out, fp8, weight = x, None, FP32 if name.endswith("wide") else x
    if name.endswith("fp8"):
        beside = (x,) if "beside" in name else ()
        out, fp8 = x.to(E4M3), rows_argument(torch.zeros(40, 128).t(), RowFormat("group"), dtype, 128, *beside)
    if name.startswith("silu_mul"):
        activation = "gelu_tanh" if "gelu" in name else "silu"
        constexprs = {"ROWS": 4, "BLOCK": 512 if fp8 else 256, "SQUARES": 20, "ACTIVATION": activation}
        return compiled(silu_mul_kernel, x, 12800, FP32, 1e-6, out, 128, 6400, fp8, arch=arch, **constexprs, **options)
    if name == "sigmoid_mul":
        arguments = x, 3072, x, 7168, out, 128, 3072, fp8
        return compiled(sigmoid_mul_kernel, *arguments, arch=arch, ROWS=4, BLOCK=256, **options)
    if name.startswith("add_rms_norm"):
        warps = warps_of(5120 * dtype.itemsize)
        constexprs = {"WIDTH": 5120, "BLOCK": 8192, "num_warps": warps, "INVARIANT": "invariant" in name}
        return compiled(add_rms_norm_kernel, x, x, weight, out, x, 1e-6, fp8, arch=arch, **constexprs, **options)
    in_parts, biased, window = "of_parts" in name, "biased" in name, 100 if "window" in name else None
    scores = ScoreRule(0.1, 0.2, x) if name.endswith("scored") else ScoreRule(0.1)
    bias = x if biased else None
    qkv = ProjectedSizes(3, 0) if in_parts else ProjectedSizes(1, 20)
    sizes, cache, norms = (
        CacheSizes(2, page, D),
        PagedCache(x, x),
        HeadNorms(*((None, None) if biased else (weight, weight)), 1e-6),
    )
    if name.startswith("qk_norm_rope"):
        projected = Projected(FP32 if in_parts else x, 20 * D, 64 * D if in_parts else 0, FP32, 1e-6, bias)
        kept = 18 if in_parts else 20 if biased else 16
        constexprs = {"SIZES": sizes, "Q_HEADS": 16, "KEPT": kept, "ROWS": TILE // D, "QKV": qkv}
        if "invariant" in name:
            constexprs |= {"INVARIANT": True, "enable_fp_fusion": False}
        arguments = projected, norms, FP32, INTS, LONGS, x, cache, 640
        return compiled(qk_norm_rope_kernel, *arguments, arch=arch, **constexprs, **options)
    if name.startswith("paged_prefill_attention"):
        spans = SequenceRanges.make([(0, 128)], group, dtype)
        config = key_blocks_for(PrefillCall(2 * len(spans.tiles), 2, 128, D, dtype), caps)
        constexprs = {"SIZES": sizes, "TILE": PrefillTile(group, spans.block_m, config.block_n, window)}
        constexprs |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
        arguments = x, cache, INTS, out, INTS, INTS, 40, scores, fp8
        return compiled(paged_prefill_attention_kernel, *arguments, arch=arch, **constexprs, **options)
    config = split_kv_for(DecodingCall(pairs, 1 << 20, D, dtype), caps)
    queries = FEW if "_few" in name else 1
    turned = is_turned(D, dtype.itemsize, dtype.itemsize, caps)
    tile = tile_of(config, group=group, D=D, window=window, queries=queries, q_heads=2 * group, turned=turned)
    tile = tile._replace(split=name != "paged_attention_whole")
    constexprs = {"SIZES": sizes, "TILE": tile, "num_warps": config.num_warps, "num_stages": config.num_stages}
    arguments = cache, Sequences(INTS, INTS), out, Partials(FP32, FP32, INTS), 40, scores
    if name.startswith("paged_attention"):
        return compiled(paged_attention_kernel, x, *arguments, arch=arch, QUERIES=queries, **constexprs, **options)
    projected = Projected(FP32 if in_parts else x, (2 * group + 4) * D, 16 * D, FP32, 1e-6, bias)
    gate = HeadGates(x, 64 * D) if "gated" in name else None
    arguments = projected, norms, FP32, *arguments, fp8, gate
    return compiled(decode_attention_kernel, *arguments, arch=arch, QKV=qkv, **constexprs, **options)


def check_compiles(kernel, arch):
    """The kernel waits for the one before it where ``arch`` has programmatic dependent launch."""
    if arch.startswith("sm_"):
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (arch != "sm_80")


def check_machine_code(kernel, directory, spilled=0):
    """sm_90: nothing is loaded before the kernel before has finished, no thread has a stack, descriptors are whole.

    spilled  bytes of registers that a thread may spill
    """
    ptx = kernel.asm["ptx"]
    assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]
    assert stack_bytes(kernel, directory) <= spilled
    assert broken_sums(kernel, directory) == []


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", [*KERNELS, *(pytest.param(name, marks=pytest.mark.sweep) for name in WITH_OPTIONS)])
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles_and_fits(arch, name):
    # fp32 on one GPU of each maker: what it adds differs by maker, and it takes seconds to compile. fp16 is compiled below.
    for dtype in (torch.bfloat16, *((torch.float32,) if arch in ("sm_90", "gfx942") else ())):
        kernel = built(name, arch, dtype)
        assert kernel.metadata.shared <= SHARED[arch], dtype
        check_compiles(kernel, arch)


@pytest.mark.parametrize(
    ("dtype", "D", "group", "page"),
    sampled(
        [
            *((torch.float16, 64, 1, 16), (torch.float32, 256, 4, 256)),
            *((torch.float32, 16, 3, 16), (torch.float16, 128, 40, 32)),
        ],
        lambda dtype, D, group, page: page == 16,
    ),
)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("name", ["qk_norm_rope", "paged_attention", "paged_prefill_attention", "decode_attention"])
def test_other_heads_compile_and_fit(name, arch, dtype, D, group, page):
    assert built(name, arch, dtype, D, group, page).metadata.shared <= SHARED[arch]


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_options_compile_and_fit_a_gpu_of_the_other_maker(name):
    assert built(name, "gfx942").metadata.shared <= SHARED["gfx942"]


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", IN_FP8)
def test_fp8_results_compile_and_fit_a_gpu_of_the_other_maker(name):
    assert built(name, "gfx942").metadata.shared <= SHARED["gfx942"]


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", [name for name in IN_FP8 if not name.startswith("silu_mul")])
def test_rows_in_fp8_come_of_the_sums_of_16_bits(name):
    """Sums have one order, so a row in fp8 is that of the row in 16 bits."""
    plain = name.removesuffix("_fp8").removesuffix("_beside")
    rows, halves = (sums_of(built(one, "sm_90")) for one in (name, plain))
    assert rows == halves
    assert rows


@pytest.mark.parametrize("name", [*KERNELS, *WITH_OPTIONS, *IN_FP8])
def test_machine_code_on_sm_90(name, tmp_path):
    kernel = built(name, "sm_90")
    ptx = kernel.asm["ptx"]
    check_machine_code(kernel, tmp_path)
    assert "cp.async.cg" not in ptx[: ptx.index("griddepcontrol.wait")]
    assert "griddepcontrol.launch_dependents" in ptx
    assert re.search(r"st\.global(\.\w+)*\.v[24]\.b32" if name in IN_FP8 else r"st\.global(\.\w+)*\.v4\.b32", ptx)
    if name.startswith("decode"):
        # But for single heads of 128, for which there are 128 threads: queries and their partners.
        assert len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", ptx)) >= (12 if "parts" in name else 4)
    else:
        alone = "st" if name.endswith("scored") else "(st|ld)"  # a head's sink is one element
        assert not re.search(alone + r"\.global(\.\w+)*\.b16", ptx), "an element moves alone"
    if name.startswith(("paged", "decode")):
        instruction = "wgmma.mma_async" if "prefill" in name or "few" in name else "mma.sync"
        assert "cp.async.cg.shared.global" in ptx and instruction in ptx


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(("name", "group"), [("decode_attention_gated", 6), ("paged_attention", 8)])
def test_heads_of_256_multiply_keys_by_queries(name, group, arch, tmp_path):
    """Half as many tensor instructions as with 16 rows of queries; keys and values are loaded ahead, the values turned."""
    for pairs in (2, 64, 256):
        kernel = built(name, arch, D=256, group=group, pairs=pairs)
        assert kernel.metadata.shared <= SHARED[arch]
        check_compiles(kernel, arch)
        loop = kernel.asm["ttgir"].partition("scf.for")[2].partition("scf.yield")[0]
        assert loop.count("ttg.async_copy_global_to_local") == 2 and "tt.trans" not in loop
        assert stack_bytes(kernel, tmp_path) <= 64, "a few pointers"
        assert kernel.asm["ptx"].count("mma.sync") == 32


@pytest.mark.parametrize("name", ["paged_attention", "decode_attention"])
@pytest.mark.parametrize(
    "pairs", sampled(zip((2, 16, 17, 132, 198, 199, 528, 529, 1056)), lambda pairs: pairs in (16, 132, 529))
)
def test_as_many_programs_of_attention_fit_an_sm_90_as_are_counted_on(pairs, name):
    """228 KiB, of which 1 a program is the system's, and 65,536 registers."""
    kernel = built(name, "sm_90", pairs=pairs)
    caps = caps_of("sm_90")
    config, per_sm = split_kv_for(DecodingCall(pairs, 1 << 20, 128, torch.bfloat16), caps), programs_per_sm(pairs, caps)
    assert per_sm == (2 if pairs <= 16 else 1)
    held = min((228 << 10) // (kernel.metadata.shared + 1024), 65536 // (config.num_warps * 32 * 256))
    assert held >= max(per_sm, -(-pairs // 132)), "at 255 registers a thread"


def test_a_partial_is_stored_before_its_arrival():
    """PTX of sm_90: the stores of a partial, a CTA barrier, the arrival that acquires and releases."""
    ptx = built("paged_attention", "sm_90").asm["ptx"]
    arrival = ptx.index("atom.global.gpu.acq_rel.add")
    barrier = ptx.rindex("bar.sync", 0, arrival)
    assert ptx.rindex("st.global.v4.b32", 0, arrival) < barrier
