"""Checks of exchanges ask what is found, not by which schedule."""

import pytest


@pytest.fixture(autouse=True)
def _as_found(as_found):
    pass
