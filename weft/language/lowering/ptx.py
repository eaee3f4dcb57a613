"""All assembly for NVIDIA GPUs. Each function names its instruction and why stock Triton lacks it.

All threads of the program run each function; where one thread must act, the predicate is inside.
"""

import triton
import triton.language as tl


@triton.jit
def store_release_sys(ptr, value):
    """``st.release.sys`` by one thread.

    Stock Triton has release atomics only, whose result would cross the link back.
    """
    if ptr.dtype.element_ty.primitive_bitwidth == 64:
        tl.inline_asm_elementwise(
            "{ .reg .pred one; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 one, t, 0; "
            "@one st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l", [ptr, tl.cast(value, tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred one; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 one, t, 0; "
            "@one st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r", [ptr, tl.cast(value, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def store_unseen(ptr, x, mask):
    """``st.volatile`` of each element of 2 or 4 bytes where ``mask`` is true.

    GSan instruments Triton's stores alone.
    """
    bits: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    if bits == 32:
        tl.inline_asm_elementwise(
            "{ .reg .pred here; setp.ne.s32 here, $3, 0; @here st.volatile.global.b32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r,r", [ptr, x.to(tl.int32, bitcast=True), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred here; setp.ne.s32 here, $3, 0; @here st.volatile.global.b16 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,h,r", [ptr, x.to(tl.int16, bitcast=True), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_unseen(ptr, mask):
    """``ld.volatile`` of each element of 2 or 4 bytes, 0 where ``mask`` is false.

    For GSan, like ``store_unseen``.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    here = tl.broadcast_to(mask, ptr.shape).to(tl.int32)
    if dtype.primitive_bitwidth == 32:
        bits = tl.inline_asm_elementwise(
            "{ .reg .pred here; setp.ne.s32 here, $2, 0; mov.b32 $0, 0; @here ld.volatile.global.b32 $0, [$1]; }",
            "=&r,l,r", [ptr, here], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        bits = tl.inline_asm_elementwise(
            "{ .reg .pred here; setp.ne.s32 here, $2, 0; mov.b16 $0, 0; @here ld.volatile.global.b16 $0, [$1]; }",
            "=&h,l,r", [ptr, here], dtype=tl.int16, is_pure=False, pack=1,
        )  # fmt: skip
    return bits.to(dtype, bitcast=True)


@triton.jit
def drain_bulk_stores():
    """``cp.async.bulk.wait_group 0``: this thread's bulk stores are complete and visible.

    Stock Triton emits the ``.read`` form, after which shared memory may be reused but the data need not have landed.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fence_proxy_async():
    """``fence.proxy.async.global``: later bulk (TMA) loads of this thread see what generic loads may see."""
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fence_acq_rel_sys():
    """``fence.acq_rel.sys`` in every thread (``__threadfence_system``)."""
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_bulk_l2(ptr, nbytes):
    """``cp.async.bulk.prefetch.L2`` of ``nbytes`` from ``ptr`` on, for each element of both.

    None where ``nbytes`` is 0. Stock Triton has no prefetch.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.ne.u32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [ptr, nbytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def zero():
    """Zero from a volatile ``mov``: code that depends on it is not moved before it or out of a loop."""
    return tl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def multimem_sums(dtype):
    """Assembly of ``multimem_ld_reduce`` for fp32, bf16 or fp16, the last two added in fp32."""
    narrow = {"bf16": "bf16x2", "fp16": "f16x2"}.get(dtype.name)
    register = "b32" if narrow else "f32"
    kind = f"add.acc::f32.v4.{narrow}" if narrow else "add.v4.f32"
    return (
        f"{{ .reg .pred here; .reg .{register} a, b, c, d; setp.ne.s32 here, $5, 0; "
        f"mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0; "
        f"@here multimem.ld_reduce.relaxed.sys.global.{kind} {{a, b, c, d}}, [$4]; "
        f"mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d; }}"
    )


@triton.jit
def multimem_ld_reduce(ptr, mask):
    """``multimem.ld_reduce.add`` of the 16 bytes at each multicast address: four int32 blocks.

    0 where masked off. Stock Triton has no multimem.
    """
    return tl.inline_asm_elementwise(
        multimem_sums(ptr.dtype.element_ty), "=r,=r,=r,=r,l,r", [ptr, mask.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def multimem_st(ptr, w0, w1, w2, w3, mask):
    """``multimem.st`` of 16 bytes at each multicast address. Stock Triton has no multimem."""
    tl.inline_asm_elementwise(
        "{ .reg .pred here; .reg .f32 a, b, c, d; setp.ne.s32 here, $6, 0; "
        "mov.b32 a, $2; mov.b32 b, $3; mov.b32 c, $4; mov.b32 d, $5; "
        "@here multimem.st.relaxed.sys.global.v4.f32 [$1], {a, b, c, d}; mov.u32 $0, 0; }",
        "=r,l,r,r,r,r,r", [ptr, w0, w1, w2, w3, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# Assembly that brings the number at a place of two words to bf16's bits, in m (weft.kernels.four_bit.place_bits).
PICKED = (
    "and.b32 m, $1, 0x81C081C0; ",
    "shl.b32 m, $1, 3; and.b32 m, m, 0x81C081C0; ",
    "shl.b32 m, $1, 6; and.b32 m, m, 0x81C081C0; ",
    "shl.b32 s, $1, 1; and.b32 s, s, 0x80008000; shr.b32 m, $1, 5; lop3.b32 s, m, 0x01000100, s, 0xEA; "
    "shr.b32 m, $1, 4; lop3.b32 m, m, 0x00C000C0, s, 0xEA; ",
)


@triton.constexpr_function
def e2m1_assembly(place, whole):
    """Assembly of ``scaled_e2m1`` for two words.

    Exponent and mantissa go to the lowest ones of bf16: 2**-126 times the number, also where it is subnormal. If not
    ``whole``, two multiplications, each exact, since bf16 has no 2**126 times any scale.
    """
    multiplied = "" if whole else "fma.rn.bf16x2 m, m, large, zero; "
    return (
        "{ .reg .b32 m, s, large, zero; mov.b32 large, 0x7E807E80; mov.b32 zero, 0x80008000; "
        f"{PICKED[place]}{multiplied}fma.rn.bf16x2 $0, m, $2, zero; }}"
    )


@triton.jit
def scaled_e2m1(words, scales, PLACE: tl.constexpr, WHOLE: tl.constexpr):
    """bf16 of e2m1 numbers, two in an instruction. Stock Triton takes some ten instructions for one."""
    return tl.inline_asm_elementwise(
        e2m1_assembly(PLACE, WHOLE), "=r,r,r", [words, scales], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.constexpr_function
def int4_assembly(place):
    """Assembly of ``scaled_int4`` for two words: bf16 of 128 + number ends with the number's bits."""
    shifted = f"shr.b32 m, $1, {4 * place}; " if place else "mov.b32 m, $1; "
    return (
        "{ .reg .b32 m, large, one, zero; "
        "mov.b32 large, 0x43004300; mov.b32 one, 0x3F803F80; mov.b32 zero, 0x80008000; "
        f"{shifted}lop3.b32 m, m, 0x000F000F, large, 0xEA; fma.rn.bf16x2 m, m, one, $3; fma.rn.bf16x2 $0, m, $2, zero; }}"
    )


@triton.jit
def scaled_int4(words, scales, less, PLACE: tl.constexpr):
    """bf16 of int4 numbers + 128 + ``less``, which is exact, times bf16 ``scales``; two in an instruction."""
    return tl.inline_asm_elementwise(
        int4_assembly(PLACE), "=r,r,r,r", [words, scales, less], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def globaltimer_us():
    """Microseconds of the GPU's global clock, int64."""
    return globaltimer() // 1000


@triton.jit
def globaltimer():
    """Nanoseconds of the GPU's global clock, int64; it steps by 32 on H200."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def globaltimer_low():
    """Lower 32 bits of the GPU's global clock in nanoseconds, int32."""
    return tl.inline_asm_elementwise("mov.u32 $0, %globaltimer_lo;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def record(ring, records: tl.constexpr, began, of_code, where, seen, happened):
    """Write a record (``trace_rings.Record``) by one thread: an atomic for its place, two stores.

    The other threads do not wait for it. ``ring``: pointer to the ring, whose first word counts its records.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred one; .reg .u32 t, place, sm, took; .reg .u64 now, at, what, wide; "
        "mov.u32 t, %tid.x; setp.eq.u32 one, t, 0; setp.ne.and.u32 one, $7, 0, one; "
        "mov.u64 now, %globaltimer; cvt.u32.u64 took, now; sub.u32 took, took, $3; mov.u32 sm, %smid; "
        "mov.u32 place, 0; @one atom.global.add.u32 place, [$1], 1; and.b32 place, place, $2; "
        "mad.wide.u32 at, place, 32, $1; cvt.u64.u32 what, sm; shl.b64 what, what, 32; cvt.u64.u32 wide, took; "
        "or.b64 what, what, wide; or.b64 what, what, $4; "
        "@one st.global.v2.u64 [at + 32], {now, what}; @one st.global.v2.u64 [at + 48], {$5, $6}; mov.u32 $0, 0; }",
        "=r,l,r,r,l,l,l,r",
        [ring, tl.full((), records - 1, tl.int32), began, of_code, where, seen, happened],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# 64-bit words of a record of ``give_up`` after its state.
RECORDED = tl.constexpr(15)


@triton.constexpr_function
def give_up_assembly():
    stores = "".join(f"@first st.global.b64 [$1 + {8 * word}], ${2 + word}; " for word in range(1, RECORDED.value + 1))
    return (
        "{ .reg .pred first, early; .reg .b64 state; "
        "atom.acq_rel.sys.global.cas.b64 state, [$1], 0, 1; setp.eq.b64 first, state, 0; "
        f"{stores}@first atom.release.sys.global.exch.b64 state, [$1], $2; "
        "ended: ld.acquire.sys.global.b64 state, [$1]; setp.lt.s64 early, state, 2; @early bra ended; "
        "trap; mov.u32 $0, 0; }"
    )


@triton.jit
def give_up(record, state, w):
    """Write ``w``, RECORDED int64, after the one at ``record``, set that to ``state``, end the kernel.

    By the first thread that finds 0 there; later threads wait for it. A thread acts alone, without a barrier: threads read
    their clocks at different times, so not all of a program need give up.
    """
    tl.inline_asm_elementwise(
        give_up_assembly(), "=r,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l",
        [record, state, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
