"""Files of loads: what they say, and what is refused with the field, its value and the rule."""

import json
from pathlib import Path

import pytest

from weft.predict import load

ROOT = Path(__file__).parent.parent.parent
PLAIN = {"schema": 1, "concurrency": 8, "prompt_tokens": 100, "answer_tokens": 20}


def test_a_number_and_a_list_of_lengths():
    made = load.of({**PLAIN, "prompt_tokens": [100, 300, 100, 500]})
    assert made.prompt.values == (100, 300, 500)
    assert made.prompt.shares == (0.5, 0.25, 0.25)
    assert (made.prompt.mean, made.prompt.largest, made.answer.mean) == (250, 500, 20)
    assert (made.prompt.percentile(0.5), made.prompt.percentile(0.99)) == (100, 500)
    assert (made.context, made.longest, made.new_tokens) == (260, 520, 250)


def test_percentiles_lie_evenly_between_their_values():
    made = load.of({**PLAIN, "prompt_tokens": {"percentiles": {"0": 0 + 1, "50": 101, "100": 301}}}).prompt
    assert sum(made.shares) == pytest.approx(1)
    assert made.mean == pytest.approx(126, rel=0.02)
    assert made.largest == 301


def test_the_example_is_read():
    made = load.read(ROOT / "examples" / "load.json")
    assert made.arrivals_per_second == 4
    assert made.first_token_seconds == 0.5
    assert made.new_tokens == pytest.approx(0.75 * made.prompt.mean)


def test_drafts_give_a_sum_of_powers():
    made = load.of({**PLAIN, "drafts": {"acceptance": 0.5, "most": 3}}).drafts
    assert (made.method, made.most) == ("ngram", 3)
    assert [made.tokens(k) for k in (0, 1, 2)] == [1, 1.5, 1.75]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "schema=2 is not 1"),
        ({"arrivals_per_second": 3}, "a load has one of both; pass one"),
        ({"concurrency": None}, "a load has one of both; pass one"),
        ({"concurrency": 0}, "concurrency=0 is not an integer in 1 .. 1048576"),
        ({"concurrency": True}, "concurrency=True is not an integer"),
        ({"concurrency": 1.5}, "concurrency=1.5 is not an integer"),
        ({"drafts": {"acceptance": 0.5, "most": 2.5}}, "drafts.most=2.5 is not an integer in 1 .. 8"),
        ({"prompt_token": 3}, "prompt_token is not one of"),
        ({"prompt_tokens": 0}, "prompt_tokens=0 is not a number of tokens"),
        ({"prompt_tokens": []}, "prompt_tokens=[] is not a number of tokens"),
        ({"prompt_tokens": {"mean": 3}}, "prompt_tokens.mean is not one of percentiles"),
        ({"prompt_tokens": {"percentiles": {"50": 300, "90": 200}}}, "ascending"),
        ({"prompt_tokens": {"percentiles": {"x": 300}}}, "ascending"),
        ({"shared_prefix": 1.5}, "shared_prefix=1.5 is not a number in 0 .. 1"),
        ({"targets": {"token_second": 1}}, "targets.token_second is not one of first_token_seconds, token_seconds"),
        ({"targets": 3}, "targets=3 is not an object"),
        ({"targets": {"token_seconds": "fast"}}, "targets.token_seconds='fast' is not a number"),
        ({"drafts": {"acceptance": 2}}, "drafts.acceptance=2 is not a number in 0 .. 1"),
        ({"drafts": {"method": "magic", "acceptance": 0.5}}, "drafts.method='magic' is not one of ngram"),
    ],
)
def test_what_is_refused(change, reason, tmp_path):
    content = {name: value for name, value in {**PLAIN, **change}.items() if value is not None}
    file = tmp_path / "load.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="load.json: ") as caught:
        load.read(file)
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_a_file_that_is_no_load(text, tmp_path):
    file = tmp_path / "load.json"
    file.write_text(text)
    with pytest.raises(
        ValueError, match="load.json(: it is| cannot be read as JSON: .*; write one as docs/planning.md shows)"
    ):
        load.read(file)
    with pytest.raises(ValueError, match="missing.json cannot be read as JSON: .*; write one as"):
        load.read(tmp_path / "missing.json")
