"""Archives of vLLM and SGLang: code of other architectures becomes zeros, and nothing else of a library changes."""

import importlib
import struct
import sys

import pytest

from benchmarks import engine_archive

PTX, CUBIN = 1, 2


def fat_binary(*codes):
    """A fat binary of (kind, architecture, bytes)."""
    parts = [
        struct.pack("<HHIQ", kind, 0x101, 64, len(body)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + body
        for kind, arch, body in codes
    ]
    return engine_archive.FATBIN + struct.pack("<HHQ", 1, 16, sum(map(len, parts))) + b"".join(parts)


FA3 = "FlashAttnFwdSm90INS1_25CollectiveMainloopFwdSm90...ELi{head}ENS_{dtype}EfNS_4arch4Sm90ELb1ELb0ELb{soft_cap}E"


@pytest.mark.parametrize(
    "engine, library, kept",
    [
        ("vllm", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", {(128, 0), (256, 0)}),
        ("sglang", "sgl_kernel/flash_ops.abi3.so", {(128, 0)}),
    ],
)
def test_kernels_that_no_model_here_calls_become_zeros(engine, library, kept, tmp_path):
    """Of FlashAttention 3 bf16 without soft caps is left, for SGLang in heads of 128; and what sums split-KV partials."""
    variants = [
        (head, soft, dtype) for head, soft in ((128, 0), (128, 1), (256, 0)) for dtype in ("10bfloat16_t", "6half_t")
    ]
    bodies = [FA3.format(head=head, dtype=dtype, soft_cap=soft).encode() for head, soft, dtype in variants]
    other, combine = b"sm_80", b"FlashAttnFwdCombine 6half_t"
    data = b"head" + fat_binary((PTX, 90, b"ptx90"), (CUBIN, 80, other), (CUBIN, 90, combine)) + b"between"
    data += fat_binary(*[(CUBIN, 90, body) for body in bodies]) + b"tail"
    file = tmp_path / library
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    chosen = engine_archive.ENGINES[engine]
    engine_archive.slim(tmp_path, chosen, 90)
    left = file.read_bytes()
    assert len(left) == len(data) and left.startswith(b"head") and left.endswith(b"tail") and b"between" in left
    ptx, sm_80, sums, *kernels = [left[code.begin : code.end] for code in engine_archive.codes(left)]
    assert (ptx, sm_80, sums) == (bytes(5), bytes(5), combine)
    for (head, soft, dtype), body, found in zip(variants, bodies, kernels, strict=True):
        assert found == (body if dtype == "10bfloat16_t" and (head, soft) in kept else bytes(len(body)))


def test_files_that_no_engine_needs_are_left_out(tmp_path):
    for name in (
        "bin/sglang",
        "sgl_kernel/sm100/common_ops.abi3.so",
        "sgl_kernel/sm90/common_ops.abi3.so",
        "sglang/srt/a.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    engine_archive.slim(tmp_path, engine_archive.ENGINES["sglang"], 90)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    stand_ins = {f"{name}/__init__.py" for name in ("xgrammar", "IPython", "zstandard")}
    assert left == {"sgl_kernel/sm90/common_ops.abi3.so", "sglang/srt/a.py"} | stand_ins


def test_of_flashinfer_built_modules_stay_and_the_headers_that_they_compile(tmp_path):
    data = "flashinfer/data"
    kept = {
        f"{data}/aot/trtllm_comm/trtllm_comm.so",
        f"{data}/csrc/nv_internal/tensorrt_llm/deep_gemm/fp8_gemm_impl.cuh",
        "tvm_ffi/lib/libtvm_ffi_testing.so",
    }
    for name in (*kept, f"{data}/cutlass/include/a.h", f"{data}/csrc/nv_internal/tensorrt_llm/kernels/a.cu"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    engine_archive.slim(tmp_path, engine_archive.ENGINES["flashinfer"], 90)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == kept


def test_placeholders_can_be_imported_and_not_called(tmp_path, monkeypatch):
    (tmp_path / "nothing_there").mkdir()
    (tmp_path / "nothing_there" / "__init__.py").write_text(engine_archive.PLACEHOLDER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    part = importlib.import_module("nothing_there.display.deeper")
    with pytest.raises(RuntimeError, match="nothing_there is not in this archive"):
        part.HTML("text")


def test_a_magic_number_alone_is_no_fat_binary():
    library = b"text" + engine_archive.FATBIN + b"\x02\x00" + bytes(30)
    assert list(engine_archive.codes(library)) == []
    assert engine_archive.cut(library, 90) == library


def test_packages_that_the_machine_has_are_not_asked_for(tmp_path):
    folder = tmp_path / "one-1.dist-info"
    folder.mkdir()
    needs = "".join(
        f"Requires-Dist: {need}\n" for need in ("numpy", "Small_Thing>=2", "torch==2.11.0", "x; extra == 'y'")
    )
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: one\nVersion: 1\n{needs}")
    assert engine_archive.missing(tmp_path, frozenset({"numpy", "torch"})) == ["Small_Thing>=2"]


def test_what_the_extra_of_another_package_asks_for_is_missing_too(tmp_path):
    pytest.importorskip("packaging")

    def package(name, *requires):
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        lines = [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", *lines]) + "\n"
        )

    package("outer", "inner[languages]>=2", 'absent; extra == "other"')
    package("inner", 'countries; extra == "languages"', 'toys; extra == "play"')
    assert engine_archive.missing(tmp_path, frozenset()) == ["countries"]
    package("countries", "torch")
    assert engine_archive.missing(tmp_path, frozenset({"torch"})) == []
