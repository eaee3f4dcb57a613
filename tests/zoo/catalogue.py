"""All exhibits."""

from tests.zoo import answering, misusing, publishing, reusing, staging, sticking  # noqa: F401  (importing fills the list)
from tests.zoo.exhibit import EXHIBITS

__all__ = ["EXHIBITS"]
