"""All exhibits."""

from tests.zoo import (  # noqa: F401  (importing fills it)
    answering,
    attending,
    channels,
    combining,
    copying,
    dated,
    disagreeing,
    experts,
    gathering,
    grids,
    misusing,
    overlapping,
    publishing,
    railing,
    reusing,
    routing,
    staging,
    sticking,
    tiling,
)
from tests.zoo.exhibit import EXHIBITS

__all__ = ["EXHIBITS"]
