"""GEMMs of the cuBLASLt that ships with torch, by ctypes, with an algorithm that the caller chooses.

torch.mm runs the first algorithm that cuBLAS's heuristics name, which is often not the fastest, and offers no choice. Names
and numbers come from cublasLt.h (CUDA 13.1). Without cuBLASLt, and on ROCm, ``matmul`` returns False and does nothing.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from contextlib import nullcontext
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import CublasError
from weft.runtime.codec import exchangeable

# cudaDataType_t, cublasComputeType_t, cublasOperation_t
_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_FLOAT, _COMPUTE_32F, _TRANSPOSE = 0, 68, 1
# cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t
_TRANSA, _SM_COUNT_TARGET = 3, 15
_MAX_WORKSPACE_BYTES, _MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
# cublasLtMatmulAlgoConfigAttributes_t: field of Algorithm -> its number and type. cublasLtMatmulAlgoInit sets the id.
_ID = 0
_FIELDS: dict[str, tuple[int, Any]] = {
    "tile": (1, c_uint32), "swizzle": (4, c_uint32), "custom": (5, c_uint32), "stages": (6, c_uint32),
    "cluster": (8, ctypes.c_uint16),
}  # fmt: skip
_SPLIT_K = 2
# The workspace that torch gives cuBLAS on Hopper (CUBLAS_WORKSPACE_CONFIG).
_WORKSPACE_BYTES = 32 << 20
# Alignment of operands that the algorithms' TMA accesses need, and that the heuristics are told.
ALIGNMENT = 16
# SM counts that the heuristics are told, 0 for all; each count brings other algorithms.
_SM_COUNTS = (0, 64, 96, 120)
_MOST = 64
_STAGES_64_AUTO, _FIRST_OF_SM90 = 35, 66


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Attributes of a cublasLtMatmulAlgo_t that does not split K.

    id       66: the 16-bit kernels for sm_90
    tile     cublasLtMatmulTile_t, columns x rows of the output (out is out.T to cuBLAS): 20 is 128x128, 23 128x256,
             24 256x128, 29 128x160, 30 160x128, 184 144x128, 197 168x128, 201 176x128, 247 320x64, 248 320x128
    cluster  cublasLtClusterShape_t: 2 is 1x1, 3 2x1, 4 4x1, 5 1x2, 6 2x2
    custom   variant of the kernel, undocumented
    swizzle  1: tiles in an order with more L2 hits
    stages   cublasLtMatmulStages_t: 35 is stages of 64 along K, as many as fit
    """

    tile: int
    cluster: int
    custom: int
    swizzle: int = 0
    stages: int = _STAGES_64_AUTO
    id: int = _FIRST_OF_SM90


class _Algo(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algo", _Algo), ("workspace_bytes", c_size_t), ("status", c_int), ("waves", c_float), ("reserved", c_int * 4),
    ]  # fmt: skip


@functools.cache
def _cublaslt() -> ctypes.CDLL | None:
    """The cuBLASLt that torch has loaded; None without one."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    library.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
    library.cublasLtGetVersion.restype = c_size_t
    return library


def version() -> str:
    """Version of the loaded cuBLASLt, such as 13.1.1; "" without one."""
    library = _cublaslt()
    if library is None:
        return ""
    number = library.cublasLtGetVersion()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _call(name: str, *arguments: object) -> None:
    status = getattr(_cublaslt(), f"cublasLt{name}")(*arguments)
    if status:
        raise CublasError(name, status)


def _handle() -> c_void_p:
    """torch's cuBLAS handle of this thread and device, which is a cublasLtHandle_t as well (cublasLt.h)."""
    return c_void_p(torch._C._cuda_getCurrentBlasHandle())


class _Gemm:
    """Description of out[M, N] = a[M, K] @ b[N, K].T with strided rows.

    cuBLAS is column-major and computes out.T = b @ a.T.
    """

    def __init__(self, size: tuple[int, int, int], strides: tuple[int, int, int], dtype: torch.dtype) -> None:
        M, N, K = size
        self.description, self.a, self.b, self.out = c_void_p(), c_void_p(), c_void_p(), c_void_p()
        _call("MatmulDescCreate", byref(self.description), _COMPUTE_32F, _FLOAT)
        self._describe(_TRANSA, c_int32(_TRANSPOSE))
        for layout, rows, columns, stride in zip(
            (self.a, self.b, self.out), (K, K, N), (M, N, M), strides, strict=True
        ):
            _call(
                "MatrixLayoutCreate", byref(layout), _TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(stride)
            )
        self._dtype = dtype
        weakref.finalize(self, _destroy, self.description, self.a, self.b, self.out).atexit = False

    def named(self, sms: int) -> list[_Algo]:
        """Algorithms that the heuristics name for a GPU of ``sms`` SMs, best first."""
        self._describe(_SM_COUNT_TARGET, c_int32(sms))
        preference, results, count = c_void_p(), (_Result * _MOST)(), c_int()
        _call("MatmulPreferenceCreate", byref(preference))
        try:
            most = c_uint64(_WORKSPACE_BYTES)
            _call("MatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE_BYTES, byref(most), c_size_t(8))
            for attribute in _MIN_ALIGNMENTS:
                value = c_uint32(ALIGNMENT)
                _call("MatmulPreferenceSetAttribute", preference, attribute, byref(value), c_size_t(4))
            _call("MatmulAlgoGetHeuristic", _handle(), *self._operands(), preference, _MOST, results, byref(count))
        finally:
            _call("MatmulPreferenceDestroy", preference)
            self._describe(_SM_COUNT_TARGET, c_int32(0))
        return [result.algo for result in results[: count.value] if result.status == 0]

    def find(self, algorithm: Algorithm) -> tuple[_Algo, int] | None:
        """``algorithm`` and its bytes of scratch memory; None if this GPU or cuBLASLt version lacks it."""
        algo, types = _Algo(), [_TYPES[self._dtype]] * 4
        library, result = _cublaslt(), _Result()
        assert library is not None
        if library.cublasLtMatmulAlgoInit(_handle(), _COMPUTE_32F, _FLOAT, *types, algorithm.id, byref(algo)):
            return None
        for name, (attribute, kind) in _FIELDS.items():
            value = kind(getattr(algorithm, name))
            size = c_size_t(ctypes.sizeof(kind))
            if library.cublasLtMatmulAlgoConfigSetAttribute(byref(algo), attribute, byref(value), size):
                return None
        refused = library.cublasLtMatmulAlgoCheck(_handle(), *self._operands(), byref(algo), byref(result))
        usable = not refused and not result.status and result.workspace_bytes <= _WORKSPACE_BYTES
        return (algo, result.workspace_bytes) if usable else None

    def _describe(self, attribute: int, value: c_int32) -> None:
        _call("MatmulDescSetAttribute", self.description, attribute, byref(value), c_size_t(4))

    def _operands(self) -> tuple[c_void_p, ...]:
        return self.description, self.b, self.a, self.out, self.out


def _destroy(description: c_void_p, *layouts: c_void_p) -> None:
    _call("MatmulDescDestroy", description)
    for layout in layouts:
        _call("MatrixLayoutDestroy", layout)


_ONE, _ZERO = c_float(1), c_float(0)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Arguments of cublasLtMatmul that depend on no address, and the owners of their memory."""

    gemm: _Gemm
    algo: _Algo
    workspace_bytes: int

    def run(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        library, gemm, there = _cublaslt(), self.gemm, out.data_ptr()
        assert library is not None
        alpha, beta = ctypes.addressof(_ONE), ctypes.addressof(_ONE if add else _ZERO)
        # Separate scratch for each call, since calls may run on several streams at once.
        scratch = a.new_empty(self.workspace_bytes, dtype=torch.uint8) if self.workspace_bytes else None
        status = library.cublasLtMatmul(
            _handle(), gemm.description, alpha, b.data_ptr(), gemm.b, a.data_ptr(), gemm.a, beta,
            there, gemm.out, there, gemm.out, ctypes.addressof(self.algo),
            None if scratch is None else scratch.data_ptr(), self.workspace_bytes,
            torch._C._cuda_getCurrentRawStream(a.device.index),
        )  # fmt: skip
        if status:
            raise CublasError("Matmul", status)


# Shape, strides and dtype of an operand.
_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@functools.lru_cache(maxsize=4096)
def _prepared(device: int, a: _Layout, b: _Layout, out: _Layout, algorithm: Algorithm) -> _Prepared | None:
    """The prepared call on a device; None if the algorithm is missing there or does not fit the operands."""
    if not all(_fits(layout, a[2]) for layout in (a, b, out)):
        return None
    (M, K), N = a[0], b[0][0]
    gemm = _Gemm((M, N, K), (a[1][0], b[1][0], out[1][0]), a[2])
    chosen = gemm.find(algorithm)
    return None if chosen is None else _Prepared(gemm, *chosen)


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, algorithm: Algorithm, *, add: bool = False) -> bool:
    """Compute ``out`` = a[M, K] @ b[N, K].T on the current stream, plus the old ``out`` if ``add``.

    Returns False, and does nothing, where ``algorithm`` does not exist or cannot read the operands' dtype, strides or
    alignment. Rows may be strided. fp16 and bf16 with fp32 sums, rounded, and rounded again where they are added to ``out``;
    the same bits from call to call.
    """
    if _cublaslt() is None:
        return False
    index = a.device.index
    layouts = [(x.shape, x.stride(), x.dtype) for x in (a, b, out)]
    elsewhere = torch._C._cuda_getDevice() != index
    with torch.cuda.device(index) if elsewhere else nullcontext():
        prepared = _prepared(index, *layouts, algorithm)
        if prepared is None or (a.data_ptr() | b.data_ptr() | out.data_ptr()) % ALIGNMENT:
            return False
        prepared.run(a, b, out, add)
    return True


def algorithms(M: int, N: int, K: int, dtype: torch.dtype) -> list[Algorithm]:
    """Algorithms that cuBLAS's heuristics name for the current GPU, best first.

    Those that ``Algorithm`` cannot describe are left out.
    """
    if _cublaslt() is None or dtype not in _TYPES:
        return []
    gemm = _Gemm((M, N, K), (K, K, N), dtype)
    named = [_read(algo) for sms in _SM_COUNTS for algo in gemm.named(sms)]
    return [one for one in dict.fromkeys(named) if one is not None and gemm.find(one) is not None]


def _read(algo: _Algo) -> Algorithm | None:
    """The attributes of an algorithm; None if it splits K."""
    if _attribute(algo, _SPLIT_K, c_int32) > 1:
        return None
    fields = {name: _attribute(algo, number, kind) for name, (number, kind) in _FIELDS.items()}
    return Algorithm(id=_attribute(algo, _ID, c_int32), **fields)


def _attribute(algo: _Algo, number: int, kind: Any) -> int:
    value, written = kind(), c_size_t()
    _call(
        "MatmulAlgoConfigGetAttribute", byref(algo), number, byref(value), c_size_t(ctypes.sizeof(kind)), byref(written)
    )
    return value.value


def _fits(layout: _Layout, dtype: torch.dtype) -> bool:
    shape, strides, own = layout
    if own != dtype or dtype not in _TYPES or len(shape) != 2 or 0 in shape or strides[1] != 1:
        return False
    return strides[0] * dtype.itemsize % ALIGNMENT == 0
