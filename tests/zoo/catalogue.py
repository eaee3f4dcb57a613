"""All exhibits."""

from tests.zoo import answering, channels, copying, grids, misusing, overlapping, publishing, reusing, staging, sticking  # noqa: F401  (importing fills it)
from tests.zoo.exhibit import EXHIBITS

__all__ = ["EXHIBITS"]
