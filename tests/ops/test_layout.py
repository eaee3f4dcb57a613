"""Arguments of an op: as ``forward`` takes them, as torch does, and as a backward finds them."""

from typing import NamedTuple

import pytest
import torch

import weft
from weft.ops.layout import Layout, flat
from weft.ops.op import registered
from weft.ops.vocab.vocab_embedding import VOCAB_EMBEDDING


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


class Whole(NamedTuple):
    x: torch.Tensor
    pair: Pair
    team: str
    scale: float = 1.0


def of_record(given: Whole) -> torch.Tensor: ...


def of_several(
    x: torch.Tensor, pair: Pair, xs: list[torch.Tensor], several: bool = False
) -> tuple[torch.Tensor, torch.Tensor]: ...


@pytest.mark.parametrize(
    ("forward", "schema"),
    [
        (of_record, "(Tensor x, Tensor left, Tensor? right, str team, float scale=1.0) -> Tensor"),
        (
            of_several,
            "(Tensor x, Tensor left, Tensor? right, Tensor[] xs, bool several=False) -> (Tensor, Tensor)",
        ),
    ],
)
def test_fields_of_records_lie_side_by_side_in_the_schema(forward, schema):
    assert Layout(forward).schema(()) == schema


def test_what_torch_omits_is_filled():
    layout, x = Layout(of_record), torch.ones(1)
    given = Whole(x, Pair(x, None), "team")
    for values in (flat([given]), flat([given])[:-1]):
        assert layout.given(values) == [given]
    assert layout.named([given]) == {"x": x, "left": x, "right": None, "team": "team", "scale": 1.0}


@pytest.mark.parametrize("op", list(registered()), ids=lambda op: op.name)
def test_the_way_back_is_the_inverse(op):
    values = list(range(len(op.layout.defaults)))
    assert flat(op.layout.given(values)) == values


def test_a_record_is_a_plain_argument(monkeypatch):
    """Its tensors decide whether torch's dispatcher is needed, as those beside it do."""
    seen = []
    monkeypatch.setattr(VOCAB_EMBEDDING, "forward", lambda *arguments: "directly")
    monkeypatch.setattr(VOCAB_EMBEDDING, "torch_op", lambda *values: seen.append(len(values)))
    plain, leaf = torch.ones(1), torch.ones(1, requires_grad=True)
    assert VOCAB_EMBEDDING.dispatch(Whole(plain, Pair(plain, None), "t")) == "directly"
    VOCAB_EMBEDDING.dispatch(Whole(plain, Pair(plain, leaf), "t"))
    assert seen == [5]


def test_a_backward_finds_names_and_gives_names():
    def main(team):
        a, b = torch.ones(2, 4, requires_grad=True), torch.ones(3, 4)
        with torch.autograd.graph.save_on_cpu():
            weft.ops.matmul_reduce_scatter(a, b, team).sum().backward()
        return a.grad.tolist(), b.grad

    assert weft.simulate(main, 2) == [([[3.0] * 4] * 2, None)] * 2
