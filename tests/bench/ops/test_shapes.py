"""What the words on the command line mean, and what the hardware allows for it."""

import pytest

from weft.bench.models.steps import config_of
from weft.bench.names import alias_of
from weft.bench.ops.moe_shapes import MIXTURES, SEEN_TOKENS, SENT_TOKENS
from weft.bench.ops.shapes import DECODE_ROWS, MODELS, OPS, ROWS, op_of, parse_shapes
from weft.models import Qwen3Config
from weft.ops.moe.moe_op import MoeShape

NORMED = "all-reduce-rms-norm"


def sizes(op, *words, world_size=4, **more):
    return [shape.size for shape in parse_shapes(op, words, world_size, **more)]


@pytest.mark.parametrize(
    ("op", "word", "expected"),
    [
        ("ag-gemm", "qwen3-32b/qkv:4096", (4096, 2560, 5120)),
        ("ag-gemm", "qwen3-32b/gate-up:4096", (4096, 12800, 5120)),
        ("gemm-rs", "qwen3-32b/o:4096", (4096, 5120, 2048)),
        ("gemm-ar", "qwen3-32b/down:1", (1, 5120, 6400)),
        ("gemm", "llama3-70b/qkv:16", (16, 2560, 8192)),
        ("gemm", "llama3-70b/down:16", (16, 8192, 7168)),
        ("ag-gemm", "symm-mem-recipes/105b:16384", (16384, 6656, 16384)),
        ("gemm-rs", "symm-mem-recipes/105b:16384", (16384, 16384, 6656)),
        ("ag-gemm", "128,48,64", (128, 48, 64)),
    ],
)
def test_one_rank_of_four_computes(op, word, expected):
    assert sizes(op, word) == [expected]


def test_named_sets_have_all_rows_that_divide():
    found = sizes("ag-gemm", "qwen3-32b")
    assert len(found) == 2 * len([m for m in ROWS if m % 4 == 0])
    assert len(sizes("gemm-ar", "qwen3-32b")) == 2 * len(ROWS)
    assert len(sizes("gemm", "llama3-70b")) == 4 * len(ROWS)
    assert len(sizes("ag-gemm", "symm-mem-recipes")) == 9


def test_the_set_of_a_published_model_has_its_sizes():
    model, config = MODELS["qwen3-32b"], Qwen3Config.named("qwen3-32b")
    assert (model.hidden, model.intermediate) == (config.hidden_size, config.intermediate_size)
    heads = config.num_attention_heads, config.num_key_value_heads
    assert (model.query, model.key_value) == tuple(count * config.head_dim for count in heads)


def test_an_op_is_named_by_its_alias_or_its_name():
    assert {alias_of(op_of(name).name) for name in OPS} == set(OPS)
    assert sizes("all_gather_matmul", "4,16,32") == sizes("ag-gemm", "4,16,32") == [(4, 16, 32)]


def test_sets_and_sizes_are_listed_with_commas():
    both = sizes("gemm", "qwen3-32b", "llama3-70b")
    assert sizes("gemm", "qwen3-32b,llama3-70b") == both
    assert sizes("gemm", "8,16,32,Qwen3-32B/o:1,2, llama3-70b/o:4") == [
        (8, 16, 32), (1, 5120, 2048), (2, 5120, 2048), (4, 8192, 2048),
    ]  # fmt: skip
    assert sizes("gemm", "qwen3-32b,8,16,32") == [*sizes("gemm", "qwen3-32b"), (8, 16, 32)]
    assert sizes(NORMED, "qwen3-32b:1,2,llama3-70b:4", "6,6144") == [(1, 5120), (2, 5120), (4, 8192), (6, 6144)]
    assert sizes("all-reduce", "sizes,4096, 12KiB") == [*sizes("all-reduce"), (12288,)]


def test_collectives_take_bytes_and_powers_of_four():
    assert sizes("all-reduce", "64KiB,1MiB", "4096", "65536") == [(65536,), (1 << 20,), (4096,)]
    assert sizes("all-reduce", "4KB,4K,4kib,2M,1GB,16B") == [(4096,), (2 << 20,), (1 << 30,), (16,)]
    with pytest.raises(ValueError, match="'4TB' is neither"):
        sizes("all-reduce", "4TB")
    assert sizes("all-gather")[0] == (1024,)
    assert sizes("all-gather")[-1] == (256 << 20,)
    assert [shape.label for shape in parse_shapes("all-reduce", ["74752,64KiB,1000"], 2)] == [
        "73 KiB",
        "64 KiB",
        "1000 B",
    ]
    assert all(size % 48 == 0 for (size,) in sizes("all-to-all", world_size=3))


def test_rows_between_layers():
    assert sizes(NORMED) == [(m, 5120) for m in DECODE_ROWS]
    assert sizes(NORMED, "llama3-70b:1,16", "6,6144", "16,8192") == [(1, 8192), (16, 8192), (6, 6144)]


def test_rows_have_16_bytes_or_a_multiple_up_to_64_kib():
    assert sizes(NORMED, "1,32768", dtype="fp16") == [(1, 32768)]
    assert sizes(NORMED, "1,16384", "3,12", dtype="fp32") == [(1, 16384), (3, 12)]
    for word, dtype, message in (
        ("1,32776", "bf16", "32776 elements of bf16 have 65552 bytes; take 1,32768"),
        ("3,12", "bf16", "12 elements of bf16 have 24 bytes; take 3,16"),
        ("1,32768", "fp32", "32768 elements of fp32 have 131072 bytes; take 1,16384"),
        ("3,10", "fp32", "10 elements of fp32 have 40 bytes; take 3,12"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_shapes(NORMED, [word], 2, dtype=dtype)


def test_a_rank_holds_its_share_of_the_experts_of_a_published_mixture():
    for op, tokens in (("moe-dispatch", SENT_TOKENS), ("grouped-gemm", SEEN_TOKENS)):
        found = [MoeShape(*size) for size in sizes(op, "qwen3-30b-a3b")]
        assert found == [MoeShape(count, 8, 128, 32, 2048, 768, 0) for count in tokens]
    assert sizes("moe-combine", "kraken-a2a,deepseek-v3/zipf:1,128", world_size=2) == [
        (4096, 1, 8, 4, 4096, 4096, 0), (1, 8, 256, 128, 7168, 2048, 1), (128, 8, 256, 128, 7168, 2048, 1),
    ]  # fmt: skip
    assert sizes("moe-sum", "4,8,128,128,2048,384", "4,8,128,128,2048,384,1") == [
        (4, 8, 128, 128, 2048, 384, 0), (4, 8, 128, 128, 2048, 384, 1),
    ]  # fmt: skip
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b"):
        mixture, config = MIXTURES[name], config_of(name)
        experts = config.experts
        assert (mixture.experts, mixture.k) == (experts.num_experts, experts.num_experts_per_tok)
        assert (mixture.hidden, mixture.features) == (config.hidden_size, experts.intermediate_size)


@pytest.mark.parametrize("op", OPS)
def test_the_simulator_gets_tiny_ones(op):
    for world_size in (1, 2, 3, 8):
        for size in sizes(op, tiny=True, world_size=world_size):
            assert max(size) <= 12 << 10


@pytest.mark.parametrize(
    ("op", "word", "message"),
    [
        ("all-to-al", "", "choose one of .*all-gather, all-reduce"),
        ("gemm", "qwen4", "neither a set"),
        ("gemm", "qwen3-32b/qvk", "it has qkv, gate-up, o, down"),
        ("ag-gemm", "qwen3-32b/down", "it has qkv, gate-up"),
        ("gemm", "1,2", "not M,N,K"),
        ("gemm", "1,2,0", "not M,N,K"),
        ("gemm-rs", "33,16,16", "take 36"),
        ("ag-gemm", "qwen3-32b:1023", "M=1023 divisible by world_size=4; take 1024"),
        ("gemm-rs", "qwen3-32b/o:1024,6", "M=6 divisible by world_size=4; take 8"),
        ("gemm", "qwen3-32b:0", "0 are not rows"),
        ("gemm", "qwen3-32b:1,,2", "1,,2 are not rows"),
        ("all-reduce", "10", "take 16"),
        ("all-reduce", "Qwen3-32B", "--shapes 'Qwen3-32B' is neither a set"),
        ("gemm", "Qwen4", "--shapes 'Qwen4' is neither a set"),
        ("all-reduce", "10B", "--shapes 10B: 10 bytes do not"),
        ("all-reduce", "0", "neither a set"),
        ("moe-dispatch", "qwen3-30b", "neither a set .qwen3-30b-a3b, qwen3-235b-a22b, "),
        (
            "moe-dispatch",
            "128,8,256,128,7168,2048",
            "held=128 is not the share of each of 4 ranks .*; take experts=512",
        ),
        ("grouped-gemm", "4,2,9,2,32,32", "held=2 does not divide experts=9"),
        ("route", "4,8,4,1,32,32", "k=8 is more than experts=4 or 16"),
        ("route", "4,2,4,1,36,32", "hidden=36 of bf16 is no multiple of 16 bytes; take 40"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(op, word, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_shapes(op, [word] if word else [], 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("op", "word", "message"),
    [
        (
            "ag-gemm",
            "4098,12800,5121",
            "at most 512 in each of M, N and K; take 510,512,512, or a machine",
        ),
        ("gemm", "1,4096,65", "take 1,512,65, or"),
        ("gemm-ar", "8,513,512", "take 8,512,512, or"),
        (
            "moe-sum",
            "128,8,256,128,7168,2048",
            "at most 64 tokens, 64 experts and 512 elements of a row; take 64,8,64,32,512,512,0, or",
        ),
        (NORMED, "128,8192", "at most 64 rows and 65,536 elements; take 8,8192, or"),
        (NORMED, "8192,8", "take 64,8, or"),
        ("all-reduce", "1536KiB", "at most 128 KiB; take 131040, or"),
    ],
)
def test_the_simulator_refuses_large_ones_and_takes_what_is_named(op, word, message):
    assert len(sizes(op, word, world_size=3)) == 1
    with pytest.raises(ValueError, match=message) as caught:
        parse_shapes(op, [word], 3, tiny=True)
    smaller = str(caught.value).partition("; take ")[2].partition(", or")[0]
    assert sizes(op, smaller, world_size=3, tiny=True) == [tuple(map(int, smaller.split(",")))]


def test_projections_must_divide():
    with pytest.raises(
        ValueError, match="--world-size 3: qwen3-32b has query=8192.*take 1, 2, 4 or 8, or --shapes M,N,K"
    ):
        parse_shapes("gemm", ["qwen3-32b"], 3)
    with pytest.raises(ValueError, match="no rows of symm-mem-recipes divide by world_size=3; .*symm-mem-recipes:384"):
        parse_shapes("ag-gemm", ["symm-mem-recipes"], 3)
