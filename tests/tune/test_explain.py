"""Dispatch reads the rows, and `weft.ops.explain` says which one and why."""

import dataclasses

import pytest
import torch

from weft import ops
from weft.ops.attention.decoding import SplitKV
from weft.ops.attention.paged_prefill_attention import KeyBlocks
from weft.ops.collectives.collective import CollectiveCall, Push, TwoShot
from weft.ops.gemm.tile import Tile
from weft.ops.moe.exchange.exchange_op import PushRows
from weft.ops.moe.grouped.gemms import GroupedTiles
from weft.ops.op import find_op
from weft.ops.overlap import fused_reduce
from weft.ops.overlap.all_gather_matmul import Pipelined
from weft.plan import table as tuned
from weft.plan.memo import forget
from weft.plan.planned import machine
from weft.runtime import capabilities
from weft.transport.plans import PushPlan

GPU = dataclasses.replace(capabilities.simulated(4), device_name="Some GPU", is_simulated=False)
BF16 = torch.bfloat16
TILE = Tile(block_m=64, block_n=128, block_k=64, group=2, num_stages=5)
TUNED = Pipelined(streams=3)
PUSH = TwoShot(push=PushPlan(transport="lamport", row_bytes=4096, num_warps=8, programs_per_sm=2))


def choose(op, nbytes, dtype, world_size, caps, algorithm="auto"):
    """The plan of a collective."""
    return find_op(op).plan(CollectiveCall(nbytes, dtype, algorithm), machine(caps, world_size))


def planned(op, M, N, K, local_first=False):
    """The design of a GEMM op over four ranks, and the one without rows."""
    found, here = find_op(op), machine(GPU, 4)
    call = found.call_of((M, N, K), BF16, here, **({"local_first": True} if local_first else {}))
    return found.plan(call, here).design, found.by_rule(call, here)


@pytest.fixture
def rows(monkeypatch, tmp_path):
    """rows((op, shape, design), …) are what was tuned for Some GPU at a world size, 4 unless given."""
    file_for = tuned.file_for
    monkeypatch.setattr(tuned, "file_for", lambda gpu, world_size: file_for(gpu, world_size, tmp_path))
    forget()

    def use(*made, world_size=4):
        listed = [
            tuned.Row(
                op=op, dtype="bfloat16", shape=shape, design=(found := find_op(op.partition("+")[0])).name_of(design),
                config=found.config_of(design), us=7.5, default_us=9.0, date="2026-11-20", versions="weft 0.1.0",
            )
            for op, shape, design in made
        ]  # fmt: skip
        table = tuned.Table(gpu="Some GPU", world_size=world_size, rows=tuple(listed))
        tuned.write(tuned.file_for("Some GPU", world_size), table)

    yield use
    forget()


def test_a_collective_takes_the_row(rows):
    rows(("all_reduce", (65536,), PUSH))
    decision = choose("all_reduce", 65536, BF16, 4, GPU)
    assert (decision.name, decision.design) == ("two_shot", PUSH)
    assert decision.reason.startswith("some-gpu.w4.json: all_reduce bfloat16 65536: 7.5 µs, the default 9")
    for other in (
        choose("all_reduce", 65536, BF16, 4, GPU, algorithm="one_shot"),  # asked for
        choose("all_reduce", 65536, BF16, 2, GPU),
        choose("all_reduce", 65536, BF16, 4, capabilities.simulated(4)),
        choose("all_reduce", 1 << 20, BF16, 4, GPU),
    ):
        assert other.row is None
        assert other.design != PUSH
    assert choose("all_reduce", 65536, BF16, 4, GPU, algorithm="two_shot").row is not None
    assert choose("all_reduce", 65536, torch.float32, 4, GPU).design == PUSH  # as many bytes


def test_a_row_for_another_alignment_is_left_alone(rows):
    keyed = Push(push=dataclasses.replace(PUSH.push, transport="keyed"))
    rows(("all_gather", (4096,), keyed))
    assert choose("all_gather", 1024, BF16, 4, GPU).design == keyed  # 4096 bytes are the output
    lamport = choose("all_gather", 1023, BF16, 4, GPU)
    assert (lamport.design.push.transport, lamport.row) == ("lamport", None)


def test_a_matrix_product_takes_the_row(rows):
    rows(("all_gather_matmul", (4096, 2560, 5120), TUNED))
    assert planned("all_gather_matmul", 4096, 2560, 5120)[0] == TUNED
    assert planned("all_gather_matmul", 5000, 2560, 5120)[0] == TUNED
    for shape, op in (((4096, 12800, 5120), "all_gather_matmul"), ((4096, 2560, 5120), "matmul_reduce_scatter")):
        design, default = planned(op, *shape)
        assert design == default != TUNED


def test_attention_takes_the_row_of_its_head_dim(rows):
    """On any number of ranks the row of one: pairs of a sequence and a KV head, tokens, and elements of a head."""
    few = SplitKV(block_n=16, least=512, splits=2, num_warps=1, num_stages=2)
    blocks = KeyBlocks(block_n=32, num_warps=8, num_stages=2)
    rows(("paged_attention", (32, 1024, 128), few), ("paged_prefill_attention", (2, 1000, 128), blocks), world_size=1)
    for op, taken, others in (
        (
            "paged_attention",
            ((4, 1024, 8, 128), (5, 1500, 8, 128)),
            ((4, 1024, 8, 64), (4, 4096, 8, 128), (1, 1024, 8, 128)),
        ),
        ("paged_prefill_attention", ((1000, 16, 2, 128),), ((1000, 16, 2, 64), (5000, 16, 2, 128))),
    ):
        found, here = find_op(op), machine(GPU, 4)
        for sizes in taken:
            planned = found.plan(found.call_of(sizes, BF16, here), here)
            assert planned.design == (few if op == "paged_attention" else blocks) and planned.row is not None
        for sizes in others:
            call = found.call_of(sizes, BF16, here)
            planned = found.plan(call, here)
            assert planned.row is None and planned.design == found.by_rule(call, here)
            assert "some-gpu.w1.json" in planned.reason


def test_a_row_above_the_library_s_says_nothing_of_what_lies_below(rows):
    rows(("all_gather_matmul", (1024, 2560, 5120), TUNED))
    assert planned("all_gather_matmul", 516, 2560, 5120)[0] == TUNED
    assert ops.explain("ag_gemm", M=512, N=2560, K=5120, world_size=4, caps=GPU).algorithm == "sequential"
    assert ops.explain("ag_gemm", M=512, N=2560, K=5120, world_size=4, caps=GPU).row is None
    rows(("all_gather_matmul", (512, 2560, 5120), TUNED))
    assert planned("all_gather_matmul", 512, 2560, 5120)[0] == TUNED


def test_explain_tells_the_row_and_why(rows, capsys):
    rows(("all_gather_matmul", (4096, 2560, 5120), TUNED), ("all_reduce", (65536,), PUSH))
    found = ops.explain("ag_gemm", M=2500, N=2560, K=5120, world_size=4, caps=GPU)
    assert (found.algorithm, found.plan) == ("pipelined", TUNED)
    assert (
        repr(found).splitlines()
        == str(found).splitlines()
        == [
            "all_gather_matmul M=2500 N=2560 K=5120 bfloat16, world_size=4, Some GPU",
            "  gets  pipelined: chunks=1, streams=3, span=1, begin_first=False",
            "  row   some-gpu.w4.json: all_gather_matmul bfloat16 4096x2560x5120: 7.5 µs, the default 9, the nearest row "
            "(2026-11-20, weft 0.1.0)",
            "  bits  depend on M, a rank's N and K, W and the design",
        ]
    )
    found = ops.explain("all-reduce", (32, 1024), world_size=4, caps=GPU)
    assert "  row   some-gpu.w4.json: all_reduce bfloat16 65536: 7.5 µs" in str(found)
    assert capsys.readouterr().out == ""  # so that print(explain(...)) shows it once


def test_explain_tells_the_rule_where_there_is_no_row(rows):
    told = str(ops.explain("gemm_rs", M=128, N=5120, K=6400, world_size=4, caps=GPU))
    assert "  gets  sequential\n  rule  predicted µs in a row: sequential " in told
    assert "(no some-gpu.w4.json: run weft tune)" in told
    rows(("all_reduce", (65536,), PUSH))
    told = str(ops.explain("gemm_rs", M=128, N=5120, K=6400, world_size=4, caps=GPU))
    assert "(some-gpu.w4.json has no row of bfloat16 near this shape)" in told
    for algorithm, reason in (
        ("one_shot", "predicted µs in a row: one_shot "),
        ("copy_engine", "asked for design='copy_engine'"),
    ):
        told = str(ops.explain("all_reduce", (32, 1024), world_size=4, caps=GPU, algorithm=algorithm))
        assert f"rule  {reason}" in told


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
def test_explain_needs_nothing_but_the_sizes():
    found = ops.explain("ag_gemm", M=64, N=32, K=16)
    assert found.row is None and "NVIDIA H200" in str(found)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("broadcast", (16,)), {}, "op='broadcast' is not one of"),
        (("gemm",), {"M": -4, "N": 8, "K": 8}, "M=-4 is not a positive integer"),
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
        (("ag_gemm",), {"M": 64, "N": 8}, "all_gather_matmul needs M=, N=, K= and no shape"),
        (("gemm", (16, 16)), {}, "matmul needs M=, N=, K= and no shape"),
        (("all_reduce",), {"M": 64}, "all_reduce needs shape="),
        (("ag_gemm",), {"M": "4", "N": 8, "K": 8, "world_size": 4}, "M='4' is not a positive integer"),
        (
            ("ag_gemm",),
            {"M": 4, "N": 8, "K": 8, "algorithm": "segments"},
            "algorithm='segments' is not one of 'auto', 'pipelined'",
        ),
        (("all_reduce", ("a",)), {}, "is no shape; pass a tuple of sizes"),
        ((3,), {}, "op=3 is not one of"),
    ],
)
def test_explain_refuses_sizes_that_do_not_fit(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        ops.explain(*arguments, **options)


def test_a_gemm_and_a_collective_one_after_the_other_are_both_shown():
    for op, M, K, gemm, collective in (
        ("gemm_ar", 16, 6400, "small_m", "one_shot"),
        ("gemm_ar", 64, 6400, "small_m", "two_shot"),
        ("gemm_ar", 16, 6401, "cublas", "one_shot"),
        ("gemm_ar", 128, 6400, "cublas", "two_shot"),
        ("gemm_rs", 128, 6400, "cublas", "push"),
        ("gemm_rs", 64, 6400, "small_m", "push"),
        ("ag_gemm", 128, 6400, "cublas", "push"),
        ("ag_gemm", 64, 6400, "small_m", "push"),
    ):
        found = ops.explain(op, M=M, N=5120, K=K, world_size=4, caps=GPU)
        assert found.algorithm == "sequential"
        assert (found.plan.gemm.name, found.plan.collective.name) == (gemm, collective), (op, M, K)
        told = str(found)
        assert f"\n    gemm  {gemm}" in told
        assert f"\n    collective  {collective}" in told


def test_sums_that_the_one_kernel_cannot_count_are_said_to_go_by_the_pipelined_design():
    for M, design in ((1 << 17, "fused"), (1 << 18, "pipelined")):
        found = ops.explain("gemm_ar", M=M, N=16400, K=512, world_size=2, caps=GPU)
        assert found.algorithm == design
    assert "4,294,967,296 elements > 2,147,483,648" in found.reason


def test_the_order_of_arrival_has_rows_of_its_own(rows):
    other = Pipelined(streams=4)
    rows(
        ("all_gather_matmul", (4096, 2560, 5120), TUNED), ("all_gather_matmul+local_first", (4096, 2560, 5120), other)
    )  # fmt: skip
    sizes = {"M": 4096, "N": 2560, "K": 5120, "world_size": 4, "caps": GPU}
    for own_first, design in ((False, TUNED), (True, other)):
        found = ops.explain("ag_gemm", own_first=own_first, **sizes)
        assert found.plan == design == planned("all_gather_matmul", 4096, 2560, 5120, own_first)[0]
        assert found.row.op == "all_gather_matmul" + "+local_first" * own_first
    with pytest.raises(ValueError, match="own_first=True .*matmul_reduce_scatter"):
        ops.explain("gemm_rs", own_first=True, **sizes)
    with pytest.raises(ValueError, match="own_first=True .*all_reduce"):
        ops.explain("all_reduce", (16, 5120), own_first=True)


def test_a_design_can_be_asked_for():
    for design in ("fused", "pipelined", "sequential"):
        found = ops.explain("gemm_rs", M=4096, N=5120, K=6400, world_size=4, caps=GPU, algorithm=design)
        assert found.algorithm == design
    assert "rule  asked for design='sequential'" in str(found)
    assert ops.explain("gemm", M=16, N=5120, K=5120, caps=GPU, algorithm="persistent").plan.tile.block_m == 16


def test_the_norm_of_an_all_reduce():
    for rows, world_size, algorithm, part in (
        (16, 4, "one_shot", 512),
        (64, 4, "two_shot", 512),
        (32, 2, "one_shot", 512),
        (200, 2, "one_shot", 1024),
        (2000, 2, "two_shot", 512),
    ):
        found = ops.explain("all_reduce_rms_norm", (rows, 5120), world_size=world_size, caps=GPU)
        assert found.algorithm == algorithm
        assert found.plan.push.row_bytes == part
        assert found.reason.startswith(f"predicted µs in a row: {algorithm} ")
    assert (
        ops.explain("all-reduce-rms-norm", (1, 5120), world_size=4, caps=GPU, algorithm="two_shot").algorithm
        == "two_shot"
    )
    with pytest.raises(ValueError, match="rows of 5 elements have 10 bytes"):
        ops.explain("all_reduce_rms_norm", (4, 5), world_size=4, caps=GPU)


def test_a_norm_takes_a_row_whose_parts_are_resident(rows):
    one = find_op("all_reduce_rms_norm").designs["two_shot"]
    for row_bytes, takes in ((1024, True), (16, False)):
        design = one(push=PushPlan(transport="lamport", row_bytes=row_bytes, num_warps=2))
        rows(("all_reduce_rms_norm", (16, 5120), design))
        found = ops.explain("all_reduce_rms_norm", (16, 5120), world_size=4, caps=GPU)
        assert (found.plan == design) == (found.row is not None) == takes


def test_tiles_of_experts_have_rows_by_the_rows_of_a_tile(rows):
    """32,768 pairs of 128 experts make tiles of 128 rows; a row for other tiles is none."""
    one, other = GroupedTiles(block_n=128, per_sm=2), GroupedTiles(block_n=64)
    for op, N, K in (("grouped_matmul_silu_mul", 768, 2048), ("grouped_matmul", 2048, 768)):
        for block, takes in ((128, True), (64, False)):
            gathered = "grouped_matmul+gather", (32768, 128, N, K), other
            rows((op, (32768, block, N, K), one), gathered, world_size=1)
            found = ops.explain(op, T=4096, k=8, experts=128, N=N, K=K, world_size=2, caps=GPU)
            assert (found.plan == one) == (found.row is not None) == takes, (op, block)
            assert takes or "tiles of 128 pairs" in found.reason


@pytest.mark.parametrize(("op", "everything"), [("moe_dispatch", "lamport"), ("moe_combine", "lamport")])
def test_an_exchange_of_rows_has_rows_by_its_number_of_choices(op, everything, rows):
    push = PushRows(chunk=2)
    for k, takes in ((8, True), (6, False)):
        rows((op, (128, k, 7168), push))
        found = ops.explain(op, max_tokens=128, k=8, H=7168, world_size=4, caps=GPU)
        assert (found.plan == push) == (found.row is not None) == takes
        assert takes or (found.algorithm == everything and f"predicted µs in a row: {everything} " in found.reason)
        asked = ops.explain(op, max_tokens=128, k=8, H=7168, world_size=4, caps=GPU, algorithm="push")
        assert (asked.plan == push) == takes
    # Of one choice among four ranks a rank needs a quarter of the rows.
    assert ops.explain(op, max_tokens=4096, k=1, H=7168, world_size=4, caps=GPU).algorithm == "push"


def test_only_the_design_s_own_fields_are_shown(rows):
    rows(
        ("all_gather_matmul", (4096, 2560, 5120), Pipelined(span=2)),
        ("matmul_reduce_scatter", (4096, 2560, 5120), fused_reduce.Fused(tile=TILE)),
    )
    shown = str(ops.explain("ag_gemm", M=4096, N=2560, K=5120, world_size=4, caps=GPU))
    assert "span=2" in shown
    assert "block_m" not in shown
    shown = str(ops.explain("gemm_rs", M=4096, N=2560, K=5120, world_size=4, caps=GPU))
    assert "block_m=64, block_n=128, block_k=64, group=2, num_warps=4, num_stages=5, split=True, piece=2048" in shown
    assert "span" not in shown
