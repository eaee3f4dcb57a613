"""Predicted steps with drafts, beside measured ones, and the draft lengths that follow from them."""

from dataclasses import replace

import pytest

from weft.engine.speculation.drafting import DraftLength
from weft.engine.speculation.options import SpeculativeConfig
from weft.engine.speculation.times import Drafting, line, seconds
from weft.models import DecoderConfig
from weft.models.steps import Layout, step_time

MODEL = DecoderConfig.named("qwen3.6-27b")
MTP = Drafting(config=replace(MODEL, num_hidden_layers=1, linear_attention=None), joining=(5120, 10240))
LAYOUT = Layout(world_size=2)
# On two H200s, bf16, 128 to 192 tokens of a sequence: ms of a step without drafts, and with 3 of the MTP head.
MEASURED = {1: (7.30, 9.3), 8: (8.16, 10.6), 32: (9.41, 15.8), 128: (15.79, 39.6)}


@pytest.mark.parametrize(("batch", "measured"), MEASURED.items(), ids=str)
def test_steps_with_drafts_of_an_mtp_head_are_near_measured_ones(batch, measured):
    plain = step_time(MODEL, (batch, 160, 1), LAYOUT, "h200").seconds
    drafting = seconds(MODEL, MTP, LAYOUT, "h200", (batch, 3, 160))
    assert plain * 1e3 == pytest.approx(measured[0], rel=0.1)
    assert drafting * 1e3 == pytest.approx(measured[1], rel=0.15)


def chosen(acceptance, batch, context, drafting=MTP, most=3):
    """Draft length that an engine chooses once each draft after accepted ones is accepted at this rate."""
    config = SpeculativeConfig(num_speculative_tokens=most)
    times = {batch: tuple(line(MODEL, drafting, LAYOUT, "h200", (batch, length)) for length in config.lengths)}
    length = DraftLength(config, times)
    length._kept = [acceptance ** (place + 1) for place in range(most)]
    return length.choose(batch, lambda: context)


def test_lengths_follow_the_batch_and_the_context():
    assert [chosen(0.73, batch, 160) for batch in (1, 8, 32, 128)] == [3, 3, 3, 1]
    assert [chosen(0.2, batch, 160) for batch in (1, 32, 128)] == [1, 1, 0]
    assert chosen(0.25, 128, 160) == 0 and chosen(0.25, 128, 100_000) > 0  # keys are read once for all drafts


def test_what_drafts_is_paid_for():
    small = Drafting(config=DecoderConfig.named("qwen3-0.6b"), is_head=False)
    step = [seconds(MODEL, one, LAYOUT, "h200", (8, 3, 160)) for one in (None, small, MTP)]
    assert step[0] < step[2] < step[1]
    fp8 = seconds(MODEL, replace(MTP, head_share=0.5), LAYOUT, "h200", (8, 3, 160))
    assert 0.3e-3 < step[2] - fp8 < 0.6e-3  # three times half of 1.27 GB
