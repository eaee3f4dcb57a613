"""Every planted bug is found within the default budget and for the right reason; every twin is clean."""

import pytest

import weft.check
from tests.zoo import catalogue, table
from weft.simulator.findings import RACES


def run(case, bug):
    return weft.check.check(case.main, case.world_size, sms=case.sms, args=(bug,))


def replay(case, schedule):
    return weft.check.check(
        case.main, schedule.world_size, schedules=schedule.runs, strategy=schedule.strategy, seed=schedule.seed,
        depth=schedule.depth, sms=schedule.sms, args=(True,),
    )  # fmt: skip


@pytest.mark.parametrize("case", catalogue.EXHIBITS, ids=lambda case: case.name)
def test_a_planted_bug_is_found_with_its_cause(case):
    report = run(case, True)
    findings = [found.finding for found in report.wrong]
    right = [
        f for f in findings if f.kind == case.kind and f.tensor == case.tensor and set(f.lines) - {None} == case.lines
    ]
    assert right, f"wanted {case.kind} of {case.tensor!r} at lines {sorted(case.lines)}\n{report}"
    replayed = replay(case, next(f.replay for f in report.wrong if f.finding is right[0]))
    again = {found.finding.kind if case.kind == "divergence" else found.finding.cause for found in replayed.wrong}
    assert (case.kind if case.kind == "divergence" else right[0].cause) in again, (
        f"not shown by the replay of\n{report}"
    )
    others = {f.kind for f in findings} - {case.kind, *case.also}
    assert not others, f"{others} besides\n{report}"


@pytest.mark.parametrize("case", catalogue.EXHIBITS, ids=lambda case: case.name)
def test_its_twin_is_clean(case):
    report = run(case, False)
    assert report.ok, str(report)


def test_there_are_enough_exhibits():
    assert len(catalogue.EXHIBITS) >= 40
    assert sum(case.published for case in catalogue.EXHIBITS) >= 4
    assert {case.kind for case in catalogue.EXHIBITS} >= RACES


def test_the_tables_of_the_page_are_up_to_date():
    text = table.PAGE.read_text()
    assert table.with_tables(text) == text, "run: python -m tests.zoo.table"
