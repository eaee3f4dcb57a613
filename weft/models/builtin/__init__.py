"""Built-in models: three layers that add two numbers of up to three digits, `123+456=` -> `579`.

`adder` is dense, and `weft generate` runs it when no model is named, because its answers can be checked. `adder-moe` has 8
experts in place of each MLP, two for each token. `scripts/train_builtin.py` made both; `accuracy.json` has the accuracy of each
on sums that it was not trained on.
"""

from __future__ import annotations

from pathlib import Path

PATHS = {name: Path(__file__).resolve().parent / name for name in ("adder", "adder-moe")}
"""Name of a built-in model -> directory of its checkpoint, in Hugging Face format."""
PATH = PATHS["adder"]
"""The one that runs when no model is named."""
