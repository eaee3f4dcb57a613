"""Samples of combinations: ``make test`` runs a part of them, ``make sweep`` the others too."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(combinations: Iterable[tuple], kept: Callable[..., bool]) -> list[Any]:
    """Parameters of a test; those for which ``kept(*combination)`` is false have the marker ``sweep``."""
    return [pytest.param(*one, marks=() if kept(*one) else pytest.mark.sweep) for one in combinations]
