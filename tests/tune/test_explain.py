"""Dispatch reads the rows, and `weft.ops.explain` says which one and why."""

import dataclasses

import pytest
import torch
from weft.ops.dispatch import choose
from weft.ops.gemm.config import configured, default_config

from weft import ops
from weft.plan import table as tuned
from weft.plan.memo import forget
from weft.runtime import capabilities
from weft.tune import search, spaces

GPU = dataclasses.replace(capabilities.simulated(4, 132), device_name="Some GPU", arch="sm_90")
BF16 = torch.bfloat16
TILE = spaces.GemmConfig(block_m=64, block_n=128, block_k=64, group=2, num_stages=5)
PUSH = spaces.CollectiveConfig(
    algorithm="two_shot", transport="lamport", row_bytes=4096, num_warps=8, programs_per_sm=2
)


@pytest.fixture
def rows(monkeypatch, tmp_path):
    """rows((op, shape, config), …) are what was tuned for Some GPU at world size 4."""
    file_for = tuned.file_for
    monkeypatch.setattr(tuned, "file_for", lambda gpu, world_size: file_for(gpu, world_size, tmp_path))
    forget()

    def use(*made):
        listed = [
            tuned.Row(
                op=op, dtype="bfloat16", shape=shape, config=search.fields_of(config), us=7.5, default_us=9.0,
                date="2026-11-20", versions="weft 0.1.0",
            )
            for op, shape, config in made
        ]  # fmt: skip
        tuned.write(tuned.file_for("Some GPU", 4), tuned.Table(gpu="Some GPU", world_size=4, rows=tuple(listed)))

    yield use
    forget()


def test_a_collective_takes_the_row(rows):
    rows(("all_reduce", (65536,), PUSH))
    decision = choose("all_reduce", 65536, BF16, 4, GPU)
    assert (decision.algorithm, decision.plan) == ("two_shot", PUSH.plan())
    assert decision.reason.startswith("some-gpu.w4.json: all_reduce bfloat16 65536: 7.5 µs, the default 9")
    for other in (
        choose("all_reduce", 65536, BF16, 4, GPU, algorithm="one_shot"),  # asked for
        choose("all_reduce", 65536, BF16, 2, GPU),
        choose("all_reduce", 65536, BF16, 4, None),
        choose("all_reduce", 1 << 20, BF16, 4, GPU),
    ):
        assert other.row is None
        assert other.plan != PUSH.plan()
    assert choose("all_reduce", 65536, BF16, 4, GPU, algorithm="two_shot").row is not None
    assert choose("all_reduce", 65536, torch.float32, 4, GPU).plan == PUSH.plan()  # as many bytes


def test_a_row_for_another_alignment_is_left_alone(rows):
    keyed = dataclasses.replace(PUSH, algorithm="push", transport="keyed")
    rows(("all_gather", (4096,), keyed))
    assert choose("all_gather", 1024, BF16, 4, GPU).plan == keyed.plan()  # 4096 bytes are the output
    lamport = choose("all_gather", 1023, BF16, 4, GPU)
    assert (lamport.transport, lamport.row) == ("lamport", None)


def test_a_matrix_product_takes_the_row(rows):
    rows(("all_gather_matmul", (4096, 2560, 5120), TILE))
    assert configured("all_gather_matmul", 4096, 2560, 5120, BF16, 4, GPU) == TILE
    assert configured("all_gather_matmul", 5000, 2560, 5120, BF16, 4, GPU) == TILE
    for shape, op in (((4096, 12800, 5120), "all_gather_matmul"), ((4096, 2560, 5120), "matmul_reduce_scatter")):
        assert configured(op, *shape, BF16, 4, GPU) == default_config(op, *shape, BF16, 4, GPU)


def test_a_row_above_the_library_s_says_nothing_of_what_lies_below(rows):
    rows(("all_gather_matmul", (1024, 2560, 5120), TILE))
    assert configured("all_gather_matmul", 513, 2560, 5120, BF16, 4, GPU) == TILE
    assert configured("all_gather_matmul", 512, 2560, 5120, BF16, 4, GPU).design == "library"
    assert ops.explain("ag_gemm", M=512, N=2560, K=5120, world_size=4, caps=GPU).row is None
    rows(("all_gather_matmul", (512, 2560, 5120), TILE))
    assert configured("all_gather_matmul", 512, 2560, 5120, BF16, 4, GPU) == TILE


def test_explain_prints_the_row_and_why(rows, capsys):
    rows(("all_gather_matmul", (4096, 2560, 5120), TILE), ("all_reduce", (65536,), PUSH))
    found = ops.explain("ag_gemm", M=2500, N=2560, K=5120, world_size=4, caps=GPU)
    assert (found.algorithm, found.plan) == ("fused", TILE)
    fields = (
        "block_m=64, block_n=128, block_k=64, group=2, num_warps=4, num_stages=5, chunks=1, split=True, flatten=False"
    )
    assert capsys.readouterr().out.splitlines() == [
        "all_gather_matmul M=2500 N=2560 K=5120 bfloat16, world_size=4, Some GPU",
        f"  gets  fused: {fields}, piece=2048",
        "  row   some-gpu.w4.json: all_gather_matmul bfloat16 4096x2560x5120: 7.5 µs, the default 9, the nearest row "
        "(2026-11-20, weft 0.1.0)",
    ]
    ops.explain("all-reduce", (32, 1024), world_size=4, caps=GPU)
    assert "  row   some-gpu.w4.json: all_reduce bfloat16 65536: 7.5 µs" in capsys.readouterr().out


def test_explain_prints_the_rule_where_there_is_no_row(rows, capsys):
    ops.explain("gemm_rs", M=128, N=5120, K=6400, world_size=4, caps=GPU)
    told = capsys.readouterr().out
    assert "  gets  library\n  rule  M=128 <= 512" in told
    assert "(no some-gpu.w4.json: run weft tune)" in told
    rows(("all_reduce", (65536,), PUSH))
    ops.explain("gemm_rs", M=128, N=5120, K=6400, world_size=4, caps=GPU)
    assert "(some-gpu.w4.json has no row of bfloat16 near this shape)" in capsys.readouterr().out
    ops.explain("all_reduce", (32, 1024), world_size=4, caps=GPU, algorithm="one_shot")
    assert "rule  asked for algorithm='one_shot' (the row of some-gpu.w4.json" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
def test_explain_needs_nothing_but_the_sizes(capsys):
    assert ops.explain("ag_gemm", M=64, N=32, K=16).row is None
    assert "simulated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("broadcast", (16,)), {}, "op='broadcast' is not one of"),
        (("gemm",), {"M": -4, "N": 8, "K": 8}, "M=-4 is no positive integer"),
        (
            ("ag_gemm",),
            {"M": 4097, "N": 8, "K": 8, "world_size": 4},
            "M=4097 is not divisible by world_size=4; pad .* 4100",
        ),
        (("reduce_scatter", (15, 8)), {"world_size": 4}, r"shape\[0\]=15 is not divisible by world_size=4"),
        (("all_reduce", 16), {}, "shape=16 is no shape"),
        (("all_reduce", (16,)), {"world_size": 0}, "world_size=0 is not positive"),
        (("all_reduce", (16,)), {"algorithm": "foo"}, "algorithm='foo' is not one of 'auto', 'one_shot'"),
        (("all_gather", (16,)), {"algorithm": "two_shot"}, "algorithm='two_shot' is not one of 'auto', 'push'"),
        (("all_reduce", (16,)), {"dtype": "bf16"}, "dtype='bf16' is no torch.dtype"),
        (("ag_gemm",), {"M": 64, "N": 8}, "all_gather_matmul needs M=, N= and K="),
        (("gemm", (16, 16)), {}, "matmul needs M=, N= and K="),
        (("all_reduce",), {"M": 64}, "all_reduce needs shape="),
        (("ag_gemm",), {"M": "4", "N": 8, "K": 8, "world_size": 4}, "M='4' is no positive integer"),
        (("ag_gemm",), {"M": 4, "N": 8, "K": 8, "algorithm": "segments"}, "and no shape or algorithm"),
        (("all_reduce", ("a",)), {}, "is no shape; pass a tuple of sizes"),
        ((3,), {}, "op=3 is not one of"),
    ],
)
def test_explain_refuses_sizes_that_do_not_fit(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        ops.explain(*arguments, **options)


def test_a_product_and_a_collective_one_after_the_other_are_both_named():
    for op, M, K, said in (
        (
            "gemm_ar",
            16,
            6400,
            "; the product of few rows (weft.ops.gemm.small_m) in 3 parts of K, then all_reduce (one_shot)",
        ),
        ("gemm_ar", 64, 6400, "; the product of few rows (weft.ops.gemm.small_m), then all_reduce (two_shot)"),
        ("gemm_ar", 16, 6401, "; the library's product, then all_reduce (one_shot)"),
        ("gemm_ar", 128, 6400, "; the library's product, then all_reduce (two_shot)"),
        ("gemm_rs", 128, 6400, "; the library's product, then reduce_scatter (push)"),
        ("gemm_rs", 64, 6400, "; the product of few rows (weft.ops.gemm.small_m), then reduce_scatter (push)"),
        ("ag_gemm", 128, 6400, "; all_gather (push), then the library's product"),
        ("ag_gemm", 64, 6400, "; all_gather (push), then the product of few rows (weft.ops.gemm.small_m)"),
    ):
        found = ops.explain(op, M=M, N=5120, K=K, world_size=4, caps=GPU)
        assert found.algorithm == "library" and said in found.reason, found.reason


def test_sums_that_the_one_kernel_cannot_count_are_said_to_go_by_segments():
    for M, design in ((1 << 17, "fused"), (1 << 18, "segments")):
        found = ops.explain("gemm_ar", M=M, N=16400, K=512, world_size=2, caps=GPU)
        assert found.algorithm == found.plan.design == design
    assert "4,294,967,296 elements > 2,147,483,648" in found.reason


def test_the_order_of_arrival_has_rows_of_its_own(rows, capsys):
    other = dataclasses.replace(TILE, group=4)
    rows(("all_gather_matmul", (4096, 2560, 5120), TILE), ("all_gather_matmul+own_first", (4096, 2560, 5120), other))
    sizes = {"M": 4096, "N": 2560, "K": 5120, "world_size": 4, "caps": GPU}
    for own_first, config in ((False, TILE), (True, other)):
        found = ops.explain("ag_gemm", own_first=own_first, **sizes)
        assert found.plan == config == configured("all_gather_matmul", 4096, 2560, 5120, BF16, 4, GPU, own_first)
        assert found.row.op == "all_gather_matmul" + "+own_first" * own_first
    with pytest.raises(ValueError, match="own_first=True changes what all_gather_matmul gets"):
        ops.explain("gemm_rs", own_first=True, **sizes)
    with pytest.raises(ValueError, match="no M, N, K or own_first"):
        ops.explain("all_reduce", (16, 5120), own_first=True)


def test_the_norm_of_an_all_reduce(capsys):
    for rows, world_size, algorithm in (
        (16, 4, "one_shot"),
        (64, 4, "two_shot"),
        (64, 2, "one_shot"),
        (200, 2, "two_shot"),
    ):
        found = ops.explain("all_reduce_rms_norm", (rows, 5120), world_size=world_size, caps=GPU)
        assert found.algorithm == algorithm
        assert found.plan.row_bytes == 512
        assert f"{rows * 5120 * 2:,} bytes" in found.reason
    assert (
        ops.explain("all-reduce-rms-norm", (1, 5120), world_size=4, caps=GPU, algorithm="two_shot").algorithm
        == "two_shot"
    )
    with pytest.raises(ValueError, match="rows of 5 elements have 10 bytes"):
        ops.explain("all_reduce_rms_norm", (4, 5), world_size=4, caps=GPU)


def test_only_what_means_something_to_the_design_is_shown(rows, capsys):
    segments = dataclasses.replace(TILE, design="segments", span=2)
    rows(("all_gather_matmul", (4096, 2560, 5120), segments), ("matmul_reduce_scatter", (4096, 2560, 5120), TILE))
    shown = str(ops.explain("ag_gemm", M=4096, N=2560, K=5120, world_size=4, caps=GPU))
    assert "span=2" in shown
    assert "block_m" not in shown
    shown = str(ops.explain("gemm_rs", M=4096, N=2560, K=5120, world_size=4, caps=GPU))
    assert "block_m=64" in shown
    assert "span" not in shown
