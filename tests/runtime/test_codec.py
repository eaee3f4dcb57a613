"""Messages between ranks arrive unchanged or are refused by name; foreign bytes are refused."""

import collections
import enum
import math
import pickle
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft.engine.params import SamplingParams, as_prompts
from weft.errors import NotExchangeable
from weft.ops.gemm.tile import Tile
from weft.runtime import codec


@weft.exchangeable
class Pair(NamedTuple):
    x: int
    y: object = None


@weft.exchangeable
class Colour(enum.IntEnum):
    RED = 1


@weft.exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: float
    more: dict = field(default_factory=dict)


class Stranger(NamedTuple):
    x: int


class Sub(dict):
    pass


def there_and_back(value):
    return codec.decode(codec.encode(value))


def same(a, b):
    """Equal, of the same types all the way down; NaN is itself, and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = plain | st.tuples(plain, plain)
values = st.recursive(
    plain, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=20
)


@settings(max_examples=60)
@given(values)
def test_plain_values_come_back_as_they_were(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        -(1 << 63), 1 << 63, -(1 << 64), 10**400, -0.0, math.nan, math.inf, "\ud800", "\0ä", b"\0", (), [], {},
        ["ä", "", "\ud83d", "\ude00", "b" * 300, *"cdefg"], ["a"] * 20 + [None], [""] * 9,
        list(range(1000)), [*range(20), 1 << 63], [*range(20), True], {True: 1, "1": 2, (1, (2,)): [3]},
        torch.Size((2, 3)), torch.bfloat16, Pair(1, [Pair(2)]), Colour.RED, Point(x=1.0, more={Colour.RED: Pair(1)}),
        Tile(block_m=64, block_n=128, block_k=32), SamplingParams(temperature=0.5, stop=("a",), stop_token_ids=(3, 1)),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_each_kind_of_value_comes_back_as_it_was(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("name", sorted(codec._DTYPES))
def test_tensors_come_back_bit_for_bit(name):
    dtype = codec._DTYPES[name]
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), generator=generator).to(
        torch.uint8
    )
    x = raw.view(dtype)
    for tensor in (x, x.view(2, 3).t(), x[::2], x[3], x[:0].view(0, 7)):
        found = there_and_back({"x": tensor})["x"]
        assert found.dtype == dtype and found.shape == tensor.shape and found.is_contiguous()
        flat = [t.contiguous().view(-1).view(torch.uint8) for t in (found, tensor)]
        assert torch.equal(*flat)


def test_a_parameter_travels_as_a_tensor_and_shares_nothing():
    parameter = torch.nn.Parameter(torch.ones(2))
    found = there_and_back(parameter)
    assert type(found) is torch.Tensor and not found.requires_grad
    found.zero_()
    assert parameter.tolist() == [1, 1]


def test_what_users_pass_to_a_model_becomes_plain_before_ranks_exchange_it():
    params = SamplingParams(
        temperature=numpy.float32(0.5), top_p=numpy.float64(0.5), max_tokens=numpy.int64(3), seed=numpy.int32(1),
        stop=[numpy.str_("a")], stop_token_ids=numpy.array([2, 1]).tolist(),
    )  # fmt: skip
    asked = ([*as_prompts((1, numpy.int64(2))), *as_prompts([range(3), numpy.str_("x")])], [params])
    assert there_and_back(asked) == asked == ([[1, 2], [0, 1, 2], "x"], [params])


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


looped = []
looped.append(looped)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"loss": [numpy.float64(1.0)]}, r"item\['loss'\]\[0\] is of type numpy.float64, .*; pass x.item\(\)"),
        (numpy.int64(1), "item is of type numpy.int64, .*; pass x.item()"),
        (numpy.zeros(2), r"numpy.ndarray, .*; pass torch.from_numpy\(x\)"),
        ((1, {2}), r"item\[1\] is of type set, .*; pass sorted\(x\), a list"),
        (Stranger(1), r"Stranger, .*; decorate class Stranger with @weft.exchangeable"),
        (Pair(1, Stranger(1)), r"item.y is of type .*Stranger"),
        ({Stranger(1): 2}, r"item \(the key a Stranger\) is of type"),
        (Sub(), r"Sub, .*; pass dict\(x\)"),
        (collections.OrderedDict(), r"OrderedDict, .*; pass dict\(x\)"),
        (object(), "item is of type object, and ranks exchange data only; pass None, bool"),
        (print, "builtin_function_or_method"),
        (1j, "complex"),
        (ValueError("x"), "ValueError"),
        (torch.zeros(2, device="meta"), "is a torch.strided tensor of torch.float32 on meta, .*; pass a dense one"),
        (torch.zeros(2).to_sparse(), "is a torch.sparse_coo tensor"),
        ({torch.zeros(2): 1}, "has a tensor for a key"),
        (nested(100), r"lies more than 64 levels deep"),
        (looped, r"^item(\[0\])+…(\[0\])+ lies more than 64 levels deep"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_all_else_is_refused_by_name_and_place(value, said):
    with pytest.raises(NotExchangeable, match=said) as caught:
        codec.encode(value)
    assert isinstance(caught.value, TypeError) and "\n" not in str(caught.value) and len(str(caught.value)) < 350


def test_instances_of_one_class_come_back_as_they_were():
    shared, colours = [1], [Colour.RED] * 20
    for values in (
        [Point(x=float(x), more={"x": x}) for x in range(20)],
        [Point(x=-0.0, more={"m": shared}) for _ in range(20)],
        [Point(x=1.0)] * 9,
        [Pair(x, colours) for x in range(9)],
        [Pair(1, [Point(x=2.0)] * 10)] * 10,
        colours,
        [Point(x=1.0)] * 9 + [Pair(1)],
    ):
        found = there_and_back(values)
        assert found == values and list(map(type, found)) == list(map(type, values))
        assert same([one.x for one in found if type(one) is Point], [one.x for one in values if type(one) is Point])


def test_equal_frozen_instances_are_sent_once():
    params = [SamplingParams(max_tokens=3, stop=["a"])] * 500
    message = codec.encode(params)
    assert len(message) < 500 + 2 * len(codec.encode(params[0])) + 20 * len(codec._NAMES[SamplingParams][1])
    assert len({id(one) for one in codec.decode(message)}) == 1


def test_what_cannot_be_sent_in_one_of_many_is_named_with_its_index():
    points = [Point(x=float(x), more={"x": print if x == 7 else x}) for x in range(20)]
    with pytest.raises(NotExchangeable, match=r"^item\[7\].more\['x'\] is of type builtin_function_or_method"):
        codec.encode(points)


def test_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(codec, "MAX_BYTES", 1000)
    for value in (b"x" * 1001, [b"x" * 500] * 2):
        with pytest.raises(NotExchangeable, match="bytes.* at most 1,000"):
            codec.encode(value)


@pytest.mark.parametrize("cls", [int, Sub, enum.Flag("F", "A B"), "x"], ids=str)
def test_only_data_classes_can_be_marked(cls):
    with pytest.raises((ValueError, TypeError)):
        weft.exchangeable(cls)


def test_a_class_with_a_derived_field_cannot_be_marked():
    @dataclass
    class Derived:
        x: int = field(init=False)

    with pytest.raises(ValueError, match="field x has init=False"):
        weft.exchangeable(Derived)


SAMPLE = codec.encode({"a": [1, 2.5, "x", b"y", None, 1 << 70], "t": torch.ones(2, 3), "p": (Pair(1), Colour.RED)})


@settings(max_examples=150)
@given(st.data())
def test_malformed_bytes_give_a_value_or_one_clear_error(data):
    damaged = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for message in (damaged, codec._MAGIC + damaged[data.draw(st.integers(0, 20)) :]):
        try:
            codec.decode(message)
        except codec.Malformed as error:
            assert "\n" not in str(error) and len(str(error)) < 300


def word(number):
    return number.to_bytes(4, "little")


POINT = word(len(name := f"{__name__}.Point".encode())) + name


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "ends in the middle"),
        (b"l" + word(0xFFFFFFFF), "ends in the middle"),
        (b"b" + word(1 << 31) + b"x", "ends in the middle"),
        (b"NN", "1 bytes follow its end"),
        (b"?", "marks no kind of value"),
        (b"l\x01\0\0\0" * 1000 + b"N", "more than 64 levels"),
        (b"d" + word(1) + b"l" + word(0) + b"N", "unhashable"),
        (b"x" + word(5) + b"int32" + b"\x01" + (1 << 62).to_bytes(8, "little") + word(0), "are no tensor of"),
        (b"x" + word(5) + b"int32" + b"\x01" + b"\xff" * 8 + word(0), "are no tensor of"),
        (b"x" + word(6) + b"system" + b"\0" + word(0), "KeyError: 'system'"),
        (b"o" + word(9) + b"os.system" + word(1) + b"s" + word(4) + b"true", "'os.system', which this rank has not marked"),
        (b"e" + word(9) + b"os.system" + b"N", "which this rank has not marked"),
        (b"a" + word(7) + b"1234567", "ValueError"),
        (b"c" + word(16) + (5).to_bytes(8, "little") * 2 + word(9) + b"123456789", "its texts are not as long as it says"),
        (b"c" + word(16) + (9).to_bytes(8, "little") + b"\xff" * 8 + word(8) + b"12345678", "its texts are not as long"),
        (codec.encode(Tile(block_m=64, block_n=64, block_k=64))[5:].replace(b"\x40", b"\x41", 1), "power of two"),
        (b"k" + POINT + word(1 << 30) + b"x", "ends in the middle"),
        (b"k" + POINT + word(2) + b"xx" + word(1) + b"l" + word(0), "does not hold 2 instances of Point"),
        (b"k" + POINT + word(2) + b"xx" + word(2) + (b"t" + word(3) + b"NNN") * 2, "does not hold 2 instances of Point"),
    ],
    ids=range(19),
)  # fmt: skip
def test_what_is_wrong_with_a_message_is_said(body, said):
    with pytest.raises(codec.Malformed, match=said):
        codec.decode(codec._MAGIC + body)


def test_a_pickle_is_not_a_message():
    with pytest.raises(codec.Malformed, match="does not begin as a message of this version of weft"):
        codec.decode(pickle.dumps(1))
