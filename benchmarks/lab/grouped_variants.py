"""Forms of the grouped fp8 GEMMs of a rank's experts on one GPU, by changes to the text of their kernels.

    python -m benchmarks.lab.grouped_variants OUT.json [--tokens 8,32,128,4096] [--held 64]
    for f in "as it is" flattened opaque; do python -m benchmarks.lab.grouped_variants --form "$f" --once /dev/null & done; wait

The second line, run before, compiles all kernels at once.

Qwen3-30B-A3B, rows in fp8, gate-up writes fp8 (benchmarks/fp8_grouped.py). Forms:

    as it is     tiles of few pairs are not flattened into one loop with their steps, nor is any tile that writes fp8: the loop
                 of ``in_one_layout`` is a second one, and Triton flattens none beside another
    flattened    also tiles of few pairs (the second GEMM's)
    opaque       the same, and in place of that loop an empty instruction, so that all are flattened

Each result is compared with that of the kernel as it is: the bits are the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.fp8_grouped import FEATURES, HIDDEN, Problem, experts_weight, timed, written
from weft.kernels import fp8
from weft.ops.local import capabilities_of
from weft.ops.moe.grouped import gemms, kernel
from weft.ops.moe.grouped.gemms import GroupedArguments, GroupedTiles
from weft.ops.moe.grouped.rule import grouped_tiles_for
from weft.runtime.files import put

FLATTEN = ("= not TRANSPOSED and arriving is None", "= arriving is None")
LOOP = (
    "    result = tl.zeros(x.shape, x.dtype)\n    for _ in range(0, tl.num_programs(2)):\n"
    "        result = x\n    return result\n",
    "    bits = x.to(tl.int16, bitcast=True)\n"
    '    bits = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [bits], dtype=tl.int16, is_pure=False, pack=2)\n'
    "    return bits.to(x.dtype, bitcast=True)\n",
)


def changed(module: Any, name: str, *changes: tuple[str, str]) -> Any:
    """The module with changes to its text, as a new module."""
    text = Path(module.__file__).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def kernels() -> dict[str, Any]:
    """Kernels by form."""
    changed(fp8, "opaque_fp8", LOOP)
    opaque = ("from weft.kernels.fp8 import COLUMNS, store_rows", "from opaque_fp8 import COLUMNS, store_rows")
    forms = {
        "as it is": kernel,
        "flattened": changed(kernel, "flattened_kernel", FLATTEN),
        "opaque": changed(kernel, "opaque_kernel", FLATTEN, opaque),
    }
    return {name: module.grouped_matmul_kernel for name, module in forms.items()}


def designs(base: GroupedTiles, gated: bool, block: int) -> list[GroupedTiles]:
    """The rule's design, and ones with more bytes in flight for a program."""
    if block > 64:
        return [base]
    if gated:
        return [base, replace(base, per_sm=1, num_stages=6)]
    return [base, replace(base, num_stages=5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", default="8,32,128,4096")
    parser.add_argument("--held", type=int, default=64)
    parser.add_argument("--form", default="", help="this form alone")
    parser.add_argument("--once", action="store_true", help="run and do not time")
    options = parser.parse_args()
    weights = experts_weight(options.held, 2 * FEATURES, HIDDEN, 0), experts_weight(options.held, HIDDEN, FEATURES, 1)
    forms, rows = kernels(), []
    for tokens in map(int, options.tokens.split(",")):
        p = Problem(tokens, options.held, *weights)
        pairs = int(p.schedules[0].counts.sum())
        for gated in (True, False):
            given = GroupedArguments.of(*((p.rows, p.gate_up) if gated else (p.h, p.down)), p.schedules[0], gated)
            base = grouped_tiles_for(given.call(gated), capabilities_of(p.x.device), gated=gated)
            expected = None
            for design in designs(base, gated, p.block):
                for form, made in forms.items():
                    if options.form not in ("", form):
                        continue
                    gemms.grouped_matmul_kernel = made

                    def call(
                        schedule: Any, gated: bool = gated, given: Any = given, design: Any = design
                    ) -> torch.Tensor:
                        now = given._replace(schedule=schedule)
                        return written(design, now) if gated else gemms.run(design, now)

                    row: dict[str, Any] = {"tokens": tokens, "gemm": "gate_up" if gated else "down", "form": form}
                    row |= {name: getattr(design, name) for name in ("block_n", "per_sm", "num_stages")}
                    try:
                        out = call(p.schedules[0])
                        torch.cuda.synchronize()
                        out = (out.view(torch.uint8) if gated else out.view(torch.int16))[: pairs if gated else None]
                        expected = out.clone() if expected is None else expected
                        row["differ"] = int((out != expected).sum()) if gated else int((out != expected)[:1].sum())
                        row |= {} if options.once else timed(call, p.schedules)
                    except Exception as error:
                        row["failed"] = f"{type(error).__name__}: {str(error)[:150]}"
                    rows.append(row)
                    print(row, flush=True)
                    if not options.once:
                        put(options.out, json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    gemms.grouped_matmul_kernel = kernel.grouped_matmul_kernel


if __name__ == "__main__":
    main()
