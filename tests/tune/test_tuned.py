"""The data file: written, read back, and which row a call gets."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from weft.ops.op import find_op
from weft.ops.overlap.sequential import Overlapped
from weft.plan import table as tuned
from weft.plan.planned import machine
from weft.runtime import capabilities

H200 = dataclasses.replace(capabilities.simulated(4), is_simulated=False)
SHIPPED = sorted((Path(tuned.__file__).parent / "tables").glob("*.json"))


def row(op, *shape, us=10.0, design="fused", **config):
    return tuned.Row(
        op=op, dtype="bfloat16", shape=shape, design=design, config=config, us=us, default_us=12.0, candidates=3,
        date="2026-11-20", versions="weft 0.1.0, torch 2.11, triton 3.6",
    )  # fmt: skip


def nearest(rows, op, *shape):
    found = tuned.nearest(rows, op, "bfloat16", shape, Path("x.json"))
    return found and (found.row.shape, found.exact)


def test_a_file_comes_back_as_it_was_a_line_for_each_row(tmp_path):
    table = tuned.Table(gpu="NVIDIA H200", world_size=4).with_rows(
        [row("matmul", 64, 32, 16, block_m=64), row("all_reduce", 4096), row("all_reduce", 1024, design="one_shot")]
    )
    tuned.write(tmp_path / "made" / "x.json", table)
    assert tuned.read(tmp_path / "made" / "x.json") == table
    assert [row.shape for row in table.rows] == [(1024,), (4096,), (64, 32, 16)]
    assert len((tmp_path / "made" / "x.json").read_text().splitlines()) == 1 + 3 + 1
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["x.json"]


def test_a_row_of_the_same_bucket_takes_the_place_of_the_old_one():
    table = tuned.Table(gpu="x", world_size=2, rows=(row("matmul", 1024, 8, 8), row("matmul", 2048, 8, 8)))
    table = table.with_rows([row("matmul", 1000, 8, 8, us=5.0)])
    assert [(row.shape, row.us) for row in table.rows] == [((1000, 8, 8), 5.0), ((2048, 8, 8), 10.0)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "rows": []}', '{"schema": 1, "rows": [{"op": "x"}]}'])
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="x.json: not a file of weft tune"):
        tuned.read(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": "abc"}, r"rows\[1\]: shape='abc' is not a list of positive integers"),
        ({"shape": []}, "is not a list of positive integers"),
        ({"shape": [0, 8, 8]}, "is not a list of positive integers"),
        ({"shape": [1.5, 8, 8]}, "is not a list of positive integers"),
        ({"shape": [[4], 8, 8]}, "is not a list of positive integers"),
        ({"shape": {"M": 4}}, "is not a list of positive integers"),
        ({"op": 3}, r"rows\[1\]: op=3 is not a string"),
        ({"design": None}, "design=None is not a string"),
        ({"config": []}, r"config=\[\] is not an object"),
        ({"us": "fast"}, "us='fast' is not a positive number"),
        ({"us": -1}, "us=-1 is not a positive number"),
        ({"color": "red"}, r"rows\[1\]: .*color"),
    ],
)  # fmt: skip
def test_a_row_that_no_weft_tune_writes_is_refused_by_number(tmp_path, change, message):
    file, rows = tmp_path / "x.json", [dataclasses.asdict(row("matmul", 8, 8, 8))] * 2
    document = {"schema": 2, "gpu": "x", "world_size": 2, "simulated": False, "rows": [rows[0], rows[1] | change]}
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"x.json: not a file of weft tune, schema 2: .*{message}"):
        tuned.read(file)


@pytest.mark.parametrize(
    ("change", "message"), [({"world_size": "2"}, "world_size='2'"), ({"gpu": None}, "gpu=None"), ({"rows": 3}, "")]
)
def test_a_head_that_no_weft_tune_writes_is_refused(tmp_path, change, message):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"schema": 2, "gpu": "x", "world_size": 2, "rows": []} | change))
    with pytest.raises(ValueError, match=f"x.json: not a file of weft tune, schema 2: .*{message}"):
        tuned.read(file)


def test_the_nearest_row_within_a_factor_of_two():
    rows = [row("matmul", m, n, 5120) for m, n in ((1024, 2560), (4096, 2560), (4096, 12800))]
    assert nearest(rows, "matmul", 1024, 2560, 5120) == ((1024, 2560, 5120), True)
    assert nearest(rows, "matmul", 1100, 2560, 5120) == ((1024, 2560, 5120), True)
    assert nearest(rows, "matmul", 1500, 2560, 5120) == ((1024, 2560, 5120), False)
    assert nearest(rows, "matmul", 8192, 12000, 6000) == ((4096, 12800, 5120), False)
    for far in ((511, 2560, 5120), (8193, 2560, 5120), (1024, 5600, 5120), (1024, 2560, 2559), (0, 2560, 5120)):
        assert nearest(rows, "matmul", *far) is None
    assert nearest(rows, "all_gather_matmul", 1024, 2560, 5120) is None


def test_ranks_with_different_shares_of_K_agree_on_what_they_must():
    rows = [
        row("matmul_all_reduce", 1024, 5120, 2048, tile={"block_m": 64, "block_k": 64}),
        row("matmul_all_reduce", 1024, 5120, 3000, tile={"block_m": 128, "block_k": 32}),
        row("matmul_all_reduce", 1024, 5120, 6400, tile={"block_m": 128, "block_k": 128}),
        row("matmul_all_reduce", 2048, 5120, 9000, tile={"block_m": 256, "block_k": 128}),
    ]
    chosen = {}
    for m, k in itertools.product((700, 1024, 1400, 1500, 4000), (0, 1, 2048, 3000, 4000, 6400, 10**6)):
        found = tuned.nearest(rows, "matmul_all_reduce", "bfloat16", (m, 5120, k), Path("x"), ranks_differ_in_k=True)
        chosen[m, k] = found.row.config["tile"]
    for m in (700, 1024, 1400, 1500, 4000):
        assert len({config["block_m"] for (other, _), config in chosen.items() if other == m}) == 1
    # The largest K of the nearest M and N has most to lose; what is a rank's own follows its own K.
    assert chosen[1024, 2048] == {"block_m": 128, "block_k": 32}
    assert chosen[1024, 10**6] == {"block_m": 128, "block_k": 128}


def test_what_moves_as_many_bytes_takes_the_rows_of_bf16(monkeypatch, tmp_path):
    path = tmp_path / "some-gpu.w4.json"
    monkeypatch.setattr(tuned, "file_for", lambda gpu, world_size: path)
    own = dataclasses.replace(row("matmul_all_reduce", 2048, 64, 32, block_m=64), dtype="float16")
    rows = [
        row("all_reduce", 4096), row("matmul_all_reduce", 1024, 64, 32, block_m=128), own,
        row("matmul", 1024, 64, 32, design="cublas"),
    ]  # fmt: skip
    tuned.write(path, tuned.Table(gpu="Some GPU", world_size=4).with_rows(rows))
    caps = dataclasses.replace(H200, device_name="Some GPU of this test")

    def found(op, shape, dtype):
        one = tuned.find(op, shape, dtype, 4, caps)
        return one and (one.row.dtype, one.row.shape)

    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8):
        assert found("all_reduce", (4096,), dtype) == ("bfloat16", (4096,))
    product = ("matmul_all_reduce", (512, 64, 32))
    assert [found(*product, dtype) for dtype in (torch.float16, torch.float32)] == [("bfloat16", (1024, 64, 32)), None]
    # Its own row, where one is near.
    assert found("matmul_all_reduce", (1024, 64, 32), torch.float16) == ("float16", (2048, 64, 32))
    assert found("matmul", (1024, 64, 32), torch.bfloat16) and found("matmul", (1024, 64, 32), torch.float16) is None


def test_unknown_gpus_have_no_row(tmp_path):
    shape = (4096, 12800, 5120)
    assert tuned.find("matmul", shape, torch.bfloat16, 1, capabilities.simulated(1)) is not None
    assert tuned.find("matmul", shape, torch.bfloat16, 7, H200) is None
    other = dataclasses.replace(H200, device_name="Some GPU (2 TiB)")
    assert tuned.find("matmul", shape, torch.bfloat16, 1, other) is None
    assert tuned.file_for("Some GPU (2 TiB)", 3, tmp_path) == tmp_path / "some-gpu-2-tib.w3.json"


def test_a_gpu_with_the_same_processor_takes_rows_where_it_has_none(monkeypatch, tmp_path):
    file_for = tuned.file_for
    monkeypatch.setattr(tuned, "file_for", lambda gpu, world_size: file_for(gpu, world_size, tmp_path))
    monkeypatch.setattr(tuned, "SAME_PROCESSOR", {"Some GPU": "Some GPU with faster memory"})
    own, other = row("matmul", 1024, 64, 32, block_m=64), row("matmul", 1024, 64, 32, block_m=128)
    far = row("matmul", 4096, 64, 32, block_m=256)
    caps = dataclasses.replace(H200, device_name="Some GPU")

    def found(M):
        one = tuned.find("matmul", (M, 64, 32), torch.bfloat16, 4, caps)
        return one and (one.file.name, one.row.config["block_m"])

    assert found(1024) is None
    assert tuned.why_none("matmul", (1024, 64, 32), torch.bfloat16, 4, caps) == " (no some-gpu.w4.json: run weft tune)"
    for gpu, rows in (("Some GPU with faster memory", (other, far)), ("Some GPU", (own,))):
        tuned.write(tuned.file_for(gpu, 4), tuned.Table(gpu=gpu, world_size=4).with_rows(rows))
    assert found(1024) == ("some-gpu.w4.json", 64)
    assert found(4096) == ("some-gpu-with-faster-memory.w4.json", 256)
    assert found(64) is None
    why = tuned.why_none("matmul", (64, 64, 32), torch.bfloat16, 4, caps)
    assert why == (
        " (some-gpu.w4.json and some-gpu-with-faster-memory.w4.json have no row of bfloat16 near this shape)"
    )


def test_found_says_file_key_and_microseconds():
    found = tuned.nearest([row("matmul", 1000, 64, 32)], "matmul", "bfloat16", (1500, 64, 32), Path("a/h200.w1.json"))
    assert found.reason == (
        "h200.w1.json: matmul bfloat16 1024x64x32: 10 µs, the default 12, the nearest row "
        "(2026-11-20, weft 0.1.0, torch 2.11, triton 3.6)"
    )


def test_a_row_that_no_longer_fits_says_so():
    designs = find_op("matmul_all_reduce").designs
    with pytest.raises(ValueError, match="tuned row matmul bfloat16 16x8x8 does not fit design 'fused' .*warp_count"):
        row("matmul", 16, 8, 8, warp_count=4).as_design(designs)
    with pytest.raises(ValueError, match="does not fit design 'segments'"):
        row("matmul", 16, 8, 8, design="segments").as_design(designs)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_what_is_shipped_fits_the_ops(file):
    table = tuned.read(file)
    assert file == tuned.file_for(table.gpu, table.world_size)
    assert not table.simulated
    for one in table.rows:
        name, *variants = one.op.split("+")
        op = find_op(name)
        assert set(variants) <= set(op.variants)
        assert tuned.row_shape(one.design, one.shape) == one.shape
        if one.design == "sequential":
            assert one.config == {}
        else:
            assert op.config_of(one.as_design(op.designs)).keys() >= one.config.keys()


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ranks_with_any_shares_of_K_agree_by_what_is_shipped_or_by_rule(world_size, dtype):
    here = machine(H200, world_size)
    names = ("matmul_reduce_scatter", "matmul_all_reduce")
    for name, M, N in itertools.product(names, (300, 600, 1024, 3000, 8192, 20000), (2560, 5120, 8192, 12800)):
        op, M, settings = find_op(name), M // world_size * world_size, set()
        for K in (16, 1000, 2048, 3000, 4096, 7168, 10**6):
            planned = op.plan(op.call_of((M, N, K), dtype, here), here)
            settings.add(tuned.agreed_of(row(name, M, N, K, design=planned.name, **op.config_of(planned.design))))
        assert len(settings) == 1, (name, M, N)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_row_says_what_the_default_takes(world_size):
    """As long as when it was measured: a rule that has changed since makes the default's time another's.

    Not of ops whose default has the least predicted time, which changes with each fit.
    """
    here = machine(H200, world_size)
    for one in tuned.read(tuned.file_for("NVIDIA H200", world_size)).rows:
        op = find_op(one.op.partition("+")[0])
        if len(one.shape) == 3 and "+" not in one.op and not isinstance(op, Overlapped):
            default = op.by_rule(op.call_of(one.shape, torch.bfloat16, here), here)
            same = (op.name_of(default), op.config_of(default)) == (one.design, one.config)
            assert same == (one.us == one.default_us), one.key


def test_an_algorithm_of_the_library_stands_for_its_shape_alone():
    rows = [
        row("matmul", 1024, 8, 8, design="cublas", algorithm={"tile": 29}),
        row("matmul", 1100, 8, 8, design="cublas", algorithm={"tile": 30}),
    ]
    table = tuned.Table(gpu="x", world_size=1).with_rows(rows)
    assert [one.shape for one in table.rows] == [
        (1024, 8, 8),
        (1100, 8, 8),
    ]  # in one bucket, and neither takes the other's place
    assert nearest(rows, "matmul", 1100, 8, 8) == ((1100, 8, 8), True)
    for other in ((1101, 8, 8), (1024, 16, 8), (1024, 8, 9)):
        assert nearest(rows, "matmul", *other) is None
    table = table.with_rows([row("matmul", 1024, 8, 8, design="persistent")])
    assert [one.design for one in table.rows] == ["persistent", "cublas"]
    assert nearest(table.rows, "matmul", 1101, 8, 8) == ((1024, 8, 8), True)


def test_a_small_m_row_stands_for_all_rows_that_fill_its_tile():
    rows = [row("matmul", m, 8, 8, design="small_m") for m in (16, 64, 96, 128)]
    table = tuned.Table(gpu="x", world_size=1).with_rows(rows)
    assert [one.shape[0] for one in table.rows] == [16, 64, 96, 128]
    for m, shape in (
        (1, 16),
        (16, 16),
        (17, None),
        (33, 64),
        (64, 64),
        (65, None),
        (95, None),
        (96, 96),
        (127, 96),
        (128, 128),
        (129, None),
    ):
        assert nearest(rows, "matmul", m, 8, 8) == (shape and ((shape, 8, 8), True)), m
    assert nearest(rows, "matmul", 16, 16, 8) is None
    chosen = tuned.nearest(
        [dataclasses.replace(rows[0], us=None, default_us=None)], "matmul", "bfloat16", (3, 8, 8), Path("x")
    )
    assert "x: matmul bfloat16 16x8x8: chosen in whole steps (" in chosen.reason
