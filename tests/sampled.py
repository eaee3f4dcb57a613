"""Samples of combinations: ``make test`` runs a part of them, ``make sweep`` all."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

# File -> test -> number of cases that stay, chosen by ``spread``, or texts in the names of the cases that stay.
Samples = dict[str, dict[str, int | tuple[str, ...]]]


def samples(rows: str) -> Samples:
    """Read a file's name at the edge, its tests indented, each with a number or with texts in quotes; "#" begins a comment."""
    found: Samples = {}
    for line in re.sub(r"\|\n +", "| ", rows).splitlines():
        if line.startswith("tests/"):
            found[line] = tests = {}
        elif line.strip() and not line.lstrip().startswith("#"):
            name, _, kept = line.strip().partition(" ")
            tests[name] = tuple(re.findall(r'"([^"]*)"', kept)) or int(kept)
    return found


def sampled(combinations: Iterable[tuple], kept: Callable[..., bool]) -> list[Any]:
    """Parameters of a test; those for which ``kept(*combination)`` is false have the marker ``sweep``."""
    return [pytest.param(*one, marks=() if kept(*one) else pytest.mark.sweep) for one in combinations]


def spread(cases: list[dict[str, Any]], count: int) -> list[int]:
    """Indices of ``count`` of a test's cases, parameters by name: the last, the first, then the ones that add most values.

    Among equals the case farthest from those that are chosen.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    chosen = list(dict.fromkeys((len(cases) - 1, 0)))[:count]
    while len(chosen) < min(count, len(cases)):
        seen = set().union(*(values[index] for index in chosen))
        rest = [index for index in range(len(cases)) if index not in chosen]
        chosen.append(max(rest, key=lambda i: (len(values[i] - seen), min(abs(i - one) for one in chosen), -i)))
    return chosen


def leave_grids_to_the_sweep(items: list[pytest.Item], samples: Samples) -> None:
    """Give the marker ``sweep`` to the cases of ``samples`` that `make test` does not keep."""
    grids: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        file, _, name = item.nodeid.partition("::")
        function = name.partition("[")[0]
        marked = item.get_closest_marker("sweep") or item.get_closest_marker("gpu")
        if function in samples.get(file, ()) and not marked:
            grids.setdefault((file, function), []).append(item)
    for (file, function), cases in grids.items():
        keep = samples[file][function]
        if isinstance(keep, tuple):
            kept = [i for i, case in enumerate(cases) if any(text in case.nodeid.partition("[")[2] for text in keep)]
        else:
            kept = spread([getattr(case, "callspec", None) and case.callspec.params or {} for case in cases], keep)
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker(pytest.mark.sweep)
