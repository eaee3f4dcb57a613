"""Fixtures of tests of texts: the byte model that tests of the engine have."""

from tests.engine.conftest import byte_model  # noqa: F401
