"""mla_decode_attention and mla_norm_rope: planted mistakes, refused arguments, parts of ranks; cases run with all ops'."""

import importlib

import pytest
import torch

import weft
from tests.compiling import SHARED, TARGETS, compiled, stack_bytes
from tests.ops.checking import assert_close, assert_identical
from tests.ops.layer_cases import check_refused, mutated
from weft import ops
from weft.kernels import latent_attention
from weft.kernels.latent_attention import HeadRows
from weft.kernels.paged_cache import CacheSizes, Sequences
from weft.ops.attention.mla_plan import EarlyBlocks, LatentBlocks, MLACall, blocks_for, early_blocks_for
from weft.ops.case import BF16, FP32, Case, Draw
from weft.plan.planned import machine
from weft.runtime.capabilities import Capabilities, launch_options, simulated

attention = importlib.import_module("weft.ops.attention.mla_decode_attention")
rows = importlib.import_module("weft.ops.attention.mla_norm_rope")
OP, ROWS = attention.MLA_DECODE_ATTENTION, rows.MLA_NORM_ROPE
SMALL = (4, 32, 16, 16)
SPLIT = LatentBlocks(block_m=16, block_n=16, least=16, splits=2, num_warps=1)
EARLY = EarlyBlocks(block_m=16, block_n=16, least=16, splits=1, num_warps=1)

# Mistakes in the attention, in its own file or in the kernels' one.
PLANTED = {
    "values from the rotary part on": (
        "accumulate(p, k, new",
        "accumulate(p, tl.load(cache + cells + TILE.rope + column, mask=there, other=0.0), new",
    ),
    "no rotary part in the scores": ("tl.dot(x_rope, k_rope.T, score, input", "tl.dot(x_rope * 0, k_rope.T, score, input"),
    "a split is dropped": ("if (start < end) | (split == 0):", "if ((start < end) & (split != 1)) | (split == 0):"),
    "a stale page": ("page = pages_at(table, at + BLOCK_N, end", "page = pages_at(table, at, end"),
    "a length of one more token": ("minimum((split + 1) * steps, length)", "minimum((split + 1) * steps, length + 1)"),
    "a length of one less token": ("< lengths[:, None], score", "< lengths[:, None] - 1, score"),
    "tokens see those after them": ("< lengths[:, None], score", "< end, score"),
    "a head of another token": ("row // TILE.heads, row % TILE.heads", "row // TILE.heads, row // TILE.queries % TILE.heads"),
    "lse to the base 2": ("log_sum / LOG2_OF_E", "log_sum"),
    "": ("", ""),
}  # fmt: skip
PLANTED_IN_EARLY = {
    "no rotary part in early scores": ("(score + rotary) * scale", "score * scale"),
    "early rows after the last token": ("tl.minimum(local, end - start - 1)", "local"),
    "early rows from a page's first on": ("cell_of(page, 0, start % SIZES.page, SIZES)", "cell_of(page, 0, 0, SIZES)"),
    "a stale early page": ("page = pages_held(table, at + BLOCK_N,", "page = pages_held(table, at,"),
    "the last early step is dropped": ("if at < end:", "if at + BLOCK_N < end:"),
    "early tokens see those after them": ("< lengths[:, None], (score", "< end, (score"),
    "early": ("", ""),
}


@pytest.mark.parametrize("name", [*PLANTED, *PLANTED_IN_EARLY])
def test_planted_mistakes_of_the_attention_are_found(name, tmp_path):
    planted, early = {**PLANTED, **PLANTED_IN_EARLY}, name in PLANTED_IN_EARLY
    (old, new), stem = planted[name], f"mla_{list(planted).index(name)}"
    with open(latent_attention.__file__) as file:
        in_kernels = bool(old) and old in file.read()
    mutant = attention
    if in_kernels:
        kernels = mutated(latent_attention, old, new, f"{stem}_kernels", tmp_path)
        mutant = mutated(attention, "from weft.kernels.latent_attention", f"from {kernels.__name__}", stem, tmp_path)
    elif old:
        mutant = mutated(attention, old, new, stem, tmp_path)

    def main(team):
        for fields in ({"lengths": (40, 0, 61, 16)}, {"lengths": (40, 41, 42, 9, 10, 0), "queries": 3}):
            design, page = (EARLY, 32) if early else (SPLIT, 16)
            case = attention.case_of(OP.name, (*SMALL[:3], page), FP32, design, **fields)
            inputs = OP.inputs(case, 0, Draw(case, 0, 0, "cpu"))
            for actual, wanted in zip(
                mutant.MLA_DECODE_ATTENTION.call(case, team, *inputs), OP.reference(case, 0, [inputs]), strict=True
            ):
                assert_close(actual, wanted, 100, partials=1, by_row=True, what=str(case))

    check_found(main, bool(old))


PLANTED_IN_ROWS = {
    "partners halves apart": ("if SIZES.interleaved:", "if False:"),
    "turned the other way": ("a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin"),
    "no norm": ("inverse_rms(squares_of(latent), eps, LATENT)[:, None]", "1.0"),
    "norm of the whole row": ("squares_of(latent), eps, LATENT)", "squares_of(latent), eps, LATENT + ROPE)"),
    "no weight": ("* tl.load(weight + column).to(tl.float32)", "* 1.0"),
    "padding is written": ("if slot >= 0:", "if True:"),
    "the key is not in the cache": ("        tl.store(cell + LATENT + half, key)\n", "        pass\n"),
    "": ("", ""),
}


@pytest.mark.parametrize("name", PLANTED_IN_ROWS)
def test_planted_mistakes_of_the_rows_are_found(name, tmp_path):
    mutant = mutated(rows, *PLANTED_IN_ROWS[name], f"mla_rows_{list(PLANTED_IN_ROWS).index(name)}", tmp_path)

    def main(team):
        case = attention.case_of(ROWS.name, SMALL, FP32, tokens=5, padded=(1,), interleaved=True)
        inputs = ROWS.inputs(case, 0, Draw(case, 0, 0, "cpu"))
        expected = ROWS.reference(case, 0, [inputs])
        for actual, wanted in zip(mutant.MLA_NORM_ROPE.forward(given(mutant, inputs)), expected, strict=False):
            assert_close(actual, wanted, 48)
        assert_close(inputs[-1], expected[-1], 48)

    check_found(main, bool(name))


def given(module, inputs):
    q, kv, weight, *places = inputs
    return module.MLARowArguments(q, kv, weight, Case.eps, *places, interleaved=True)


def check_found(main, planted):
    if planted:
        with pytest.raises((AssertionError, weft.errors.WeftError)):
            weft.simulate(main, 1)
    else:
        weft.simulate(main, 1)


def arguments(T=2, H=4, dtype=FP32):
    q, cache = torch.randn(T, H, 48, dtype=dtype), torch.randn(9, 16, 48, dtype=dtype)
    pages, lengths = torch.arange(4 * T, dtype=torch.int32).view(T, 4), torch.full((T,), 50, dtype=torch.int32)
    return {"q": q[..., :32], "q_rope": q[..., 32:], "cache": cache, "pages": pages, "lengths": lengths, "scale": 0.2}


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("q has shape (4, 32); it must be (T, H, L)", {"q": torch.ones(4, 32)}),
        ("q_rope has shape (2, 3, 16); it must be (2, 4, R)", {"q_rope": torch.ones(2, 3, 16)}),
        ("q_rope.dtype=torch.bfloat16 is not one of float32", {"q_rope": torch.ones(2, 4, 16).bfloat16()}),
        ("L=24 is not one of 16, 32", {"q": torch.ones(2, 4, 24)}),
        ("R=8 is not one of 16, 32, 64", {"q_rope": torch.ones(2, 4, 8)}),
        ("q has shape (2, 0, 32); pass 1 or more heads", {"q": torch.ones(2, 0, 32), "q_rope": torch.ones(2, 0, 16)}),
        ("cache has shape (9, 16, 40); it must be (pages, page_size, 48)", {"cache": torch.ones(9, 16, 40)}),
        ("has 1 or more pages, each of 16, 32, 64, 128, 256 tokens", {"cache": torch.ones(9, 8, 48)}),
        ("it is used in place, so it must be contiguous", {"cache": torch.ones(16, 9, 48).transpose(0, 1)}),
        ("cache.dtype=torch.float16 is not one of float32", {"cache": torch.ones(9, 16, 48).half()}),
        ("pages has shape (3, 4); it must be (2, max_pages)", {"pages": torch.zeros(3, 4).int()}),
        ("lengths.dtype=torch.int64 is not one of int32", {"lengths": torch.ones(2).long()}),
        ("q has 2 rows, which queries=3 does not divide", {"queries": 3}),
        ("queries=0", {"queries": 0}),
    ],
)
def test_wrong_arguments_of_the_attention_are_refused(message, fields):
    check_refused(lambda: ops.mla_decode_attention(**arguments() | fields), (), message)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("kv has shape (2, 40); it must be (2, 48)", {"kv": torch.ones(2, 40)}),
        ("weight has shape (1, 32); it must be (L,)", {"weight": torch.ones(1, 32)}),
        ("angles has shape (5, 8); it must be (max_positions, 16)", {"angles": torch.ones(5, 8)}),
        ("positions.dtype=torch.float32", {"positions": torch.ones(2)}),
        ("slots has shape (3,); it must be (2,)", {"slots": torch.ones(3).long()}),
        ("interleaved=3", {"interleaved": 3}),
    ],
)
def test_wrong_arguments_of_the_rows_are_refused(message, fields):
    whole = {
        "q_rope": torch.ones(2, 4, 16), "kv": torch.ones(2, 48), "weight": torch.ones(32), "eps": 1e-6,
        "angles": torch.ones(5, 16), "positions": torch.zeros(2).long(), "slots": torch.arange(2),
        "cache": torch.ones(3, 16, 48),
    }  # fmt: skip
    check_refused(lambda: ops.mla_norm_rope(**whole | fields), (), message)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("block_m=24 is not a power of two of at least 16", {"block_m": 24}),
        ("least=100 is not a multiple of block_n=64", {"least": 100}),
        ("splits=0 is not positive", {"splits": 0}),
    ],
)
def test_wrong_designs_are_refused(message, field):
    check_refused(lambda: LatentBlocks(**field), (), message)


def test_queries_may_lie_heads_first_and_calls_repeat():
    """As a GEMM of each head gives them; with splits, whose parts another kernel merges in order."""

    def main(team):
        one = arguments()
        expected = ops.mla_decode_attention(**one)
        one["q"] = one["q"].transpose(0, 1).contiguous().transpose(0, 1)
        for _ in range(2):
            for result, wanted in zip(ops.mla_decode_attention(**one), expected, strict=True):
                assert_identical(result, wanted)

    weft.simulate(main, 1)


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("kind", [LatentBlocks, EarlyBlocks])
def test_a_page_of_no_sequence_changes_nothing(kind, page):
    """Page 0 is NaN throughout; a step has 64 tokens, of one page or of several."""
    design = kind(block_m=16, block_n=64, least=64, splits=2, num_warps=1)

    def main(team):
        draw, count = torch.Generator().manual_seed(page), 128 // page
        q, q_rope = torch.randn(3, 4, 16, generator=draw), torch.randn(3, 4, 16, generator=draw)
        cache = torch.randn(1 + 3 * count, page, 32, generator=draw)
        pages = 1 + torch.arange(3 * count, dtype=torch.int32).view(3, count)
        lengths = torch.tensor([33, 70, 1], dtype=torch.int32)
        results = []
        for unused in (0.0, float("nan")):
            cache[0] = unused
            given = attention.MLAArguments(q, q_rope, cache, Sequences(pages, lengths), 0.2)
            results.append(OP.run(design, None, given))
        for result, expected in zip(*results, strict=True):
            assert_identical(result, expected)
            assert result.isfinite().all()

    weft.simulate(main, 1)


def test_parts_of_a_context_at_several_ranks_merge_to_the_whole():
    """Each rank attends to its pages; what they found, -inf where a rank has no token, is merged by merge_attention."""

    def main(team):
        whole, size = arguments(T=3), 16
        whole["lengths"] = torch.tensor([50, 20, 0], dtype=torch.int32)
        expected = ops.mla_decode_attention(**whole)
        parts = []
        for rank in range(3):
            tokens = [sum(t // size % 3 == rank for t in range(length)) for length in (50, 20, 0)]
            pages = whole["pages"][:, rank::3].contiguous()
            local = {"pages": pages, "lengths": torch.tensor(tokens, dtype=torch.int32)}
            parts.append(ops.mla_decode_attention(**whole | local))
        outs, lses = (torch.stack(part) for part in zip(*parts, strict=True))
        for result, wanted in zip(ops.merge_attention(outs, lses), expected, strict=True):
            assert_close(result, wanted.double(), 50)

    weft.simulate(main, 1)


def test_the_plan_takes_blocks_by_rows_and_splits_by_sequences():
    h200 = machine(simulated(1), 1)
    for (batch, heads, context), blocks, splits in (
        ((1, 16, 40000), (16, 64), 32), ((32, 16, 4096), (16, 64), 4), ((128, 16, 4096), (16, 32), 2),
        ((1, 128, 40000), (64, 64), 32), ((64, 128, 4096), (64, 64), 1),
    ):  # fmt: skip
        design = OP.plan(OP.call_of((batch, heads, context, 576), BF16, h200), h200).design
        assert (design.block_m, design.block_n, design.splits) == (*blocks, splits)
    told = str(ops.explain("mla_decode_attention", batch=2, heads=16, context=4096, width=576, world_size=1))
    assert "blocks of 16" in told and "16 rows of each of 2 sequences" in told


def caps_of(arch):
    return Capabilities(device_name=arch, arch=arch, sms=132, memory_bytes=0, peer_access=(True,))


def built(arch, heads, dtype=torch.bfloat16, sequences=8, rule=blocks_for, page=64):
    """The attention of DeepSeek's sizes, compiled with the design that the rule takes."""
    x, ints, caps = torch.zeros(16, dtype=dtype), torch.zeros(16, dtype=torch.int32), caps_of(arch)
    design = rule(MLACall(sequences, heads, 8192, 576, dtype), caps)
    tile = attention.tile_of(design, (heads, 512, 64), 1)
    q = HeadRows(x, heads * 512, 512), HeadRows(x, heads * 64, 64)
    options = {"num_warps": design.num_warps, "num_stages": design.num_stages, **launch_options(caps)}
    return compiled(
        attention.mla_decode_attention_kernel, *q, x, Sequences(ints, ints), torch.zeros(16), torch.zeros(16), 40, 0.1,
        arch=arch, SIZES=CacheSizes(1, page, 576), TILE=tile, **options,
    )  # fmt: skip


@pytest.mark.triton_internals
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("arch", TARGETS)
def test_the_attention_compiles_and_fits_without_a_stack(arch, heads, tmp_path):
    of_rows = {("sm_90", 16): [(torch.float32, 8), (torch.bfloat16, 128)], ("gfx942", 16): [(torch.float32, 8)]}
    for call in [(torch.bfloat16, 8), *of_rows.get((arch, heads), [])]:
        kernel = built(arch, heads, *call)
        assert kernel.metadata.shared <= SHARED[arch]
        if arch.startswith("sm_"):
            assert stack_bytes(kernel, tmp_path) == 0
        else:
            assert "private_segment_fixed_size: 0" in kernel.asm["amdgcn"]
    if arch == "sm_90":
        ptx = kernel.asm["ptx"]
        assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]
        assert ("wgmma.mma_async" in ptx) == (heads == 128)


@pytest.mark.triton_internals
def test_early_blocks_share_scores_and_fetch_before_they_multiply(tmp_path):
    """Of 128 heads on sm_90, with pages of a step and of two."""
    for page in (64, 128):
        kernel = built("sm_90", 128, rule=early_blocks_for, page=page)
        ptx, code = kernel.asm["ptx"], kernel.asm["ttgir"]
        assert kernel.metadata.shared <= SHARED["sm_90"] and stack_bytes(kernel, tmp_path) == 0
        # Each group: scores of 64 rows and 32 tokens, 576 elements 16 at a time; 256 columns of 64 tokens. No other layout.
        assert ptx.count("wgmma.mma_async.sync.aligned.m64n32k16") == 36
        assert ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 4
        assert (
            "warpsPerCTA = [4, 2], instrShape = [16, 32, 16]" in code and "warpsPerCTA = [8, 1], instrShape" not in code
        )
        loop = code[code.index("scf.for") :]
        assert loop.index("ttg.async_copy_global_to_local") < loop.index("ttng.warp_group_dot")
    late = built("sm_90", 128).asm
    assert late["ptx"].count("wgmma.mma_async.sync.aligned.m64n32k16") == 72
    loop = late["ttgir"][late["ttgir"].index("scf.for") :]
    assert loop.index("ttng.warp_group_dot") < loop.index("ttg.async_copy_global_to_local")


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_the_rows_compile_without_a_stack(arch, tmp_path):
    x, longs = torch.zeros(16, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int64)
    sizes = rows.RowSizes(512, 64, 128, 64, True)
    tensors = x, 3 * 576, x, 1e-6, torch.zeros(16), longs, longs, x, x, x
    options = launch_options(caps_of(arch))
    kernel = compiled(
        rows.mla_norm_rope_kernel, HeadRows(x, 128 * 192, 192), *tensors, arch=arch, SIZES=sizes, **options
    )
    assert kernel.metadata.shared <= SHARED[arch]
    if arch.startswith("sm_"):
        assert stack_bytes(kernel, tmp_path) == 0
