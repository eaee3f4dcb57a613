"""The archive of vLLM: code of other architectures becomes zeros, and nothing else changes."""

import struct

from benchmarks import vllm_archive

PTX, CUBIN = 1, 2


def fat_binary(*codes):
    """A fat binary of (kind, architecture, bytes)."""
    parts = [
        struct.pack("<HHIQ", kind, 0x101, 64, len(body)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + body
        for kind, arch, body in codes
    ]
    return vllm_archive.FATBIN + struct.pack("<HHQ", 1, 16, sum(map(len, parts))) + b"".join(parts)


def test_code_of_other_architectures_becomes_zeros():
    half = b"..ENS_6half_tEfNS_4arch4Sm90.."
    first = fat_binary((PTX, 80, b"ptx80"), (CUBIN, 80, b"sm_80"), (CUBIN, 90, b"sm_90"))
    library = b"head" + first + b"between" + fat_binary((CUBIN, 90, half), (CUBIN, 90, b"bf16")) + b"tail"
    left = vllm_archive.cut(library, 90)
    assert len(left) == len(library)
    assert [(code.arch, left[code.begin : code.end]) for code in vllm_archive.codes(left)] == [
        (80, bytes(5)), (80, bytes(5)), (90, b"sm_90"), (90, bytes(len(half))), (90, b"bf16"),
    ]  # fmt: skip
    assert left.startswith(b"head") and left.endswith(b"tail") and b"between" in left


def test_a_magic_number_alone_is_no_fat_binary():
    library = b"text" + vllm_archive.FATBIN + b"\x02\x00" + bytes(30)
    assert list(vllm_archive.codes(library)) == []
    assert vllm_archive.cut(library, 90) == library


def test_packages_that_the_machine_has_are_not_asked_for(tmp_path):
    folder = tmp_path / "one-1.dist-info"
    folder.mkdir()
    needs = "".join(
        f"Requires-Dist: {need}\n" for need in ("numpy", "Small_Thing>=2", "torch==2.11.0", "x; extra == 'y'")
    )
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: one\nVersion: 1\n{needs}")
    assert vllm_archive.missing(tmp_path, frozenset({"numpy"})) == ["Small_Thing>=2"]
