"""Which calls of an integration run on weft."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.doors import thresholds
from weft.errors import HeapExhausted
from weft.integrations.fallback import EAGER_FROM, Fallback, Kind

BIG = Kind("matmul_all_reduce", (4096, 5120, 12800), torch.bfloat16)
SMALL = Kind("matmul_all_reduce", (16, 5120, 12800), torch.bfloat16)


class OnGPU:
    """A team of two ranks on GPUs, which answer alike."""

    device, is_simulated, size = torch.device("cuda"), False, 2

    def __init__(self):
        self.exchanged = []

    def exchange(self, item):
        self.exchanged.append(item)
        return [item, item]


@pytest.fixture
def capturing(monkeypatch):
    state = SimpleNamespace(now=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.now)
    return state


def called(fallback, kind, problem=None, on_weft=lambda: "weft"):
    return fallback.call(kind, on_weft, lambda: "original", lambda: problem)


def test_eager_calls_run_on_weft_where_they_pay_and_captured_ones_where_prepared(capturing):
    fallback = Fallback(OnGPU())
    capturing.now = True
    assert called(fallback, SMALL) == "original", "its workspaces are not made yet, and cannot be under capture"
    capturing.now = False
    assert [called(fallback, SMALL) for _ in range(3)] == ["weft", "original", "original"]
    assert [called(fallback, BIG) for _ in range(3)] == ["weft"] * 3
    capturing.now = True
    assert called(fallback, SMALL) == called(fallback, BIG) == "weft"
    assert len(fallback.team.exchanged) == 2, "the ranks agree once for each kind"


def test_what_failed_once_is_left_to_the_original(capturing, caplog):
    def no_room():
        raise HeapExhausted(0, 1 << 20, 0, 0, 0, 1 << 16)

    fallback = Fallback(OnGPU())
    assert called(fallback, BIG, on_weft=no_room) == called(fallback, SMALL, problem="too odd") == "original"
    for capturing.now in (False, True):
        assert called(fallback, BIG) == called(fallback, SMALL) == "original"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "matmul_all_reduce of (4096, 5120, 12800) is left to the original code",
        "matmul_all_reduce of (16, 5120, 12800) is left to the original code",
    ]


@pytest.mark.parametrize("op", EAGER_FROM)
def test_the_rule_is_that_of_the_committed_results(op):
    """From EAGER_FROM on, no other provider is faster where calls are eager; it is the smallest such measured call."""
    wins = thresholds.ahead(thresholds.RESULTS, op)
    assert thresholds.threshold(wins) == EAGER_FROM[op]
    for shape in wins:
        assert Kind(op, shape, torch.bfloat16).pays == (thresholds.work_of(shape) >= EAGER_FROM[op])
