"""Badges of the README, from pyproject.toml: they need no service, and say what the package says."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.pictures.svg import badge

PROJECT = Path(__file__).resolve().parent.parent.parent / "pyproject.toml"


def badges() -> dict[str, str]:
    """SVG by file name."""
    text = PROJECT.read_text()
    versions = re.findall(r"Python :: (3\.\d+)", text)
    triton = re.search(r'"triton>=([\d.]+),<([\d.]+);', text)
    major, below = triton[2].split(".")
    values = {
        "version": ("version", re.search(r'^version = "(.*)"', text, flags=re.MULTILINE)[1]),
        "python": ("Python", f"{versions[0]} to {versions[-1]}"),
        "triton": ("Triton", f"{triton[1]} to {major}.{int(below) - 1}, stock"),
        "license": ("license", re.search(r'^license = "(.*)"', text, flags=re.MULTILINE)[1]),
        "tests": ("tests", "need no GPU"),
    }
    return {f"badge-{name}.svg": badge(*shown) for name, shown in values.items()}
