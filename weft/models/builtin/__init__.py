"""The built-in model: a three-layer Qwen3 that adds two numbers of up to three digits, `123+456=` -> `579`.

It is what `weft generate` runs when no model is named, because its answers can be checked. `train.py` made it and
`adder/accuracy.json` says how well it does on sums it has never seen.
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).resolve().parent / "adder"
"""Directory of the checkpoint, in Hugging Face format."""
