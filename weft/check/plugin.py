"""pytest plugin: tests with the fixture ``team`` and the marker ``weft`` run on virtual ranks.

    @pytest.mark.weft(world_size=[2, 4], schedules=20)
    def test_my_kernel(team): ...

The test's body is ``main(team)``: it runs once per rank and schedule, and fails with the report if there are findings. The
marker takes the arguments of ``weft.check``. Other fixtures are made once and shared by all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from weft.check.report import Report
    from weft.runtime.team.team import Team


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "weft(world_size, schedules, ...): run on virtual ranks under many schedules (arguments of weft.check)",
    )


@pytest.fixture
def team(request: pytest.FixtureRequest) -> Any:
    """Placeholder for the rank's team, which each run of the test gets instead."""
    if request.node.get_closest_marker("weft") is None:
        pytest.fail(
            "the fixture 'team' needs the marker: @pytest.mark.weft(world_size=[2, 4], schedules=20)", pytrace=False
        )


def _bound(check: Callable[..., Report], *args: object, **given: object) -> inspect.BoundArguments:
    """Arguments of a call of weft.check. ValueError for ones that it does not take."""
    signature = inspect.signature(check)
    try:
        return signature.bind(*args, **given)
    except TypeError as error:
        raise ValueError(f"marker weft: {error}; it takes {', '.join([*signature.parameters][1:])}") from None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("weft")
    if marker is None:
        return None
    from weft.check.run import check
    from weft.errors import WrongMain
    from weft.runtime.mains import check_main

    function = pyfuncitem.obj
    names = pyfuncitem._fixtureinfo.argnames
    if "team" not in names:
        pytest.fail(f"{pyfuncitem.name} is marked weft but takes no argument 'team'", pytrace=False)
    fixtures = {name: pyfuncitem.funcargs[name] for name in names if name != "team"}

    def main(team: Team) -> Any:
        return function(team=team, **fixtures)

    report, wrong = None, ""
    try:
        check_main(function)
        call = _bound(check, main, *marker.args, **{"script": pyfuncitem.nodeid} | marker.kwargs)
        report = check(*call.args, **call.kwargs)
    except (WrongMain, ValueError) as error:  # of the marker's arguments; what the test raises is a finding
        wrong = str(error)
    if report is None:
        pytest.fail(f"{pyfuncitem.name} cannot be checked: {wrong}", pytrace=False)
    if not report.ok:
        pytest.fail(str(report), pytrace=False)
    return True
