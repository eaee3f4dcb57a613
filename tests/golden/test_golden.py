"""The golden cases: names are unique, every op is among them, and a digest sees one bit."""

import json

import torch

from tests.golden import local, model, moe, ops
from tests.golden.__main__ import compare, digest
from weft import ops as weft_ops

# Without a result of their own: a barrier, a printed choice, and types.
TYPES = {"DeferredNorm", "Dispatched", "Experts", "Explanation", "Routed", "Routing", "Schedule", "SequenceRanges"}
TYPES |= {"DeltaSlots", "DeltaTokens", "DraftRows", "Gates", "LogitChanges", "SequenceChunks"}
TYPES |= {"ZigzagRanges", "ZigzagShards"}
WITHOUT_RESULT = TYPES | {"barrier", "explain", "warm_up"}


def test_names_are_unique_and_cover_every_op():
    names = [name for group in (ops, local, moe, model) for name, _ in group.cases()]
    assert len(set(names)) == len(names) > 800
    called = moe.called(names)
    assert {name for name in weft_ops.__all__ if name not in called} == WITHOUT_RESULT


def test_a_digest_sees_every_bit_the_dtype_and_the_shape():
    zero = torch.zeros(4)
    others = [-zero, zero.int(), zero.view(2, 2), zero.half(), [zero], None, 0, False, "0", torch.zeros(0)]
    assert len({digest(other) for other in (zero, *others)}) == 1 + len(others)
    assert digest(zero) == digest(torch.zeros(8)[::2])


def test_a_difference_and_a_missing_case_are_named(tmp_path, capsys):
    def recorded(name, **digests):
        file = tmp_path / name
        file.write_text(json.dumps({"torch": "2", "digests": digests}))
        return file

    old = recorded("old", same="1", changed="2", gone="3")
    assert compare(old, recorded("equal", same="1", changed="2", gone="3", new="4")) == 0
    capsys.readouterr()
    assert compare(old, recorded("new", same="1", changed="5")) == 1
    assert capsys.readouterr().out.splitlines() == [
        "different: changed",
        "missing: gone",
        "3 cases: 1 different, 1 missing, 0 new",
    ]
