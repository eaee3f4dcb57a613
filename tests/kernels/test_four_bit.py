"""Weights in 4 bits: the numbers of both formats, how weights become so, bytes."""

import pytest
import torch
import triton
import triton.language as tl

import weft
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import mutated
from weft.kernels import four_bit, four_bit_tile
from weft.kernels.four_bit import (
    BLOCK,
    FourBit,
    int4,
    mxfp4,
    narrow,
    packed,
    packed_e2m1,
    pairs,
    place_bits,
    small,
    unpacked,
    unpacked_e2m1,
)  # fmt: skip
from weft.kernels.four_bit_tile import dequantized
from weft.language.lowering import ptx
from weft.ops.case import BF16, FP16, FP32

inf, nan = torch.inf, torch.nan


def e2m1(bits):
    """A number of the specification: sign, two bits of exponent with bias 1, one of mantissa; no infinity."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


def e8m0(byte):
    return nan if byte == 255 else 2.0 ** (byte - 127)


def in_mxfp4(values):
    """(scale's byte, numbers of 4 bits) of 32 values, by the specification: 6.3 of version 1.0, ties to even."""
    largest = max(abs(value) for value in values)
    exponent = -127
    if largest > 0:
        while 2.0 ** (exponent + 1) <= largest:
            exponent += 1
        exponent = max(exponent - 2, -127)  # e2m1's largest power of two is 4
    numbers = []
    for value in values:
        scaled = abs(value) / 2.0**exponent
        best = min(range(8), key=lambda bits: (abs(e2m1(bits) - scaled), bits % 2))
        numbers.append(best | (8 if torch.tensor(value).signbit() else 0))
    return exponent + 127, numbers


def test_mxfp4_is_the_specification_s():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((12, 64), generator=generator).double() * 2.0 ** torch.randint(
        -60, 60, (12, 1), generator=generator
    )
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 7.9, -0.25, -0.0, 4.0]).double()
    rows[0], rows[1, :13], rows[2, 32:], rows[3] = 0.0, halves, halves.repeat(3)[:32] * 2.0**-120, rows[3] * 2.0**-100
    rows[1, 13:] = 0.1
    weight = mxfp4(rows.float())
    numbers = unpacked_e2m1(weight.data, 64)
    for row, scales, written in zip(rows.float().tolist(), weight.scales.view(torch.uint8), numbers, strict=True):
        expected = [in_mxfp4(row[start : start + 32]) for start in (0, 32)]
        assert scales.tolist() == [scale for scale, _ in expected]
        assert written.tolist() == [*expected[0][1], *expected[1][1]]


@triton.jit
def e2m1_kernel(words, scales, out, WHOLE: tl.constexpr):
    at = tl.arange(0, 256)
    of_words, of_all = tl.load(words + at), tl.load(scales + at)
    for place in tl.static_range(4):
        tl.store(out + place * 256 + at, ptx.scaled_e2m1(of_words, of_all, place, WHOLE))


def test_assembly_makes_every_number_times_every_scale():
    """NVIDIA's form for bf16, whose instructions the simulator executes."""
    words = torch.arange(256)
    words = (words | words.flip(0) << 8).to(torch.int16)

    def number(word, place):
        return sum((int(word) >> at & 1) << bit for bit, at in enumerate(place_bits(place)))

    def main(team):
        powers = (0, 1, 2, 30, 126, 127, 128, 252, 253, 254, 255)
        for power, whole in (
            (power, whole) for power in powers for whole in (False, True) if power <= 128 or not whole
        ):
            factor = e8m0(power) * 2.0 ** (126 if whole else 0)
            results = torch.empty(4, 256, dtype=BF16)
            e2m1_kernel[(1,)](words, torch.full((256,), factor, dtype=BF16), results, whole)
            for place, result in enumerate(results):
                values = [e2m1(number(word, place)) * e8m0(power) for word in words]
                if power < 255:
                    wanted = torch.tensor(values, dtype=torch.float64).to(BF16)
                    assert_identical(result, wanted, what=f"place {place}, 2**({power} - 127)")
                else:
                    assert result.isnan().all()

    weft.simulate(main, 1)


def test_mxfp4_keeps_no_infinity_and_names_the_group():
    rows = torch.ones(3, 96)
    rows[0, 40], rows[1, 0], rows[2, 95] = inf, nan, -inf
    scales = mxfp4(rows).scales
    assert (scales == 255).nonzero().tolist() == [[0, 1], [1, 0], [2, 2]]
    assert mxfp4(rows).dequantized(FP32).isnan().sum(1).tolist() == [32, 32, 32]


def test_every_number_and_scale_is_read():
    """All 16 numbers under all 256 scales, by torch and by the kernel; small ones also by one multiplication."""
    numbers = torch.arange(16).repeat(256, 2)
    weight = FourBit(packed_e2m1(numbers), torch.arange(256, dtype=torch.uint8)[:, None], 32)
    few = FourBit(weight.data[:129], small(weight.scales[:129]), 32)
    assert few.scales.dtype == torch.int8 and small(weight.scales[:130]).dtype == torch.uint8
    # Products of fp64 are exact, and rounded once.
    expected = (
        torch.tensor([[e2m1(bits) for bits in range(16)] * 2]).double()
        * torch.tensor([e8m0(b) for b in range(256)])[:, None]
    )
    assert_identical(weight.dequantized(FP32)[:-1], expected.float()[:-1])
    assert weight.dequantized(FP32)[-1].isnan().all()

    def main(team):
        for dtype in (BF16, FP16):
            read = dequantized(weight, dtype, team.caps)
            assert_identical(read[:-1], weight.dequantized(dtype)[:-1], what=str(dtype))
            assert read[-1].isnan().all()
            assert_identical(dequantized(few, dtype, team.caps), read[:129], what=f"small, {dtype}")

    weft.simulate(main, 1)


def test_scales_of_int4_are_narrowed_where_nothing_is_lost():
    scales = torch.tensor([[1.0, 0.00439453125, -3.0]])
    assert narrow(scales).dtype == BF16 and torch.equal(narrow(scales).float(), scales)
    for more in (1 + 2.0**-9, 1e-45):
        assert torch.equal(narrow(scales * more), scales * more)
        assert narrow(scales * more).dtype == FP32


def test_every_int4_number_and_zero_is_read_alike_in_both_widths_of_scales():
    numbers, generator = torch.arange(16).repeat(16, 8), torch.Generator().manual_seed(3)
    scales = torch.randn((16, 4), generator=generator).bfloat16()
    zeros = torch.arange(16, dtype=torch.uint8)[:, None].expand(16, 4).contiguous()

    def main(team):
        for of_zeros in (zeros, None):
            weight = FourBit(packed(numbers), scales, 128, of_zeros)
            read = dequantized(weight, BF16, team.caps)
            assert_identical(read, weight.dequantized(BF16))
            assert_identical(read, dequantized(weight._replace(scales=scales.float()), BF16, team.caps))

    weft.simulate(main, 1)


def weights_in_pairs():
    """Weights whose numbers NVIDIA's kernels make two at a time, of ragged sizes."""
    weight = torch.randn((70, 300), generator=torch.Generator().manual_seed(5)) * 0.02
    return {
        "small": mxfp4(weight), "large": mxfp4(2000 * weight), "int4": int4(weight), "zeros": int4(weight, 32, False),
        "rows": int4(weight, None, False),
    }  # fmt: skip


def odd_in_pairs(tmp_path, old="", new=""):
    """Names of the weights that a kernel of pairs, with ``new`` for ``old``, reads otherwise than torch does."""
    file = "pairs" if not old else f"pairs_{len(old)}_{len(new)}"
    paired = mutated(four_bit_tile, "stock.multiplies_bf16_in_pairs()", "True", file, tmp_path)
    kernels = mutated(paired, old, new, f"{file}_mutant", tmp_path) if old else paired

    def main(team):
        made = weights_in_pairs()
        reads = {name: kernels.dequantized(weight, BF16, team.caps) for name, weight in made.items()}
        return [name for name, weight in made.items() if not torch.equal(reads[name], weight.dequantized(BF16))]

    return weft.simulate(main, 1)[0]


def test_numbers_in_pairs_are_torch_s(tmp_path):
    made = weights_in_pairs()
    assert [made[name].scales.dtype for name in ("small", "large", "int4")] == [torch.int8, torch.uint8, BF16]
    assert odd_in_pairs(tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "odd"),
    [
        ("(126 << 7)", "(125 << 7)", ["small"]),
        ("PLACE, is_small)", "PLACE, not is_small)", ["small", "large"]),
        ("(-128.0 - zero)", "(-127.0 - zero)", ["int4", "zeros", "rows"]),
        ("zero = tl.full((1, 1), MIDDLE, tl.float32)", "zero = tl.full((1, 1), 7, tl.float32)", ["int4"]),
    ],
)
def test_mistakes_in_pairs_show(tmp_path, old, new, odd):
    assert odd_in_pairs(tmp_path, old, new) == odd


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [128, 32, None])
def test_int4_is_the_nearest_number(group, symmetric):
    weight = torch.randn((9, 300), generator=torch.Generator().manual_seed(1)) + 0.3
    weight[4, :128] = 0.0
    made = int4(weight, group, symmetric)
    columns = group or 300
    for row in range(9):
        for number, start in enumerate(range(0, 300, columns)):
            values = weight[row, start : start + columns].tolist()
            low, high = min(0.0, *values), max(0.0, *values)
            step = torch.tensor(max(high, -low) / 7.5 if symmetric else (high - low) / 15).bfloat16().item() or 1.0
            zero = 8 if symmetric else min(15, max(0, round(-low / step)))
            assert made.scales[row, number] == step
            assert symmetric or made.zeros[row, number] == zero
            numbers = [min(15, max(0, round(value / step) + zero)) for value in values]
            assert unpacked(made.data, 300)[row, start : start + columns].tolist() == numbers
            read = made.dequantized(torch.float64)[row, start : start + columns]
            assert_identical(read, (torch.tensor(numbers).double() - zero) * step)


def test_words_hold_columns_of_four_quarters():
    numbers = torch.randint(0, 16, (3, 200), generator=torch.Generator().manual_seed(2))
    data = packed(numbers)
    assert data.shape == (3, 128)
    assert torch.equal(unpacked(data, 200), numbers.to(torch.uint8))
    quarter = BLOCK // 4
    for byte, columns in ((10, (5, 5 + quarter)), (11, (5 + 2 * quarter, 5 + 3 * quarter)), (72, (132, 132 + quarter))):
        low, high = (int(numbers[1, column]) if column < 200 else 0 for column in columns)
        assert data[1, byte] == low + 16 * high, byte


def test_three_of_a_word_s_e2m1_numbers_are_a_shift_from_bf16_s_bits():
    numbers = torch.randint(0, 16, (3, 200), generator=torch.Generator().manual_seed(2))
    data = packed_e2m1(numbers)
    assert torch.equal(unpacked_e2m1(data, 200), numbers.to(torch.uint8))
    assert sorted(bit for place in range(4) for bit in place_bits(place)) == list(range(16))
    words = data.view(torch.int16)[1].int() & 0xFFFF
    for place in range(3):
        bits = (words[:32] << 3 * place & 0x81C0).to(torch.int16).view(BF16).double() * 2.0**126
        expected = [e2m1(int(number)) for number in numbers[1, 32 * place : 32 * place + 32]]
        assert bits.tolist() == expected, place


FORMS = {
    "mxfp4": mxfp4,
    "a rank's part of its groups": lambda weight: cut(mxfp4(weight), 8),
    "int4": int4,
    "int4 with zeros": lambda weight: int4(weight, 128, False),
    "int4 of rows": lambda weight: int4(weight, None, False),
    "int4 of 16 columns": lambda weight: int4(weight, 16, False),
}


def cut(weight, columns):
    """The same weight with scales of fewer columns, which repeat."""
    scales = weight.scales.repeat_interleave(weight.group // columns, -1)[..., : -(-weight.columns // columns)]
    return weight._replace(scales=scales.contiguous())


@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_reads_weights_as_torch_does(form):
    """Ragged rows and columns, and experts."""

    def main(team):
        for shape in ((5, 200), (3, 70, 136), (2, 24), (66, 384)):
            weight = FORMS[form](torch.randn(shape, generator=torch.Generator().manual_seed(3)))
            for dtype in (BF16, FP16):
                assert_identical(
                    dequantized(weight, dtype, team.caps), weight.dequantized(dtype), what=f"{shape} {dtype}"
                )

    weft.simulate(main, 1)


@pytest.mark.slow
def test_the_formats_are_those_of_compressed_tensors():
    """Where that package is: its numbers, scales and packing."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

    weight = torch.randn((8, 128), generator=torch.Generator().manual_seed(4)).bfloat16()
    made = mxfp4(weight)
    numbers = weight.float().view(8, 4, 32) / made_scales(made)
    assert_identical(made.dequantized(FP32), (cast_to_fp4(numbers) * made_scales(made)).flatten(1))
    values = unpacked(int4(weight).data, 128)
    words = pack_to_int32((values.to(torch.int8) - 8), 4)
    assert_identical(pairs(words.view(torch.uint8)), values)


def made_scales(weight):
    return four_bit.scales_of_e8m0(weight.scales.view(torch.uint8), FP32)[..., None]
