"""Predicted times: their errors on committed rows, the choices that they make, constants of GPUs with and without a file."""

import json
import math
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import costs as fitting
from benchmarks import gpu_costs
from weft import ops
from weft.costs import exchanges, fitted, gemms, gpu, grouped
from weft.costs.gpu import CONSTANTS, named, read, shipped, write
from weft.costs.predicted import OPS, VARIANTS, WEIGHTS, errors, predict
from weft.ops.gemm import small_m_rule
from weft.ops.op import find_op, registered
from weft.plan.memo import forget
from weft.runtime import capabilities

SHAPES = {1: (1 << 20,), 2: (16, 5120), 3: (2048, 5120, 4096), 4: (4096, 32, 8, 128), 5: (2, 64, 8, 128, 40000)}
SHAPES[6] = (256, 8, 128, 64, 2048, 768)


@pytest.fixture(scope="module")
def rows():
    return fitting.rows()


@pytest.fixture
def unused():
    """No measured constants before and after."""
    gpu._used.clear()
    forget()
    yield
    gpu._used.clear()
    forget()


def test_shipped_errors_are_those_of_the_committed_rows(rows):
    found = fitting.errors(fitted.read(), rows)
    known = errors()
    assert found.keys() == known.keys()
    for op, worlds in found.items():
        for world, (count, *values) in worlds.items():
            assert count == known[op][world][0]
            assert values == pytest.approx(known[op][world][1:], abs=2e-3)


def test_experts_of_two_ranks_are_within_eight_percent(rows):
    """The mean of the designs that plans choose, and of the third of these rows that the fit has not seen."""
    of, chosen = fitted.read(), ("auto", "lamport", "sum_then_scatter", "sequential")
    for op in ("moe_dispatch", "moe_combine", "grouped_matmul_reduce_scatter", "all_gather_grouped_matmul_silu_mul"):
        errors = [
            (row.held_out, abs(fitting.predicted(of, row) / row.us - 1))
            for row in rows
            if row.op == op and row.world_size == 2 and row.design in chosen
        ]
        assert statistics.mean(error for _, error in errors) < 0.08, op
        assert statistics.mean([error for held_out, error in errors if held_out] or [0]) < 0.12, op


def test_dense_ops_are_within_eight_percent(rows):
    of = fitted.read()
    known = (
        "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_reduce", "all_reduce_rms_norm", "matmul",
    )  # fmt: skip
    for op in (*known, "cublas"):
        for world_size in (2, 4):
            auto = [row for row in rows if (row.op, row.world_size) == (op, world_size) and row.design in ("auto", "")]
            if auto:
                assert statistics.mean(abs(fitting.predicted(of, row) / row.us - 1) for row in auto) < 0.08, (
                    op,
                    world_size,
                )


def test_norms_over_two_ranks_are_within_eight_percent():
    """Of rows that the fit has seen, and of the ones that it has not, over all designs."""
    assert max(errors()["all_reduce_rms_norm"]["2"][1:3]) < 0.08


def test_gemms_of_quantized_weights_are_within_eight_percent(rows):
    """On one and two ranks, of rows that the fit has seen, and of the half that it has not."""
    by_op = {}
    for row in rows:
        if row.variant in WEIGHTS and row.world_size <= 2:
            error = abs(fitting.predicted(fitted.read(), row) / row.us - 1)
            by_op.setdefault((row.name, row.held_out), []).append(error)
    assert {name for name, _ in by_op} == {name for name, held_out in by_op if held_out}
    assert {"grouped_matmul+block_fp8", "grouped_matmul_silu_mul+four_bit", "matmul+int4"} < {name for name, _ in by_op}
    for name, found in by_op.items():
        assert statistics.mean(found) < 0.08, name


@pytest.mark.parametrize("gated", [False, True])
def test_experts_in_fp8_have_the_tiles_of_their_plans(gated):
    """Of few pairs and of many, with steps of the columns under a scale."""
    op, here = find_op("grouped_matmul_silu_mul" if gated else "grouped_matmul"), fitting.machine_of("NVIDIA H200", 1)
    for tokens in (1, 8, 128, 256, 300, 512, 4096):
        experts = grouped.Experts(tokens, 8, 128, 64, 2048, 768, weight=1.0, fp8=True)
        case = op.case_of((*experts[:6], 0), torch.bfloat16, 1, block_fp8=True)
        design = op.plan(op.call_of_case(case, here)._replace(written=gated), here).design
        assert design.transposed == grouped.has_few_pairs(experts) and design.block_k == grouped.STEP
        if not design.transposed:
            assert design.block_n * design.per_sm == grouped.fp8_rows(gated, grouped.block_of(experts))


@pytest.mark.parametrize("gated", [False, True])
def test_experts_in_fp8_wait_for_scales_and_weights_or_multiply(gated):
    """Of twice the experts twice the weights are read; of twice the pairs of all experts twice as much is multiplied."""
    of, h200 = fitted.read(), named("h200")

    def us(tokens, k):
        return grouped.in_fp8(h200, of, grouped.Experts(tokens, k, 128, 128, 2048, 768, weight=1.0, fp8=True), gated)

    before = h200.launch + of.fp8_experts.step * (16 if gated else 6)
    assert us(1, 8) - before == pytest.approx(2 * (us(1, 4) - before), rel=1e-2)
    assert us(1 << 15, 8) == pytest.approx(2 * us(1 << 14, 8), rel=5e-2)


@pytest.mark.parametrize("form", ["four_bit", "int4"])
def test_weights_in_four_bits_are_converted_where_plans_do(form):
    """Costs take the faster way: in the GEMM up to the rows of the rule, before it beyond."""
    of, h200 = fitted.read(), named("h200")
    for N, K in ((25600, 5120), (5120, 12800)):
        for M in (1, 16, 64, 96, 128, 129, 256):
            size = gemms.Size(M, N, K, weight=WEIGHTS[form])
            whole = gemms.widened(h200, of.four_bit(form), N * K * size.weight, N * K)
            before = whole + gemms.gemm(h200, of.gemms, size._replace(weight=2.0))
            inside = gemms.four_bit(h200, of.gemms, of.four_bit(form), size) < before
            assert inside == (M <= small_m_rule.MAX_FOUR_BIT_ROWS), (N, K, M)


def test_where_costs_choose_they_lose_nothing_on_committed_rows(rows):
    chosen = ("moe_dispatch", "moe_combine", "grouped_matmul_reduce_scatter")
    every = fitting.regrets(fitted.read(), rows)
    regrets = [us[model] / min(us.values()) for row, model, *_, us in every if row.op in chosen]
    assert len(regrets) > 90 and max(regrets) < 1.11
    assert math.exp(statistics.mean(map(math.log, regrets))) < 1.01


def test_a_fit_finds_the_constants_that_made_the_rows(rows):
    true = replace(fitted.Fitted(), pushes=replace(fitted.Pushes(), second=1.7, owner=1.3))
    made = [row for row in rows if row.op == "all_reduce" and row.world_size == 2 and row.gpu == "NVIDIA H200"]
    made = [replace(row, us=fitting.predicted(true, row)) for row in made]
    found = fitting.fit(made, fitted.Fitted()).pushes
    assert (found.second, found.owner) == (pytest.approx(1.7, rel=0.1), pytest.approx(1.3, rel=0.05))


def test_a_fit_finds_the_constants_of_the_gpu_that_made_the_rows(rows):
    before = named("h100")
    true = replace(before, memory=2.5e6, link=3e5, one_link=before.stores)
    chosen = [
        row for row in rows if row.gpu == before.gpu and row.op in ("matmul", "all_gather") and row.world_size == 2
    ]
    made = [replace(row, us=fitting.predicted(fitted.read(), replace(row, gpu_constants=true))) for row in chosen]
    found = gpu_costs.fit(made, before)
    assert (found.memory, found.link) == (pytest.approx(2.5e6, rel=0.03), pytest.approx(3e5, rel=0.03))
    assert (found.sms, found.launch) == (before.sms, before.launch)


@pytest.mark.parametrize("like", ["h200", "h100", "a100", "b200", "mi300x"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_op_has_positive_times_on_every_gpu(like, world_size):
    known = {op.name for op in registered()}
    of_16_bits = [(name, count) for name, (count, _) in OPS.items()]
    varied = [(f"{name}+{variant}", OPS[name][0]) for name, variants in VARIANTS.items() for variant in variants]
    for name, count in of_16_bits + varied:
        made = predict(name, SHAPES[count], world_size=world_size, gpu=like)
        assert name.partition("+")[0] in {*known, "memory"}
        assert made.seconds > 0 and all(0 < each < 1 for each in made.by_design.values()) and 0 < made.error < 1


def test_every_op_of_benchmarks_with_a_plan_has_costs():
    assert {op.name for op in registered() if op.form} <= OPS.keys()


def test_a_prediction_takes_less_than_five_milliseconds_the_first_time():
    forget()
    taken = []
    for tokens in range(100, 110):
        begin = time.perf_counter()
        predict("all_gather_matmul", (tokens * 16, 5120, 5120), world_size=4)
        taken.append(time.perf_counter() - begin)
    assert statistics.median(taken) < 5e-3


def test_more_bytes_take_longer_and_more_ranks_do_not_make_a_gather_faster():
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        for world_size in (2, 4, 8):
            times = [predict(op, (1 << power,), world_size=world_size).seconds for power in range(10, 28)]
            assert times == sorted(times)
    message = [predict("all_gather", (1 << 24,), world_size=size).seconds for size in (2, 4, 8)]
    assert message == sorted(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduces", (1,)), "has no costs; pass one of .*; did you mean all_reduce"),
        (("matmul", (1, 2)), r"shape=\(1, 2\) of matmul has 2 sizes; pass 3"),
        (
            ("matmul+block_fp9", (1, 2, 3)),
            "no costs as 'block_fp9'; after a . pass one of .*int4; did you mean block_fp8",
        ),
        (("matmul+fp8+int4", (1, 2, 3)), "matmul has no costs as 'fp8int4'"),
        (("matmul+local_first", (1, 2, 3)), "matmul has no costs as 'local_first'"),
        (("route+fp8", (1, 2, 3, 4, 5, 6)), "route has no costs as 'fp8'; leave it out"),
        (("matmul", (1, 2, 3), torch.bfloat16, 1, "h200", "push"), "design='push' of matmul has no costs"),
    ],
)
def test_what_has_no_costs_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        predict(*arguments)


# --- choices -----------------------------------------------------------------------------------------------------------


def test_a_choice_is_the_least_predicted_time_and_its_reason_names_it():
    found = ops.explain("moe_combine", max_tokens=128, k=4, H=2880, world_size=4, caps=capabilities.simulated(4))
    assert found.algorithm == "sum_then_scatter" and found.row is None
    assert found.reason.startswith("predicted µs in a row: sum_then_scatter ") and "push " in found.reason
    found = ops.explain("moe_dispatch", max_tokens=128, k=4, H=2880, world_size=4, caps=capabilities.simulated(4))
    assert found.algorithm == "lamport" and found.reason.startswith("predicted µs in a row: lamport ")


def test_a_reason_says_whose_constants_were_taken():
    b200 = capabilities.simulated(2, like="b200")
    of_sheet = ops.explain("moe_dispatch", max_tokens=128, k=4, H=2880, world_size=2, caps=b200)
    assert "(constants of data sheets: run weft doctor --measure)" in of_sheet.reason
    unknown = replace(capabilities.simulated(2), device_name="Some GPU")
    of_other = ops.explain("moe_dispatch", max_tokens=128, k=4, H=2880, world_size=2, caps=unknown)
    assert "(constants of NVIDIA H100 80GB HBM3: run weft doctor --measure)" in of_other.reason


def test_designs_that_do_not_take_a_call_are_no_choice():
    caps = capabilities.simulated(2)
    odd = ops.explain("moe_dispatch", max_tokens=4, k=2, H=25, world_size=2, caps=caps)
    assert odd.algorithm != "lamport"
    rows = exchanges.Rows(16, 2, 2880, 2, 2, block=64)
    crossing = exchanges.combine(named("h200"), fitted.read().exchanges, fitted.read().pushes, rows._replace(block=256))
    within = exchanges.combine(named("h200"), fitted.read().exchanges, fitted.read().pushes, rows)
    assert within["lamport"] < crossing["lamport"] and within["push"] == crossing["push"]


# --- constants ---------------------------------------------------------------------------------------------------------


def test_each_constant_of_a_shipped_gpu_has_its_source():
    assert {one.gpu for one in shipped().values()} >= {known.device_name for known in capabilities.GPUS.values()}
    for file in gpu.FOLDER.glob("*.json"):
        constants = json.loads(file.read_text())["constants"]
        assert set(constants) == set(CONSTANTS) and all(one["source"] for one in constants.values())


def test_a_gpu_without_a_file_takes_the_nearest_one_with_its_sms():
    found = named("Some GPU", "sm_90", 78)
    assert (found.gpu, found.sms) == ("NVIDIA H100 80GB HBM3", 78)
    assert named("Some GPU", "gfx950").gpu == "AMD Instinct MI300X"
    assert named("Some GPU", "sm_89").gpu == "NVIDIA A100-SXM4-80GB"
    assert named("h200") is named("NVIDIA H200")
    assert named("b200").wire(8) == named("b200").stores and named("mi300x").wire(2) == named("mi300x").one_link


def test_used_constants_change_plans_until_they_are_forgotten(unused):
    caps = replace(capabilities.simulated(2), device_name="Some GPU")

    def chosen():
        return ops.explain("moe_dispatch", max_tokens=4096, k=8, H=4096, world_size=2, caps=caps)

    before = chosen()
    gpu.use(replace(named("h200"), gpu="Some GPU", link=before.plan and 5e6))
    after = chosen()
    assert after.algorithm == "pipelined" and "constants" not in after.reason
    gpu.use(None)
    assert chosen() == after or chosen().algorithm == after.algorithm


def test_a_written_file_is_read_and_a_damaged_one_ignored_with_one_warning(tmp_path, caplog, unused):
    file, made = tmp_path / "costs.json", replace(named("h200"), gpu="Some GPU", memory=1.25e6)
    write(file, made, {"memory": "here"})
    assert read(file) == made and gpu.load(file) == made and gpu.load(tmp_path / "none.json") is None
    good = json.loads(file.read_text())
    for text in (
        "{", "[]", "{}", json.dumps(good | {"schema": 2}), json.dumps(good | {"gpu": 3}), json.dumps(good | {"constants": {}}),
        json.dumps(good | {"constants": good["constants"] | {"hop": {"value": -1}}}),
        json.dumps(good | {"constants": good["constants"] | {"hop": 3}}),
    ):  # fmt: skip
        file.write_text(text)
        caplog.clear()
        assert gpu.load(file) is None
        assert len(caplog.records) == 1 and "run weft doctor --measure again" in caplog.text


def test_all_ranks_read_the_file_of_rank_0(tmp_path, caplog, unused):
    file, made = tmp_path / "costs.json", replace(named("h200"), gpu="Some GPU", memory=1.25e6)
    write(file, made, {})
    sent = []

    def team(rank, exchange):
        caps = replace(capabilities.simulated(2), device_name="Some GPU")
        return SimpleNamespace(rank=rank, device=torch.device("cuda"), caps=caps, exchange=exchange)

    gpu.agree(team(0, lambda value: sent.append(value) or [value, None]), file)
    assert sent == [made] and named("Some GPU") == made
    gpu._used.clear()
    forget()
    gpu.agree(team(1, lambda value: [made, value]), tmp_path / "of another machine.json")
    assert named("Some GPU") == made
    gpu.agree(team(1, lambda value: [None, value]))
    gpu._used.clear()
    forget()
    for given, said in ((tmp_path / "none.json", "none.json does not exist"), (file, "this GPU is Other GPU")):
        caplog.clear()
        other = team(0, lambda value: [value])
        other.caps = replace(other.caps, device_name="Other GPU")
        gpu.agree(other, given)
        assert said in caplog.text and len(caplog.records) == 1 and not gpu._used
    gpu.agree(SimpleNamespace(device=torch.device("cpu")))
    assert gpu.default_file("NVIDIA H200").name == "costs-nvidia-h200.json"


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_no_design_multiplies_before_its_weights_are_read(op):
    shape, of = (16, 8192, 14336), named("h100")
    assert min(predict(op, shape, world_size=2, gpu="h100").by_design.values()) * 1e6 > 2 * 8192 * 14336 / of.memory
