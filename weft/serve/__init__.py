"""Server of an AsyncLLM over HTTP, with OpenAI's API."""

from __future__ import annotations

from importlib.util import find_spec

from weft.errors import WeftError


def check_packages() -> None:
    """WeftError unless the packages of the extra `serve` are installed."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise WeftError(f'weft serve needs {", ".join(missing)}; install them: pip install "weft[serve]"')
