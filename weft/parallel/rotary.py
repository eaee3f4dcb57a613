"""Rotary position embedding in the half-split order of Hugging Face checkpoints, and its scaling."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.arguments import is_integer, quoted

# An angle is position / powers[i], with powers[i] = theta ** (2i / head_dim). Each scaling below gives the reciprocals that
# replace 1 / powers, and the attention factor: cosines and sines are multiplied by it. The fields are keys of rope_parameters.


class Checked:
    """Base of scalings, whose fields that are given are checked by RULES."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                _check(field.name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Checked):
    """Position interpolation: all angles divided by `factor`."""

    factor: float

    def frequencies(self, powers: Tensor, theta: float) -> tuple[Tensor, float]:
        return 1.0 / powers / self.factor, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3(Checked):
    """Scaling of Llama 3.1: angles that turn slowly in the original context are divided by `factor`.

    low_freq_factor   turns in the original context up to which an angle is divided
    high_freq_factor  turns from which it is kept; between the two it is blended
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor!r} is not below high_freq_factor={self.high_freq_factor!r}"
            )

    def frequencies(self, powers: Tensor, theta: float) -> tuple[Tensor, float]:
        plain = 1.0 / powers
        turns = self.original_max_position_embeddings / (2 * math.pi / plain)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn(Checked):
    """YaRN (arXiv 2309.00071): like Llama3 with a ramp over elements, and an attention factor.

    beta_fast, beta_slow    turns in the original context at which the ramp begins and ends
    attention_factor        of cosines and sines; None: computed from `factor`, or from mscale and mscale_all_dim
    truncate                the ramp begins and ends at whole elements
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, powers: Tensor, theta: float) -> tuple[Tensor, float]:
        head_dim = 2 * len(powers)
        low, high = (self._element(turns, head_dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high += 0.001 if low == high else 0  # a ramp over nothing
        at = torch.arange(len(powers), dtype=torch.float32, device=powers.device)
        kept = 1 - ((at - low) / (high - low)).clamp(0, 1)
        return (1.0 / (self.factor * powers)) * (1 - kept) + (1.0 / powers) * kept, self._attention_factor()

    def _element(self, turns: float, head_dim: int, theta: float) -> float:
        """Element of a half whose angle turns this many times in the original context."""
        return (
            head_dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        both = self.mscale and self.mscale_all_dim  # to transformers 0 is none
        over, under = (self.mscale, self.mscale_all_dim) if both else (1.0, 0.0)
        log = math.log(self.factor)
        return (0.1 * over * log + 1.0) / (0.1 * under * log + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope(Checked):
    """LongRoPE (arXiv 2402.13753): each angle divided by a factor, and an attention factor.

    short_factor, long_factor  of each angle, where the longest sequence is at most original_max_position_embeddings, and where
                      it is longer. transformers chooses by the longest sequence of each pass, so the keys of a sequence that
                      grows beyond are of two kinds; here one choice serves a model's whole life
    factor            of the context, which gives the attention factor
    attention_factor  None: computed from `factor`
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None

    def frequencies(self, powers: Tensor, positions: int | None) -> tuple[Tensor, float]:
        """positions  of the longest sequence; None: no more than the original ones"""
        long = positions is not None and positions > self.original_max_position_embeddings
        name = "long_factor" if long else "short_factor"
        if len(factors := getattr(self, name)) != len(powers):
            raise ValueError(f"{name} has {len(factors)} numbers, and a head {len(powers)} angles; give one for each")
        return 1.0 / (torch.tensor(factors, device=powers.device) * powers), self._attention_factor()

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


@dataclass(frozen=True, slots=True, kw_only=True)
class NtkAlpha(Checked):
    """NTK-aware scaling by a fixed `alpha`, which stretches the base: "dynamic" in Hunyuan's files."""

    alpha: float

    def frequencies(self, powers: Tensor, theta: float) -> tuple[Tensor, float]:
        if (head_dim := 2 * len(powers)) == 2:
            raise ValueError("alpha of a rotary embedding of 2 elements, which have no base to stretch; leave it out")
        base = theta * self.alpha ** (head_dim / (head_dim - 2))
        return 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=powers.device) / head_dim)), 1.0


Angles = Tensor | tuple[Tensor, ...]
"""Table of ``rotary_angles``, or tables by kind of layer."""
Scaling = Linear | Llama3 | Yarn | LongRope | NtkAlpha
SCALINGS: dict[str, type[Scaling]] = {"linear": Linear, "llama3": Llama3, "yarn": Yarn, "longrope": LongRope}
"""rope_type -> its parameters."""

# Keys that change nothing with this value: of all types, and of the plain one.
NEUTRAL = {"partial_rotary_factor": 1.0}
NEUTRAL_BY_KIND = {"default": NEUTRAL | {"factor": 1.0, "attention_factor": 1.0}}


def _check_keys(name: str, kind: str, given: Mapping[str, Any]) -> None:
    """ValueError unless the keys of `name` are the parameters of rotary embedding of this type."""
    keys = {field.name: field.default is MISSING for field in fields(SCALINGS[kind])} if kind in SCALINGS else {}
    if unknown := next((key for key in given if key not in keys), None):
        raise ValueError(
            f"{name}: {quoted(unknown)[1:-1]}={quoted(given[unknown])} is a key that weft does not know of rotary "
            f"embedding of type {kind!r}; where it changes nothing, remove it"
        )
    if missing := [key for key, required in keys.items() if required and key not in given]:
        raise ValueError(
            f"{name}: rotary embedding of type {kind!r} needs {', '.join(missing)}; add what it was made with"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary embedding of a model: the base of its angles, and how they are scaled (None: not).

    partial  the first part of a head that is rotated
    """

    theta: float
    scaling: Scaling | None = None
    partial: float = 1.0

    def __post_init__(self) -> None:
        _check("rope_theta", self.theta)
        _check("partial_rotary_factor", self.partial)
        if isinstance(self.scaling, Yarn) and self.theta <= 1:
            raise ValueError(f"rope_theta={self.theta!r} is not above 1, as YaRN needs it")

    @classmethod
    def of(cls, parameters: Mapping[str, Any], name: str = "rope_parameters", *, partly: bool = False) -> Rotary:
        """Rotary embedding of transformers' `rope_parameters`. ValueError, with `name`, for other kinds.

        partly  the model reads partial_rotary_factor
        """
        given = {key: value for key, value in parameters.items() if value is not None}
        partial = given.pop("partial_rotary_factor", 1.0) if partly else 1.0
        if by_layer := [key for key, value in given.items() if isinstance(value, Mapping)]:
            raise ValueError(
                f"{name} has an object under {quoted(by_layer[0])}, parameters by type of layer; weft reads one rope_theta and "
                f"rope_type for all layers: put them into {name} itself"
            )
        kind = _kind(given, name)
        for key, value in NEUTRAL_BY_KIND.get(kind, NEUTRAL).items():
            if given.pop(key, value) != value:
                raise ValueError(
                    f"{name}: {key}={quoted(parameters[key])} is not supported; weft runs {kind!r} with {value!r}"
                )
        theta = given.pop("rope_theta", None)
        scaling = SCALINGS.get(kind)
        _check_keys(name, kind, given)
        try:
            # Tuples can be hashed.
            given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
            return cls(theta=theta, scaling=scaling and scaling(**given), partial=partial)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def positions(self, max_position_embeddings: int) -> int:
        """Positions that the model is made for, by YaRN's parameters where there are some.

        Then config.json may name the positions without YaRN, as Qwen3's cards do.
        """
        if isinstance(self.scaling, Yarn):
            return int(self.scaling.factor * self.scaling.original_max_position_embeddings)
        return max_position_embeddings

    def elements(self, head_dim: int) -> int:
        """Number of elements of a head that are rotated. ValueError where it is odd."""
        elements = int(head_dim * self.partial)
        if elements % 2:
            raise ValueError(
                f"partial_rotary_factor={self.partial:g} of head_dim={head_dim} is {elements}, which is odd; rotary embedding "
                f"takes halves"
            )
        return elements

    def frequencies(self, head_dim: int, device: torch.device, positions: int | None = None) -> tuple[Tensor, float]:
        """Angles of position 1, fp32 [half of the rotated elements], and the attention factor.

        transformers calls them `inv_freq` and `attention_scaling`.

        positions  of the longest sequence, as of ``LongRope``
        """
        rotated = self.elements(head_dim)
        powers = self.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated)
        if isinstance(self.scaling, LongRope):
            return self.scaling.frequencies(powers, positions)
        return (1.0 / powers, 1.0) if self.scaling is None else self.scaling.frequencies(powers, self.theta)


def _kind(given: dict[str, Any], name: str) -> str:
    """Type of rotary embedding, which leaves ``given``. ValueError for one that weft does not run."""
    kind = "default"
    for key in ("type", "rope_type"):  # the first of transformers 4.x
        if (kind := given.pop(key, kind)) != "default" and (not isinstance(kind, str) or kind not in SCALINGS):
            raise ValueError(
                f"{name}: {key}={quoted(kind)} is not supported; weft runs 'default', {', '.join(map(repr, SCALINGS))}"
            )
    return kind


def rotary_angles(
    max_positions: int,
    head_dim: int,
    rope: float | Rotary | Mapping[str, Any] | tuple[Tensor, float] | None,
    device: torch.device,
) -> Tensor:
    """[max_positions, head_dim] fp32: cosines of each position's head_dim / 2 angles, then their sines.

    Both are times the attention factor. The last angles of a partial rotary embedding are zero, without that factor, and so are
    all where there is none (``rotary_order``).

    rope  the base of plain rotary embedding; a Rotary; transformers' `config.rope_parameters`, with ValueError for other kinds
          (dynamic, partial); what transformers computed, (inv_freq, attention_scaling) of a model's `rotary_emb`;
          or None: no rotary embedding
    """
    if rope is None:
        frequencies, factor = torch.zeros(0, device=device), 1.0
    elif isinstance(rope, tuple):
        frequencies, factor = rope
        if frequencies.shape != (head_dim // 2,):
            raise ValueError(
                f"inv_freq has shape {tuple(frequencies.shape)} instead of {(head_dim // 2,)}; weft rotates whole heads"
            )
        frequencies = frequencies.to(device, torch.float32)
    else:
        if isinstance(rope, Mapping):
            rope = Rotary.of(rope)
        rotary = rope if isinstance(rope, Rotary) else Rotary(theta=rope)
        frequencies, factor = rotary.frequencies(head_dim, device, max_positions)
    angles = torch.arange(max_positions, device=device).float()[:, None] * frequencies
    unturned = head_dim // 2 - len(frequencies)
    cos, sin = F.pad(angles.cos() * factor, (0, unturned), value=1.0), F.pad(angles.sin() * factor, (0, unturned))
    return torch.cat((cos, sin), dim=-1)


def table_of(angles: Angles, number: int) -> Tensor:
    """Table of angles of a layer, where a step has one for all layers or one by kind of layer."""
    return angles if isinstance(angles, Tensor) else angles[number]


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin          x: [tokens, heads, head_dim]; angles: [tokens, head_dim]"""
    cos, sin = (part[:, None].to(x.dtype) for part in angles.chunk(2, dim=-1))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_order(head_dim: int, rotated: int, interleaved: bool) -> Tensor | None:
    """[head_dim] order of elements in which rotary embedding pairs halves of a head; None: as they are.

    rotated      the first elements, which rotary embedding turns in the checkpoint's order; the rest of both halves has angles
                 of zero (``rotary_angles``)
    interleaved  there it pairs 2i and 2i + 1, not i and i + rotated / 2
    """
    first, second = (torch.arange(start, rotated, 2) for start in (0, 1))
    if not interleaved:
        first, second = torch.arange(rotated).chunk(2)
    rest = torch.arange(rotated, head_dim).tensor_split(2)
    order = torch.cat((first, rest[0], second, rest[1]))
    return None if torch.equal(order, torch.arange(head_dim)) else order


def _is_number(value: object, low: float, high: float) -> bool:
    # Booleans are integers to Python, and JSON as Python reads it has infinity and NaN.
    return isinstance(value, Real) and not isinstance(value, bool) and low <= value <= high


def _is_factor(value: object) -> bool:
    return _is_number(value, 1e-6, 1e6)


Rule = tuple[str, Callable[[Any], bool]]
OF_THE_REST: Rule = ("a number from 0.000001 to 1000000", _is_factor)
_MSCALE: Rule = ("a number from 0.000001 to 1000000, or 0", lambda value: _is_number(value, 0, 0) or _is_factor(value))
_FACTORS: Rule = (
    "a list of numbers from 0.000001 to 1000000",
    lambda values: isinstance(values, tuple) and all(map(_is_factor, values)),
)
# What a file may name and still give finite angles.
RULES: dict[str, Rule] = {
    "rope_theta": ("a positive number that is finite", lambda value: _is_number(value, 5e-324, sys.float_info.max)),
    "factor": ("a number from 1 to 1000000", lambda value: _is_number(value, 1, 1e6)),
    "original_max_position_embeddings": (
        "a positive integer below 2**31",
        lambda value: is_integer(value) and 0 < value < 1 << 31,
    ),
    "mscale": _MSCALE,
    "mscale_all_dim": _MSCALE,
    "truncate": ("true or false", lambda value: isinstance(value, bool)),
    "partial_rotary_factor": ("a number above 0 and up to 1", lambda value: _is_number(value, 1e-6, 1)),
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
}


def _check(name: str, value: object) -> None:
    rule, fits = RULES.get(name, OF_THE_REST)
    if not fits(value):
        raise ValueError(f"{name}={quoted(value)} is not {rule}")
