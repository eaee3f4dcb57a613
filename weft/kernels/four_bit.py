"""Weights in 4 bits a number, for rows of 16 bits: ``FourBit``, and how weights of 16 bits become so.

    MXFP4  e2m1 numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign, and an e8m0 scale for 32 columns of a row, as OCP's Microscaling
           Formats 1.0 has them
    int4   0 .. 15 less a zero point, and a scale for a group of columns of a row, or for the whole row

    weight = number * scale in fp32, rounded once to the dtype of the rows

So a weight is the same in every design of a GEMM. The quarters of a block of 128 columns share 16-bit words: a tile of words is
four tiles of the weight side by side, of 32 columns, which share a scale of MXFP4. A thread makes its numbers of the words that
it holds, two words at a time, and kernels interleave nothing. The bits of MXFP4's words lie where one shift brings three of a
word's four numbers to bf16's places (``place_bits``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.kernels.fp8 import spread

# Columns whose quarters share words, and a word's numbers.
BLOCK = 128
OF_WORD = 4
# Bytes of MXFP4's scales that a kernel loads at a time: a block's.
SCALE_BYTES = 4
# Columns of a scale: as MXFP4 has them, and as int4 made at load.
MX_GROUP, INT_GROUP = 32, 128
# e2m1 by its bits without the sign, and the middles of neighbours.
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Exponents of e8m0: its bias, what stands for NaN, and the largest of small scales, 2.
BIAS, NAN, SMALL = 127, 255, 128
# Zero of int4 numbers that are symmetric.
MIDDLE = 8


class FourBit(NamedTuple):
    """A weight [rows, K] in MXFP4 or int4.

    data     uint8 [rows, 64 * ceil(K / 128)], or of experts [E, rows, …]: of 128 columns bytes 2 i and 2 i + 1, a word, have
             columns i, 32 + i, 64 + i and 96 + i, of int4 from the lowest four bits on, of MXFP4 as ``place_bits`` says;
             numbers of columns from K on are 0
    scales   [rows, ceil(K / g)] for groups of g columns, a power of two from 2 to 128; [rows, 1] for whole rows.
             uint8: of MXFP4, 2 ** (scale - 127), 255 is NaN; int8: the same bytes where none is more than 128 (``small``),
             by which kernels save a multiplication; float32 or bfloat16: of int4, where bfloat16 is faster (``narrow``).
             Kernels are faster too where rows of MXFP4 begin on 4 bytes, with zeros between them (``in_words``)
    columns  K
    zeros    uint8 of the shape of ``scales``: zero points of int4, 0 .. 15; None: 8
    """

    data: torch.Tensor
    scales: torch.Tensor
    columns: int
    zeros: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.data.shape[:-1], self.columns))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def is_mxfp4(self) -> bool:
        return self.scales.dtype in (torch.uint8, torch.int8)

    @property
    def format(self) -> str:
        return "mxfp4" if self.is_mxfp4 else "int4"

    @property
    def group(self) -> int:
        """Columns of a scale; K for one of a whole row, 0 if no power of two gives the shape."""
        return spread(self.scales.shape[-1], self.columns)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in ``dtype``."""
        wide = torch.promote_types(dtype, torch.float32)
        numbers = (unpacked_e2m1 if self.is_mxfp4 else unpacked)(self.data, self.columns)
        scales = self.scales
        if self.is_mxfp4:
            numbers, scales = numbers_of_e2m1(numbers, wide), scales_of_e8m0(scales.view(torch.uint8), wide)
        elif self.zeros is None:
            numbers = numbers.to(wide) - MIDDLE
        else:
            numbers = numbers.to(wide) - self.zeros.to(wide).repeat_interleave(self.group, -1)[..., : self.columns]
        return (numbers * scales.to(wide).repeat_interleave(self.group, -1)[..., : self.columns]).to(dtype)


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """``data`` of int4 from its numbers [..., K], each 0 .. 15."""
    first, second, third, fourth = _quarters(numbers)
    return torch.stack((first | second << 4, third | fourth << 4), -1).flatten(-3)


def unpacked(data: torch.Tensor, columns: int) -> torch.Tensor:
    """Numbers uint8 [..., columns] of int4's ``data``."""
    low, high = data.unflatten(-1, (-1, BLOCK // OF_WORD, 2)).unbind(-1)
    return torch.stack((low & 15, low >> 4, high & 15, high >> 4), -2).flatten(-3)[..., :columns]


def place_bits(place: int) -> tuple[int, int, int, int]:
    """Bits of a word of MXFP4 that have a number's mantissa, exponent and sign; places 0 .. 3.

    The exponent begins with its lower bit. bf16 has them in bits 6, 7, 8 and 15. Places 0, 1 and 2 lie 0, 3 and 6 bits below;
    3 has the bits that they leave.
    """
    return (10, 11, 13, 14) if place == 3 else (6 - 3 * place, 7 - 3 * place, 8 - 3 * place, 15 - 3 * place)


def packed_e2m1(numbers: torch.Tensor) -> torch.Tensor:
    """``data`` of MXFP4 from its numbers [..., K], each of 4 bits."""
    halves = [0, 0]
    for place, quarter in enumerate(_quarters(numbers)):
        for bit, at in enumerate(place_bits(place)):
            halves[at // 8] |= (quarter >> bit & 1) << at % 8
    return torch.stack(halves, -1).flatten(-3)


def unpacked_e2m1(data: torch.Tensor, columns: int) -> torch.Tensor:
    """Numbers uint8 [..., columns] of MXFP4's ``data``, each of 4 bits."""
    halves = data.unflatten(-1, (-1, BLOCK // OF_WORD, 2)).unbind(-1)
    quarters = [
        sum((halves[at // 8] >> at % 8 & 1) << bit for bit, at in enumerate(place_bits(place)))
        for place in range(OF_WORD)
    ]
    return torch.stack(quarters, -2).flatten(-3)[..., :columns]


def _quarters(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Numbers uint8 [..., blocks, 32] at each place of the words, zeros after a row's end."""
    blocks = torch.nn.functional.pad(numbers.to(torch.uint8), (0, -numbers.shape[-1] % BLOCK))
    return blocks.unflatten(-1, (-1, OF_WORD, BLOCK // OF_WORD)).unbind(-2)


def small(scales: torch.Tensor) -> torch.Tensor:
    """MXFP4's ``scales`` as int8 if none is more than 2, else as they are. Waits for the device."""
    return scales.view(torch.int8) if scales.numel() == 0 or scales.max() <= SMALL else scales


def narrow(scales: torch.Tensor) -> torch.Tensor:
    """int4's ``scales`` in bfloat16 if that has them all, else as they are. Waits for the device."""
    narrower = scales.bfloat16()
    return narrower if torch.equal(narrower.to(scales.dtype), scales) else scales


def in_words(scales: torch.Tensor) -> torch.Tensor:
    """MXFP4's ``scales`` with rows that begin on 4 bytes, zeros between them."""
    padding = -scales.shape[-1] % SCALE_BYTES
    if padding == 0:
        return scales.contiguous()
    return torch.nn.functional.pad(scales, (0, padding))[..., : scales.shape[-1]]


def pairs(data: torch.Tensor) -> torch.Tensor:
    """Numbers [..., 2 n] of bytes [..., n], the low half of each first, as checkpoints have them."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def numbers_of_e2m1(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e2m1 of 4 bits in ``dtype``."""
    values = torch.tensor([*NUMBERS, *(-value for value in NUMBERS)], dtype=dtype, device=numbers.device)
    return values[numbers.int()]


def scales_of_e8m0(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e8m0 of 8 bits in ``dtype``, of 32 bits or more."""
    bits = scales.to(torch.int32) << 23
    # The smallest is subnormal.
    return torch.where(scales == 0, 1 << 22, bits).view(torch.float32).masked_fill(scales == NAN, torch.nan).to(dtype)


def mxfp4(weight: torch.Tensor) -> FourBit:
    """``weight`` [..., K] in MXFP4, bit for bit as the specification converts it.

    The scale's exponent is that of the largest of its group less 2, numbers beyond 6 become 6, halves go to the even number. A
    group with NaN or an infinity has the scale NaN.
    """
    groups = _groups(weight, MX_GROUP)
    largest = groups.abs().amax(-1)
    exponents = (torch.frexp(largest).exponent - 3).clamp(-BIAS, BIAS)
    exponents = torch.where(largest == 0, -BIAS, exponents)
    scales = torch.where(largest.isfinite(), exponents + BIAS, NAN).to(torch.uint8)
    # By a power of two: in fp64 nothing is lost.
    sizes = (groups.abs().double() / scales_of_e8m0(scales, torch.float64)[..., None]).nan_to_num(0.0, 0.0)
    numbers = _nearest_e2m1(sizes) | (groups.signbit().to(torch.uint8) << 3)
    data = packed_e2m1(numbers.flatten(-2)[..., : weight.shape[-1]])
    return FourBit(data, small(in_words(scales)), weight.shape[-1])


def _nearest_e2m1(sizes: torch.Tensor) -> torch.Tensor:
    """e2m1 nearest to sizes of no sign, in 3 bits."""
    values = torch.tensor(NUMBERS, dtype=sizes.dtype, device=sizes.device)
    middles = (values[1:] + values[:-1]) / 2
    # A middle goes to the even number: up where the one below is odd.
    below, above = torch.bucketize(sizes, middles), torch.bucketize(sizes, middles, right=True)
    return torch.where(below % 2 == 0, below, above).to(torch.uint8)


def int4(weight: torch.Tensor, group: int | None = INT_GROUP, symmetric: bool = True) -> FourBit:
    """``weight`` [..., K] in int4 with scales of ``group`` columns; None: of whole rows.

    Numbers go to the nearest. Scales are rounded to bf16, as checkpoints have them. Symmetric: the largest magnitude / 7.5;
    else the range of the group and 0, divided by 15, with a zero point.
    """
    groups = _groups(weight, group or weight.shape[-1])
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    # A tensor below: on GPUs torch multiplies by the inverse of a number, which rounds otherwise.
    size = torch.maximum(high, -low) if symmetric else high - low
    scales = (size / torch.full_like(size, 7.5 if symmetric else 15.0)).bfloat16().float()
    scales = torch.where(scales == 0, 1.0, scales)
    zeros = torch.full_like(scales, MIDDLE) if symmetric else (-low / scales).round().clamp(0, 15)
    numbers = ((groups / scales[..., None]).round() + zeros[..., None]).nan_to_num(0.0).clamp(0, 15)
    data = packed(numbers.flatten(-2)[..., : weight.shape[-1]])
    return FourBit(data, scales.bfloat16(), weight.shape[-1], None if symmetric else zeros.to(torch.uint8))


def _groups(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """fp32 [..., groups, columns] of ``weight``, zeros after a row's end."""
    return torch.nn.functional.pad(weight.float(), (0, -weight.shape[-1] % columns)).unflatten(-1, (-1, columns))
