"""The built-in model: three layers that add two numbers of up to three digits, `123+456=` -> `579`.

`weft generate` runs it when no model is named, because its answers can be checked. `train.py` made it;
`adder/accuracy.json` has its accuracy on sums that it was not trained on.
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).resolve().parent / "adder"
"""Directory of the checkpoint, in Hugging Face format."""
