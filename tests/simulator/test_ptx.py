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
from weft.simulator.ptx.parsing import Memory, Register, Vector, parse


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
    assert atom.modifiers == ("global", "sys", "acquire", "cas", "b32") and atom.operands[1] == Memory(
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


@triton.jit
def thread():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def threads():
    return tl.inline_asm_elementwise("mov.u32 $0, %ntid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1)


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
        (3, "PTX `mbarrier.inval.b64 [$0]` is not known"),
        (4, "PTX `ld.shared.u32 $0, [$1]` is not known"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(case, message):
    with pytest.raises(NotInterpretable, match=re.escape(message)):
        simulate(lambda _: differs[(1,)](torch.zeros(1, dtype=torch.int32), case), 1)
