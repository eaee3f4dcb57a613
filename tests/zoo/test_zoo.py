"""Planted bugs are found within the default budget and for the right reason; their twins are clean."""

import pytest

import weft.check
from tests.zoo import catalogue, table
from weft.check.detector.findings import RACES

# Schedules, one of each strategy, that show most bugs.
FEW = 4


def run(case, bug, schedules=None):
    """Check an exhibit under its own budget, the default one if it has none; at most ``schedules`` if that is given.

    The kernels with the bug are compiled under a whole budget, in the sweep that is; its twin has the same ones.
    """
    compiles = bug and (schedules is None or case.kind == "compile-error")
    asked = [number for number in (case.schedules, schedules) if number is not None]
    budget = {"schedules": min(asked)} if asked else {}
    return weft.check.check(case.main, case.world_size, sms=case.sms, args=(bug,), compile=compiles, **budget)


def replay(case, schedule):
    return weft.check.check(
        case.main, schedule.world_size, schedules=schedule.runs, strategy=schedule.strategy, seed=schedule.seed,
        depth=schedule.depth, sms=schedule.sms, args=(True,), compile=case.kind == "compile-error",
    )  # fmt: skip


def found_soon(case):
    """The report of a few schedules if they show the bug, else of the whole budget."""
    report = run(case, True, FEW)
    return report if case.kind in [found.finding.kind for found in report.wrong] else run(case, True)


@pytest.mark.parametrize(
    "find", [found_soon, pytest.param(lambda case: run(case, True), marks=pytest.mark.sweep)], ids=["few", "all"]
)
@pytest.mark.parametrize("case", catalogue.EXHIBITS, ids=lambda case: case.name)
def test_a_planted_bug_is_found_with_its_cause(case, find):
    report = find(case)
    kinds = [found.finding.kind for found in report.wrong]
    assert set(kinds) - set(case.also) == {case.kind} and kinds.count(case.kind) == 1, (
        f"expected one finding, got\n{report}"
    )
    found = report.wrong[kinds.index(case.kind)]
    finding = found.finding
    assert (finding.kind, finding.tensor, set(finding.lines) - {None}) == (case.kind, case.tensor, case.lines), report
    again = [f.finding for f in replay(case, found.replay).wrong if f.finding.kind not in case.also]
    shown = [f.kind == case.kind if case.kind == "divergence" else f.cause == finding.cause for f in again]
    assert shown == [True], f"not shown, or not alone, by the replay of\n{report}"


@pytest.mark.parametrize("schedules", [1, pytest.param(None, marks=pytest.mark.sweep)], ids=["few", "all"])
@pytest.mark.parametrize("case", catalogue.EXHIBITS, ids=lambda case: case.name)
def test_its_twin_is_clean(case, schedules):
    report = run(case, False, schedules)
    assert report.ok, str(report)


def test_there_are_enough_exhibits():
    assert len(catalogue.EXHIBITS) >= 40
    assert sum(case.published for case in catalogue.EXHIBITS) >= 4
    assert {case.kind for case in catalogue.EXHIBITS} >= RACES


@pytest.mark.parametrize("page", table.TABLES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_up_to_date(page):
    assert table.with_tables(page) == page.read_text(), "run: python -m tests.zoo.table"
