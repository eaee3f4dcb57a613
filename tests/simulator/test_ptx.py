"""Inline PTX in the simulator: values, threads, branches, loops that wait, and what is refused."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core

import weft
from weft.errors import Deadlock, NotInterpretable
from weft.runtime.simulate import simulate
from weft.simulator.ptx.parsing import Address, Register, Vector, parse


def test_a_block_is_read_into_instructions():
    code = parse(
        """{
            .reg .pred %p<1>;   // a comment
            again: atom.global.sys.acquire.cas.b32 %r0, [$1 + 8], 1, 0;
            setp.eq.u32 %p0, %r0, 0x1;
            @!%p0 bra again;
            ld.relaxed.v2.b32 {$0, _}, [%rd1];
        }"""
    )
    atom, _, branch, load = code.instructions
    assert atom.modifiers == ("global", "sys", "acquire", "cas", "b32") and atom.operands[1] == Address(
        Register("$1"), 8
    )
    assert branch.guard == "%p0" and branch.negated and code.labels == {"again": 0} and code.loops
    assert load.operands[0] == Vector((Register("$0"), Register("_")))
    with pytest.raises(NotInterpretable, match="branches to a label"):
        parse("bra nowhere;")
    with pytest.raises(NotInterpretable, match="cannot be read"):
        parse("mov.u32 $0, <5>;")


@triton.jit
def computes(x, out, ASM: tl.constexpr):
    at = tl.arange(0, 8)
    tl.store(out + at, tl.inline_asm_elementwise(ASM, "=r,r,r", [tl.load(x + at), at], tl.int32, True, 1))


@pytest.mark.parametrize(
    ("assembly", "expected"),
    [
        ("add.s32 $0, $1, $2;", lambda x, i: x + i),
        ("sub.s32 $0, $1, 3;", lambda x, i: x - 3),
        ("mul.lo.s32 $0, $1, $2;", lambda x, i: x * i),
        ("mad.lo.s32 $0, $1, $2, 7;", lambda x, i: x * i + 7),
        ("min.s32 $0, $1, $2;", torch.minimum),
        ("max.u32 $0, $1, $2;", lambda x, i: torch.where(x < 0, x, torch.maximum(x, i))),
        ("and.b32 $0, $1, $2;", lambda x, i: x & i),
        ("shl.b32 $0, $1, 2;", lambda x, i: x << 2),
        ("shr.s32 $0, $1, 1;", lambda x, i: x >> 1),
        ("not.b32 $0, $1;", lambda x, i: ~x),
        ("neg.s32 $0, $1;", lambda x, i: -x),
        ("{.reg .pred p; setp.lt.s32 p, $1, 0; selp.b32 $0, 1, 2, p;}", lambda x, i: torch.where(x < 0, 1, 2)),
        ("{.reg .pred p; setp.lt.s32 p, $1, 0; mov.u32 $0, $1; @p mov.u32 $0, $2;}", lambda x, i: torch.where(x < 0, i, x)),
        ("{.reg .pred p; mov.u32 $0, 5; setp.ge.s32 p, $1, 0; @p bra end; mov.u32 $0, 6; end:}",
         lambda x, i: torch.where(x < 0, 6, 5)),
        ("{.reg .s64 w; cvt.s64.s32 w, $1; add.s64 w, w, 1; cvt.s32.s64 $0, w;}", lambda x, i: x + 1),
        ("lop3.b32 $0, $1, $2, 7, 0x96;", lambda x, i: x ^ i ^ 7),
        ("lop3.b32 $0, $1, $2, 12, 0xE2;", lambda x, i: (x & i) | (12 & ~i)),
        ("prmt.b32 $0, $1, $2, 0x4321;", lambda x, i: ((x.long() & 0xFFFFFFFF) >> 8 | i << 24).int()),
        ("prmt.b32 $0, $1, 0, 0x8880;", lambda x, i: (x & 255) - 256 * (x < 0) & -1),
        ("{.reg .pred p, q; setp.lt.s32 p|q, $1, 0; selp.b32 $0, 1, 2, q;}", lambda x, i: torch.where(x < 0, 2, 1)),
        ("{.reg .pred p, q; setp.gt.s32 q, $1, 2; setp.lt.and.s32 p, $2, 6, q; selp.b32 $0, 1, 2, p;}",
         lambda x, i: torch.where((i < 6) & (x > 2), 1, 2)),
        ("{.reg .pred p, q; setp.gt.s32 q, $1, 2; setp.lt.or.s32 p|q, $2, 6, !q; selp.b32 $0, 1, 2, q;}",
         lambda x, i: torch.where((i >= 6) | (x <= 2), 1, 2)),
        ("{.reg .pred p, q; setp.gt.s32 q, $1, 2; setp.lt.xor.s32 p, $2, 6, q; selp.b32 $0, 1, 2, p;}",
         lambda x, i: torch.where((i < 6) ^ (x > 2), 1, 2)),
    ],
)  # fmt: skip
def test_instructions_without_memory(assembly, expected):
    x, out = torch.tensor([5, -3, 0, 9, -1, 2, -8, 7], dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    simulate(lambda _: computes[(1,)](x, out, assembly), 1)
    assert torch.equal(out, expected(x, torch.arange(8, dtype=torch.int32)).to(torch.int32))


@triton.jit
def computes_floats(x, y, out, ASM: tl.constexpr, PACK: tl.constexpr):
    at = tl.arange(0, 8)
    CONSTRAINTS: tl.constexpr = "=r,r,r" if PACK != 2 or x.dtype.element_ty != tl.float32 else "=r,=r,r,r,r,r"
    args = [tl.load(x + at), tl.load(y + at)]
    tl.store(out + at, tl.inline_asm_elementwise(ASM, CONSTRAINTS, args, out.dtype.element_ty, True, PACK))


def halves(kind, name):
    return f"{{.reg .b64 a, b, c; mov.b64 a, {{$2, $3}}; mov.b64 b, {{$4, $5}}; {name}.{kind} c, a, b; mov.b64 {{$0, $1}}, c;}}"


@pytest.mark.parametrize(
    ("assembly", "pack", "dtype", "to", "expected"),
    [
        ("ex2.approx.ftz.f32 $0, $1;", 1, "float32", "float32", lambda x, y: torch.exp2(x)),
        ("rsqrt.approx.f32 $0, $2;", 1, "float32", "float32", lambda x, y: torch.rsqrt(y)),
        ("tanh.approx.f32 $0, $1;", 1, "float32", "float32", lambda x, y: torch.tanh(x)),
        ("div.rn.f32 $0, $1, $2;", 1, "float32", "float32", lambda x, y: x / y),
        ("abs.f32 $0, $1;", 1, "float32", "float32", lambda x, y: x.abs()),
        (halves("f32x2", "mul"), 2, "float32", "float32", lambda x, y: x * y),
        ("add.bf16x2 $0, $1, $2;", 2, "bfloat16", "bfloat16", lambda x, y: x + y),
        ("max.f16x2 $0, $1, $2;", 2, "float16", "float16", torch.maximum),
        ("{.reg .b16 a, b; mov.b32 {a, b}, $1; mov.b32 $0, {b, a};}", 2, "float16", "float16",
         lambda x, y: x.view(4, 2).flip(1).reshape(8)),
        ("{.reg .v2 .b32 v; mov.v2.b32 v, 0; mov.b32 v.x, $1; add.bf16x2 v.y, v.x, v.y; mov.b32 $0, v.y;}", 2, "bfloat16",
         "bfloat16", lambda x, y: x),
        ("{.reg .b32 a, b; mov.b32 a, $1; mov.b32 b, $2; cvt.rn.bf16x2.f32 $0, b, a;}", 1, "float32", "int32",
         lambda x, y: torch.stack([x, y], 1).bfloat16().view(torch.int32).view(8)),
        ("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", 1, "float32", "int32",
         lambda x, y: torch.stack([x, y], 1).to(torch.float8_e4m3fn).view(torch.int16).view(8).int() & 0xFFFF),
    ],
)  # fmt: skip
def test_floats_and_packed_registers(assembly, pack, dtype, to, expected):
    x = torch.tensor([0.3, -1.7, 2.0, 9.1, -0.25, 1e-3, 3.0, -4.5]).to(getattr(torch, dtype))
    y = torch.tensor([1.5, 0.7, 3.0, 0.1, 2.25, 4.0, 1e2, 0.5]).to(getattr(torch, dtype))
    out = torch.zeros(8, dtype=getattr(torch, to))
    simulate(lambda _: computes_floats[(1,)](x, y, out, assembly, pack), 1)
    torch.testing.assert_close(out, expected(x, y).to(out.dtype), atol=0, rtol=2e-7 if dtype == to == "float32" else 0)


@pytest.mark.parametrize(
    ("assembly", "dtype", "expected"),
    [
        ("max.f32 $0, $1, $2;", "float32", torch.fmax),
        ("min.ftz.f32 $0, $1, $2;", "float32", torch.fmin),
        ("max.NaN.f32 $0, $1, $2;", "float32", torch.maximum),
        ("min.bf16x2 $0, $1, $2;", "bfloat16", torch.fmin),
        ("max.NaN.f16x2 $0, $1, $2;", "float16", torch.maximum),
        ("add.sat.f32 $0, $1, $2;", "float32", lambda x, y: (x + y).nan_to_num(0).clamp(0, 1)),
        ("add.sat.f16x2 $0, $1, $2;", "float16", lambda x, y: (x + y).nan_to_num(0).clamp(0, 1)),
        ("mul.sat.f32 $0, $1, $2;", "float32", lambda x, y: (x * y).nan_to_num(0).clamp(0, 1)),
        ("fma.rn.relu.bf16x2 $0, $1, $2, $2;", "bfloat16", lambda x, y: (x.double() * y + y).to(x.dtype).relu()),
        # What is left of a product is its rounding error: 0 if fma rounded the product.
        ("{.reg .f32 a; mul.f32 a, $1, $2; neg.f32 a, a; fma.rn.f32 $0, $1, $2, a;}", "float32",
         lambda x, y: (x.double() * y.double() - (x * y).double()).float()),
        ("cvt.rni.f32.f32 $0, $1;", "float32", lambda x, y: x.round()),
        ("cvt.rmi.f32.f32 $0, $1;", "float32", lambda x, y: x.floor()),
        ("cvt.rpi.f32.f32 $0, $1;", "float32", lambda x, y: x.ceil()),
        ("cvt.rzi.f32.f32 $0, $1;", "float32", lambda x, y: x.trunc()),
        ("cvt.sat.f32.f32 $0, $1;", "float32", lambda x, y: x.nan_to_num(0).clamp(0, 1)),
        ("{.reg .s32 a; cvt.rmi.s32.f32 a, $2; cvt.rn.f32.s32 $0, a;}", "float32", lambda x, y: y.floor().nan_to_num(0)),
        ("{.reg .s16 a; cvt.rni.sat.s8.f32 a, $1; cvt.rn.f32.s8 $0, a;}", "float32",
         lambda x, y: x.round().nan_to_num(0).clamp(-128, 127)),
        ("{.reg .b32 a; cvt.rzi.s32.f32 a, $1; cvt.sat.u8.s32 a, a; cvt.rn.f32.u8 $0, a;}", "float32",
         lambda x, y: x.trunc().nan_to_num(0).clamp(0, 255)),
        ("{.reg .b32 a; .reg .b16 b, c; cvt.rn.relu.f16x2.f32 a, $1, $2; mov.b32 {b, c}, a; cvt.f32.f16 $0, c;}", "float32",
         lambda x, y: x.half().relu().float()),
        ("{.reg .b32 a; .reg .b16 b, c; cvt.rn.satfinite.bf16x2.f32 a, $1, $2; mov.b32 {b, c}, a; cvt.f32.bf16 $0, c;}",
         "float32", lambda x, y: x.clamp(min=torch.finfo(torch.bfloat16).min).bfloat16().float()),
        ("{.reg .b16 a; .reg .b32 b; .reg .b16 c, d; cvt.rn.satfinite.relu.e4m3x2.f32 a, $1, $2;"
         "cvt.rn.f16x2.e4m3x2 b, a; mov.b32 {c, d}, b; cvt.f32.f16 $0, d;}", "float32",
         lambda x, y: x.relu().to(torch.float8_e4m3fn).float()),
    ],
)  # fmt: skip
def test_modifiers_of_floats(assembly, dtype, expected):
    """On NaN, infinities, and values that round, saturate or change sign."""
    nan, inf, kind = float("nan"), float("inf"), getattr(torch, dtype)
    x = torch.tensor([nan, 0.3, -1.7, 2.5, 3.5, -inf, 300.0, nan]).to(kind)
    y = torch.tensor([1.5, nan, 0.7, -0.7, 2.1, -1.0, 0.3, nan]).to(kind)
    out = torch.zeros(8, dtype=kind)
    simulate(lambda _: computes_floats[(1,)](x, y, out, assembly, 4 // x.itemsize), 1)
    torch.testing.assert_close(out, expected(x, y), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    "assembly",
    [
        "min.xorsign.abs.f32 $0, $1, $2;", "add.rz.f32 $0, $1, $2;", "mul.rz.f32 $0, $1, $2;", "div.rz.f32 $0, $1, $2;",
        "fma.rp.f32 $0, $1, $2, $2;", "add.sat.s32 $0, $1, $2;", "cvt.rm.f16.f32 $0, $1;", "cvt.rz.f32.s32 $0, $1;",
        "cvt.s32.f32 $0, $1;", "cvt.rs.bf16x2.f32 $0, $1, $2, $2;", "cvta.to.shared.u64 $0, $1;", "max.f32 $0, $1, $2, $2;",
    ],
)  # fmt: skip
def test_modifiers_that_are_not_known_are_refused(assembly):
    x = torch.ones(8)
    with pytest.raises(NotInterpretable, match=re.escape(f"PTX `{assembly[:-1]}` is not known")):
        simulate(lambda _: computes_floats[(1,)](x, x, x, assembly, 1), 1)


@pytest.mark.parametrize(
    ("assembly", "bits"),
    [
        ("mov.b32 $0, 0f3F800001;", 0x3F800001),
        ("and.b32 $0, 0f3F800001, -2;", 0x3F800000),
        ("{.reg .b64 w; mov.b64 w, 0d3FF0000080000000; mov.b64 {_, $0}, w;}", 0x3FF00000),
        ("{.reg .b64 w; mov.b64 w, 1.5; mov.b64 {_, $0}, w;}", 0x3FF80000),
        ("mov.f32 $0, 0d3FF8000000000000;", 0x3FC00000),
        ("mov.f32 $0, .5;", 0x3F000000),
        ("mov.f32 $0, 15E-1;", 0x3FC00000),
        ("mov.u32 $0, 017;", 15),
        ("mov.s32 $0, 0b101;", 5),
        ("mov.b32 $0, 0x7fU;", 127),
        ("@!p0 mov.b32 $0, 0;", None),
    ],
)  # fmt: skip
def test_constants_have_the_bits_that_ptxas_gives_them(assembly, bits):
    x, out = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    if bits is None:
        with pytest.raises(NotInterpretable, match="reads p0, which is not known or was not written"):
            simulate(lambda _: computes[(1,)](x, out, assembly), 1)
    else:
        simulate(lambda _: computes[(1,)](x, out, assembly), 1)
        assert out.tolist() == [bits] * 8


@pytest.mark.parametrize(
    ("assembly", "why"),
    [
        ("mov.u32 $0, 0f3F800000", "a float constant of 32 bits in an instruction of type u32"),
        ("mov.b32 $0, 1.0", "a float constant of 64 bits in an instruction of type b32"),
        ("add.f32 $0, $1, 1", "an integer constant in an instruction of type f32; write a float"),
        ("mov.b32 $0", "it has 1 operand and needs 2"),
        ("mov.b32 $0, $1, $2", "it has 3 operands and needs 2"),
        ("neg.s32 $0, $1, $2", "it has 3 operands and needs 2"),
        ("mul.lo.s32 $0, $1, $2, $2", "it has 4 operands and needs 3"),
        ("mov $0, $1", "is not known"),
        ("mov", "it has 0 operands and needs 2"),
        ("setp.lt.s32 p, $1, 0, p", "is not known"),
        ("setp.lt.and.s32 p, $1, 0", "is not known"),
        ("add.s32 $0, $1, !$2", "only setp takes a negated predicate"),
        ("mov.b32 p|q, $1", "is not known"),
        ("prmt.b32.f4e $0, $1, $2, 0", "is not known"),
        ("lop3.b32 $0, $1, $2, $2", "it has 4 operands and needs 5"),
        ("shfl.sync.idx.b32 $0, $1, 0, 31", "it has 4 operands and needs 5"),
        ("shfl.sync.idx.f32 $0, $1, 0, 31, -1", "is not known"),
        ("shfl.sync.idx.b32 $0, $1, 0, 31, 1", "is executed by other threads than its mask names"),
        ("mov.b32 {a, b, c}, $1", "is not known"),
        ("cvt.f32 $0, $1", "is not known"),
        ("bra", "is not known"),
        ("ld.global.b32 $0", "it has 1 operand and needs 2"),
        ("ld.global.b32 $0, $1", "is not known"),
        ("st.global.b32", "it has 0 operands and needs 2"),
        ("st.global.v2.b32 [$1], {$2}", "is not known"),
        ("atom.global.cas.b32 $0, [$1], $2", "it has 3 operands and needs 4"),
        ("red.global.add.u32 [$1]", "it has 1 operand and needs 2"),
        ("multimem [$1], $2", "multimem. is not modelled"),
        ("mov.b32 $0,, $1", "has an operand that cannot be read: an empty one"),
        ("mov.b32 $0 $1", "has an operand that cannot be read: $0 $1"),
        ("mov.b32 $0, 09", "has an operand that cannot be read: 09"),
        ("ld.global.b32 $0, [$1+]", "has an address that cannot be read: [$1+]"),
    ],
)
def test_a_statement_that_ptxas_refuses_is_refused_in_one_line(assembly, why):
    x = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(NotInterpretable) as refused:
        simulate(lambda _: computes[(1,)](x, x, assembly), 1)
    assert f"PTX `{assembly}` " in str(refused.value) and why in str(refused.value), refused.value


NAN = float("nan")
PREDICATE = "{{.reg .pred p; setp.{}.{} p, $1, $2; selp.b32 $0, 1, 0, p;}}"
# Comparisons of floats: the results of 1 < 2, 2 = 2, 3 > 2 and of NaN on the left, on the right and on both sides.
OF_FLOATS = {
    "eq": "010 000", "ne": "101 000", "lt": "100 000", "le": "110 000", "gt": "001 000", "ge": "011 000",
    "equ": "010 111", "neu": "101 111", "ltu": "100 111", "leu": "110 111", "gtu": "001 111", "geu": "011 111",
    "num": "111 000", "nan": "000 111",
}  # fmt: skip


def test_comparisons_of_floats_with_nan():
    """As in PTX's tables of setp; ``ne`` is false for NaN, and only ``neu`` true."""
    x, y = torch.tensor([1, 2, 3, NAN, 2, NAN, 0, 0]), torch.tensor([2, 2, 2, 2, NAN, NAN, 0, 0])
    for name, expected in OF_FLOATS.items():
        for kind in ("f32", "ftz.f32"):
            out, assembly = torch.zeros(8, dtype=torch.int32), PREDICATE.format(name, kind)
            simulate(lambda _, out=out, assembly=assembly: computes_floats[(1,)](x, y, out, assembly, 1), 1)
            assert "".join(map(str, out[:6].tolist())) == expected.replace(" ", ""), assembly


@pytest.mark.parametrize(
    "kind", ["lo.s32", "lt.b32", "neu.s32", "nan.u32", "lo.f32", "lt.and.u32", "eq.pred", "eq.f16x2"]
)
def test_a_comparison_that_its_type_does_not_have_is_refused(kind):
    x = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(NotInterpretable, match=rf"PTX `setp.{kind} p, \$1, \$2` is not known"):
        simulate(lambda _: computes[(1,)](x, x, PREDICATE.format(*kind.split(".", 1))), 1)


@triton.jit
def accesses(x, out, ASM: tl.constexpr):
    at = tl.arange(0, 8)
    pointers = [x + 2 * at, out + 2 * at]
    tl.inline_asm_elementwise(ASM, "=r,l,l", pointers, dtype=tl.int32, is_pure=False, pack=1)


@pytest.mark.parametrize(
    ("load", "store"),
    [
        ("ld.global.b32 a, [$1]", "st.global.b32 [$2], a"),
        ("ld.relaxed.sys.global.L1::no_allocate.b32 a, [$1]", "st.global.relaxed.cta.b32 [$2], a"),
        ("ld.weak.global.nc.L1::evict_last.L2::128B.b32 a, [$1]", "st.weak.global.wt.b32 [$2], a"),
        ("ld.volatile.b32 a, [$1]", "st.mmio.relaxed.sys.global.b32 [$2], a"),
        ("ld.acquire.cluster.b32 a, [$1]", "st.release.gpu.b32 [$2], a"),
        ("ld.global.L2::cache_hint.b32 a, [$1], w", "st.global.L2::cache_hint.b32 [$2], a, w"),
        ("ld.global.cv.b32 a, [$1]", "atom.global.exch.L2::cache_hint.b32 _, [$2], a, w"),
        ("ld.global.v2.b32 {a, _}, [$1]", "st.global.v2.b32 [$2], {a, 0}"),
        ("ldu.global.b32 a, [$1]", "red.relaxed.gpu.global.max.u32 [$2], a"),
        ("ld.global.b32 a, [$1]", "atom.acq_rel.sys.global.cas.b32 _, [$2], 0, a"),
    ],
)
def test_modifiers_of_accesses(load, store):
    x, out = torch.arange(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    assembly = f"{{.reg .b32 a; .reg .b64 w; mov.b64 w, 0; {load}; {store};}}"
    simulate(lambda _: accesses[(1,)](x, out, assembly), 1)
    assert torch.equal(out, torch.where(x % 2 == 0, x, 0))


@pytest.mark.parametrize("op", ["red.relaxed.gpu.global.max.noftz.{} [$2], a", "atom.global.add.noftz.{} a, [$2], a"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_atomics_of_two_values_in_a_register(op, dtype):
    x, out = (torch.arange(first, first + 32).to(dtype) for first in (-16, -4))
    to = torch.where(torch.arange(32) % 4 < 2, x, -torch.inf)  # each address is 8 bytes, of which 4 are used
    threads, kind = 128 // 8, "f16x2" if dtype is torch.float16 else "bf16x2"
    expected = torch.maximum(out, to) if op.startswith("red") else out.where(to < x, out + threads * x)
    assembly = f"{{.reg .b32 a; ld.global.b32 a, [$1]; {op.format(kind)};}}"
    simulate(lambda _: accesses[(1,)](x.view(torch.int32), out.view(torch.int32), assembly), 1)
    assert torch.equal(out, expected), (out, expected)


@pytest.mark.parametrize(
    ("assembly", "why"),
    [
        ("ld.shared.b32 $0, [$1]", "ld with .shared is not modelled"),
        ("ld.global.wt.foo.b32 $0, [$1]", "ld with .wt, .foo is not modelled"),
        ("ld.release.gpu.b32 $0, [$1]", "ld with .release is not modelled"),
        ("ld.global.b128 $0, [$1]", "its last modifier, .b128, is no type that is modelled"),
        ("ld.global.add $0, [$1]", "its last modifier, .add, is no type that is modelled"),
        ("ld $0, [$1]", "it has no type"),
        ("ld.weak.relaxed.sys.b32 $0, [$1]", ".weak and .relaxed exclude each other"),
        ("ld.relaxed.sys.gpu.b32 $0, [$1]", ".sys and .gpu exclude each other"),
        ("st.global.cv.b32 [$2], 1", "st with .cv is not modelled"),
        ("st.async.b32 [$2], 1", "st with .async is not modelled"),
        ("atom.global.inc.u32 $0, [$2], 1", "atom with .inc is not modelled"),
        ("atom.global.add.v2.f32 {a, b}, [$2], {a, b}", "atom with .v2 is not modelled"),
        ("red.acq_rel.gpu.global.add.u32 [$2], 1", "red with .acq_rel is not modelled"),
        ("red.global.exch.b32 [$2], 1", "red with .exch is not modelled"),
        ("multimem.ld_reduce.global.add.noftz.f16 $0, [$2]", "multimem.ld_reduce with .noftz is not modelled"),
        ("ld.global.f16x2 $0, [$2]", "its last modifier, .f16x2, is no type that is modelled"),
        ("red.global.or.f16x2 [$2], 1", "is not known"),
        ("multimem.cp.global.b32 [$2], 1", "multimem.cp is not modelled"),
        ("fence.sc.sys.foo", "is not known"),
        ("fence.proxy.foo", "is not known"),
        ("fence.proxy.tensormap::generic.release", "is not known"),
        ("membar.proxy.async", "is not known"),
        ("bar.sync", "it needs a barrier's number"),
        ("bar.sync.aligned 0", "is not known"),
        ("bar.sync 0, 128, 1", "it needs a barrier's number"),
        ("bar.warp.sync", "it needs the mask of a warp's threads"),
        ("barrier.warp.sync 0xffffffff", "is not known"),
        ("barrier.cta.arrive 0", "is not known"),
        ("griddepcontrol.launch", "is not known"),
        ("cp.async.bulk.wait_group", "is not known"),
        ("cp.async.bulk.wait_group $1", "is not known"),
        ("cp.async.bulk.commit_group 0", "is not known"),
    ],
)
def test_modifiers_of_accesses_that_are_not_known_are_refused(assembly, why):
    x = torch.zeros(16, dtype=torch.int32)
    with pytest.raises(NotInterpretable) as refused:
        simulate(lambda _: accesses[(1,)](x, x, assembly), 1)
    assert f"PTX `{assembly}` is not known" in str(refused.value) and why in str(refused.value), refused.value


@pytest.mark.parametrize(
    "order",
    [
        "bar.sync 1, 128", "bar.cta.sync 0", "barrier.sync.aligned 0", "barrier.cta.sync.aligned 0, 128", "fence.proxy.alias",
        "fence.proxy.tensormap::generic.acquire.gpu [$2], 128", "membar.proxy.alias",
        "setp.lt.u32 p, t, 32; @p bar.warp.sync 0xffffffff",
        "createpolicy.fractional.L2::evict_last.b64 w, 1.0; st.global.L2::cache_hint.b32 [$2], a, w",
    ],
)  # fmt: skip
def test_orders_of_all_threads_and_what_has_no_effect(order):
    x, out = torch.arange(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    registers = ".reg .b32 a, t; .reg .pred p; .reg .b64 w; mov.u32 t, %tid.x;"
    assembly = f"{{{registers} ld.global.b32 a, [$1]; {order}; st.global.b32 [$2], a;}}"
    simulate(lambda _: accesses[(1,)](x, out, assembly), 1)
    assert torch.equal(out, torch.where(x % 2 == 0, x, 0))


def test_a_barrier_of_some_threads_is_refused():
    x = torch.zeros(16, dtype=torch.int32)
    with pytest.raises(
        NotInterpretable, match="`bar.sync 1, 32` is a barrier of 32 of the program's 128 threads; only"
    ):
        simulate(lambda _: accesses[(1,)](x, x, "bar.sync 1, 32;"), 1)


@triton.jit
def thread():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def threads():
    return tl.inline_asm_elementwise("mov.u32 $0, %ntid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def exchanges(out, ASM: tl.constexpr):
    at = tl.arange(0, 64)
    tl.store(out + at, tl.inline_asm_elementwise(ASM, "=r,r", [at], tl.int32, False, 1))


@pytest.mark.parametrize(
    ("assembly", "expected"),
    [
        ("shfl.sync.bfly.b32 $0, $1, 5, 31, 0xffffffff;", lambda i: i ^ 5),
        ("shfl.sync.idx.b32 $0, $1, 3, 31, 0xffffffff;", lambda i: i // 32 * 32 + 3),
        ("shfl.sync.idx.b32 $0, $1, 1, 0x181f, 0xffffffff;", lambda i: i // 8 * 8 + 1),
        ("shfl.sync.up.b32 $0, $1, 2, 0, 0xffffffff;", lambda i: torch.where(i % 32 < 2, i, i - 2)),
        ("{.reg .pred p; shfl.sync.down.b32 $0|p, $1, 4, 31, 0xffffffff; @!p mov.b32 $0, -1;}",
         lambda i: torch.where(i % 32 < 28, i + 4, -1)),
        ("{.reg .pred p; elect.sync $0|p, 0xffffffff; @p mov.b32 $0, 7;}", lambda i: torch.where(i % 32 == 0, 7, 0)),
        ("{.reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.ge.u32 p, t, 16; mov.b32 $0, 1; "
         "@p elect.sync $0|_, 0xffff0000;}", lambda i: torch.where(i % 32 < 16, 1, 16)),
    ],
)  # fmt: skip
def test_threads_of_a_warp_exchange_values(assembly, expected):
    out = torch.zeros(64, dtype=torch.int32)
    simulate(lambda _: exchanges[(1,)](out, assembly, num_warps=2), 1)
    assert out.tolist() == expected(torch.arange(64)).tolist()


def test_a_value_of_a_thread_that_is_not_there_is_refused():
    assembly = "{.reg .pred p; setp.lt.s32 p, $1, 4; @p shfl.sync.down.b32 $0, $1, 2, 31, 15;}"
    with pytest.raises(NotInterpretable, match="takes the value of a thread that does not execute it"):
        simulate(lambda _: exchanges[(1,)](torch.zeros(64, dtype=torch.int32), assembly, num_warps=2), 1)


@triton.jit
def copies_by_thread(x, out):
    """out[64] = x[64], by 32 threads of 8 bytes each."""
    at = thread() * 2
    tl.inline_asm_elementwise(
        "{ .reg .b32 a; .reg .b32 b; ld.global.v2.b32 {a, b}, [$1]; st.global.v2.b32 [$2], {a, b}; }",
        "=r,l,l", [x + at, out + at], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + 64, threads().to(tl.int32))


def test_threads_have_addresses_of_their_own():
    x, out = torch.arange(64, dtype=torch.int32), torch.zeros(65, dtype=torch.int32)
    simulate(lambda _: copies_by_thread[(1,)](x, out, num_warps=1), 1)
    assert torch.equal(out[:64], x) and out[64] == 32


@core.extern
def register(name: tl.constexpr, _semantic=None):
    symbol = {(): (f"llvm.nvvm.read.ptx.sreg.{name.value}", core.dtype("int32"))}
    return core.extern_elementwise("", "", [], symbol, is_pure=True, _semantic=_semantic)


@triton.jit
def reads_registers(out):
    if register("tid.x") == 3:
        tl.inline_asm_elementwise("red.global.add.s32 [$1], 5;", "=r,l", [out], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + 1 + register("ctaid.x"), register("ntid.x") + register("tid.y"))


def test_llvm_s_functions_read_special_registers():
    out = torch.zeros(3, dtype=torch.int32)
    simulate(lambda _: reads_registers[(2,)](out, num_warps=2), 1)
    assert out.tolist() == [10, 64, 64]


@triton.jit
def counts(out, LIMIT: tl.constexpr):
    if thread() < LIMIT:
        tl.inline_asm_elementwise("red.global.add.u32 [$1], 1;", "=r,l", [out], dtype=tl.int32, is_pure=False, pack=1)
        if thread() == 0:
            tl.store(out + 1, 1)
    if thread() == 5:
        tl.store(out + 2, 1)  # a scalar is stored by thread 0, which is not here


def test_a_branch_runs_for_the_threads_that_take_it():
    for limit, expected in ((3, [3, 1, 0]), (64, [64, 1, 0]), (0, [0, 0, 0])):
        out = torch.zeros(3, dtype=torch.int32)
        simulate(lambda _, out=out, limit=limit: counts[(1,)](out, limit, num_warps=2), 1)
        assert out.tolist() == expected


@triton.jit
def meets(pads, WORLD: tl.constexpr, rank, data, SEM: tl.constexpr):
    """data[1] = data[0] of the next rank, after a barrier of one thread per rank."""
    peers = tl.arange(0, WORLD)
    signals = tl.load(pads + peers).to(tl.pointer_type(tl.int32))
    if thread() < WORLD:
        tl.inline_asm_elementwise(
            "again: atom.global.release.sys.cas.b32 $0, [$1], 0, 1; setp.eq.u32 %p0, $0, 0; @!%p0 bra again;",
            "=r,l", [signals + rank], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        own = tl.load(pads + rank).to(tl.pointer_type(tl.int32))
        tl.inline_asm_elementwise(
            f"again: atom.global.{SEM}.sys.cas.b32 $0, [$1], 1, 0; setp.eq.u32 %p0, $0, 1; @!%p0 bra again;",
            "=r,l", [own + peers], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.debug_barrier()
    tl.store(data + 1, tl.load(tl.load(pads + (rank + 1) % WORLD).to(tl.pointer_type(tl.int32)) + WORLD))


def meeting(team, sem="acquire", absent=False):
    pad = team.zeros((team.size + 2,), torch.int32)
    team.barrier()
    pads = torch.tensor(team.exchange(pad.data_ptr()))
    pad[team.size] = 10 + team.rank
    if not (absent and team.rank == 1):
        for _ in range(2):
            meets[(1,)](pads, team.size, team.rank, pad[team.size :], sem)
    team.barrier()
    return int(pad[team.size + 1])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_loop_of_cas_is_a_wait(size):
    for seed in range(3):
        assert simulate(meeting, size, seed=seed) == [10 + (rank + 1) % size for rank in range(size)]


def test_a_loop_that_waits_for_ever_is_a_deadlock():
    with pytest.raises(Deadlock, match=r"spins in test_ptx.py:\d+: atomic cas"):
        simulate(meeting, 2, args=("acquire", True))


def test_orders_of_inline_atomics_are_checked():
    untranslated = {"untranslated"}  # the table of addresses is not a team's view

    def kinds(sem):
        return {
            found.finding.kind for found in weft.check(meeting, 2, schedules=4, args=(sem,)).findings
        } - untranslated

    assert kinds("acquire") == set()
    assert kinds("relaxed") == {"relaxed-order"}


@triton.jit
def differs(out, CASE: tl.constexpr):
    if CASE == 0:
        if thread() < 3:
            tl.store(out, 1)
        else:
            tl.store(out, 2)
    elif CASE == 1:
        for i in range(thread()):
            tl.store(out, i)
    elif CASE == 2:
        if thread() < 3:
            tl.inline_asm_elementwise("bar.sync 0;", "=r", [thread()], dtype=tl.int32, is_pure=False, pack=1)
    elif CASE == 5:
        if thread() < 3:
            tl.inline_asm_elementwise("bar.sync 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    elif CASE == 6:
        if thread() < 3:
            tl.debug_barrier()
    elif CASE == 3:
        tl.inline_asm_elementwise("mbarrier.inval.b64 [$0];", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.inline_asm_elementwise("ld.shared.u32 $0, [$1];", "=r,l", [out], dtype=tl.int32, is_pure=False, pack=1)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (0, "differs between the threads of a program (%tid) is a condition with an else"),
        (1, "differs between the threads"),
        (2, "`bar.sync 0` is reached by some threads of the program only"),
        (5, "`bar.sync 0` is reached by some threads of the program only"),
        (6, "is reached by 3 of the program's 128 threads; move it out of the branch"),
        (3, "PTX `mbarrier.inval.b64 [$0]` is not known"),
        (4, "PTX `ld.shared.u32 $0, [$1]` is not known"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(case, message):
    with pytest.raises(NotInterpretable, match=re.escape(message)):
        simulate(lambda _: differs[(1,)](torch.zeros(1, dtype=torch.int32), case), 1)
