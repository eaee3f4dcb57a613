"""The cache of cuBLAS algorithms: a file that comes back, or is ignored with one line; and what plans read of it."""

import dataclasses
import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weft import ops
from weft.errors import CannotWrite
from weft.ops.gemm import cublas
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL
from weft.ops.op import find_op
from weft.plan import algorithms, table
from weft.plan.algorithms import Entry
from weft.plan.planned import machine
from weft.runtime import capabilities, cublaslt
from weft.runtime.cublaslt import Algorithm

BF16 = torch.bfloat16
H200 = dataclasses.replace(capabilities.simulated(1), is_simulated=False)
FOUND = Algorithm(tile=24, cluster=5, custom=7)


def entry(*shape, algorithm=FOUND, **fields):
    names = {"gpu": "NVIDIA H200", "cublas": "13.1.1", "dtype": "bfloat16", "us": 90.0, "torch_us": 100.0}
    return Entry(shape=shape, algorithm=algorithm, **(names | fields))


@pytest.fixture
def cache(monkeypatch):
    """An empty cache on a machine with this cuBLAS, and the process's own afterwards."""
    monkeypatch.setattr(cublaslt, "version", lambda: "13.1.1")
    monkeypatch.setattr(algorithms, "_used", {})
    algorithms.forget()
    yield algorithms
    algorithms.forget()


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_and_grows(tmp_path):
    file = tmp_path / "made" / "algorithms.json"
    first = [entry(777, 13000, 5120), entry(16, 8, 8, algorithm=None, dtype="float16", cublas="12.9.0")]
    algorithms.save(file, first)
    newer = entry(777, 13000, 5120, us=80.0)
    algorithms.save(file, [newer, entry(777, 13000, 5120, gpu="NVIDIA B200")])
    assert {one.key: one for one in algorithms.read(file)} == {
        one.key: one for one in (newer, first[1], entry(777, 13000, 5120, gpu="NVIDIA B200"))
    }
    assert len(file.read_text().splitlines()) == 1 + 3 + 1
    assert [path.name for path in file.parent.iterdir()] == ["algorithms.json"]
    assert algorithms.load(tmp_path / "none.json") == []


GOOD = dataclasses.asdict(entry(1, 2, 3))
WRONG = {
    "damaged": ('{"schema": 1, "algori', "Unterminated string"),
    "no JSON": ("\x80", "Expecting value"),
    "another schema": ('{"schema": 9, "algorithms": []}', "not a cache of cuBLAS algorithms of schema 1"),
    "weft tune's": ('{"schema": 2, "gpu": "x", "world_size": 1, "rows": []}', "not a cache of cuBLAS algorithms"),
    "a list": ("[]", "not a cache of cuBLAS algorithms"),
    "no list": ('{"schema": 1, "algorithms": {}}', "a list of 'algorithms'"),
    "unknown field": ({**GOOD, "run": "rm"}, r"algorithms\[0\]: unknown field 'run' of the entry"),
    "missing field": ({"gpu": "x"}, r"algorithms\[0\]: missing field 'cublas'"),
    "negative size": ({**GOOD, "shape": [1, -2, 3]}, r"shape=\(1, -2, 3\) is not M, N, K"),
    "two sizes": ({**GOOD, "shape": [1, 2]}, r"shape=\(1, 2\) is not M, N, K"),
    "sizes that are text": ({**GOOD, "shape": "123"}, "shape='123' is not M, N, K"),
    "no time": ({**GOOD, "us": float("nan")}, "us=nan is not a positive number"),
    "attribute too many": ({**GOOD, "algorithm": {**GOOD["algorithm"], "x": 1}}, "unknown field 'x' of the algorithm"),
    "attribute too few": ({**GOOD, "algorithm": {"tile": 1}}, "missing field 'cluster' of the algorithm"),
    "attribute too long": ({**GOOD, "algorithm": {**GOOD["algorithm"], "tile": 1 << 40}}, r"algorithm.tile=1099511627776"),
    "attribute that is no integer": ({**GOOD, "algorithm": {**GOOD["algorithm"], "tile": True}}, "algorithm.tile=True"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_ignored_with_one_line_that_names_it(kind, tmp_path, caplog):
    content, reason = WRONG[kind]
    file = tmp_path / "x.json"
    text = content if isinstance(content, str) else json.dumps({"schema": 1, "algorithms": [content]})
    file.write_text(text)
    with pytest.raises(ValueError, match=f"x.json: .*{reason}"):
        algorithms.read(file)
    with caplog.at_level(logging.WARNING, "weft"):
        assert algorithms.load(file) is None
    (record,) = caplog.records
    assert str(file) in record.getMessage()
    assert "\n" not in record.getMessage()
    with pytest.raises(ValueError, match=r"x\.json"):
        algorithms.save(file, [entry(1, 2, 3)])  # what is no cache is not written over
    assert file.read_text() == text


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path):
    file = tmp_path / "x.json"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda m: algorithms.save(file, [entry(m, 8, 8)]), range(1, 33)))
    assert {one.shape[0] for one in algorithms.read(file)} <= set(range(1, 33))
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    with pytest.raises(CannotWrite, match="Is a directory"):
        algorithms.put(tmp_path, "")


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_row_comes_before_an_entry_before_torch(cache):
    row = next(row for row in table.read(table.file_for("NVIDIA H200", 1)).rows if row.design == table.EXACT)
    of_row = row.as_design({"cublas": Cublas})
    M, N, K = 777, 13000, 5120
    assert cublas.tuned(M, N, K, BF16, H200) == Cublas()
    cache.use([entry(M, N, K), entry(*row.shape)])  # and what was memoised is forgotten
    assert cublas.tuned(M, N, K, BF16, H200) == Cublas(algorithm=FOUND)
    assert cublas.tuned(*row.shape, BF16, H200) == of_row != Cublas(algorithm=FOUND)
    for other in ((M + 1, N, K), (M, N + 8, K), (M, N, K + 8)):
        assert cublas.tuned(*other, BF16, H200) == Cublas()
    assert cublas.tuned(M, N, K, torch.float16, H200) == Cublas()
    for elsewhere in ({"device_name": "NVIDIA B200"}, {"is_simulated": True}):
        assert cublas.tuned(M, N, K, BF16, dataclasses.replace(H200, **elsewhere)) == Cublas()


def test_an_entry_is_of_its_cublas(cache, monkeypatch):
    cache.use([entry(777, 13000, 5120)])
    monkeypatch.setattr(cublaslt, "version", lambda: "13.2.0")
    assert cublas.tuned(777, 13000, 5120, BF16, H200) == Cublas()


def test_plans_and_explain_say_where_the_algorithm_is_from(cache):
    cache.use([entry(777, 13000, 5120), entry(778, 13000, 5120, algorithm=None)])
    planned = MATMUL.plan(GemmCall(777, 13000, 5120, BF16), machine(H200, 1))
    assert (planned.name, planned.design, planned.row) == ("cublas", Cublas(algorithm=FOUND), None)
    gated = find_op("matmul_silu_mul").plan(GemmCall(777, 6500, 5120, BF16), machine(H200, 1))
    assert gated.design == Cublas(algorithm=FOUND)
    assert (
        MATMUL.by_rule(GemmCall(777, 13000, 5120, BF16), machine(H200, 1)) == Cublas()
    )  # what weft tune compares with
    told = "".join(str(ops.explain("gemm", M=M, N=13000, K=5120, world_size=1, caps=H200)) for M in (777, 778))
    assert "gets  cublas: tile=24, cluster=5, custom=7" in told
    assert "cached search: bfloat16 777x13000x5120: 90 µs, torch.mm 100 µs (cuBLAS 13.1.1)" in told
    assert "778x13000x5120: torch.mm's choice is the fastest" in told


def test_missing_names_what_neither_rows_nor_entries_hold(cache):
    cache.use([entry(777, 13000, 5120)])
    cublas.tuned(900, 13000, 5120, BF16, H200)  # memoised, and looked for again inside
    with cache.missing() as wanted:
        for M in (777, 900, 900):
            cublas.tuned(M, 13000, 5120, BF16, H200)
    assert list(wanted) == [(BF16, (900, 13000, 5120))]
    cublas.tuned(901, 13000, 5120, BF16, H200)
    assert len(wanted) == 1
