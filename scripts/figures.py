"""Size and shape of a tree in figures, so that two trees can be compared.

    python scripts/figures.py [TREE] [--json FILE]

Lines of weft/ by room, and of tests/; what the lines are; kernels of ops/; functions with many parameters or branches; words
that the style asks to use seldom. Only git's files count, and nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MOST_PARAMETERS, MOST_BRANCHES, ALIKE = 8, 15, 20
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert, ast.comprehension, ast.match_case)
# Words for which a sentence is clearer with a noun; the second expression takes names of variables.
DIALECT = re.compile(r"\b(?:others|those|of them|its own|likewise|behind|of \w+ each)\b")
VAGUE = re.compile(r"\b(?:found|mine)\b")


def files(tree: Path, folder: str, suffix: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=tree, capture_output=True, text=True, check=True)
    return [tree / name for name in listed.stdout.splitlines() if name.endswith(suffix) and (tree / name).is_file()]


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for a function that Triton compiles."""
    return any("triton.jit" in ast.unparse(one) or ast.unparse(one) == "jit" for one in function.decorator_list)


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = min((one.lineno for one in function.decorator_list), default=function.lineno)
    return (function.end_lineno or first) - first + 1


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    return sum(one.arg not in ("self", "cls") for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))


def complexity(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """McCabe's: one more than the branches, those of inner functions among them."""
    branches = sum(isinstance(node, BRANCHES) for node in ast.walk(function))
    return 1 + branches + sum(len(node.values) - 1 for node in ast.walk(function) if isinstance(node, ast.BoolOp))


def alike(paths: list[Path]) -> int:
    """Number of places where ALIKE lines in a row stand that also stand elsewhere, without blank lines and imports."""
    seen: Counter[tuple[str, ...]] = Counter()
    windows = []
    for path in paths:
        kept = [line.strip() for line in path.read_text().splitlines()]
        kept = [line for line in kept if line and not line.startswith(("import ", "from ", "#"))]
        of_file = [tuple(kept[at : at + ALIKE]) for at in range(len(kept) - ALIKE + 1)]
        windows.append(of_file)
        seen.update(of_file)
    runs = 0
    for of_file in windows:
        repeated = [seen[window] > 1 for window in of_file]
        runs += sum(now and not before for before, now in zip([False, *repeated], repeated, strict=False))
    return runs


def figures(tree: Path) -> dict[str, int | dict[str, int]]:
    """All figures by name."""
    weft, ops, tests = files(tree, "weft", ".py"), files(tree, "weft/ops", ".py"), files(tree, "tests", ".py")
    pages, engine = files(tree, "docs", ".md"), files(tree, "weft/engine", ".py")
    rooms: Counter[str] = Counter()
    for path in weft:
        inside = path.relative_to(tree / "weft").parts
        rooms[inside[0] if len(inside) > 1 else "top"] += len(path.read_text().splitlines())
    made = [function for path in weft for function in functions(path)]
    host = [function for function in made if not is_kernel(function)]
    text = "\n".join(path.read_text() for path in (*weft, *pages))
    code = "\n".join(path.read_text() for path in weft)
    return {
        "lines of weft/": sum(rooms.values()),
        "lines by room": dict(sorted(rooms.items(), key=lambda item: -item[1])),
        "lines of tests/": lines_of(tests),
        "lines of benchmarks/": lines_of(files(tree, "benchmarks", ".py")),
        "lines of docs/": lines_of(pages),
        "files of weft/": len(weft),
        "files of ops/moe": len([path for path in ops if "moe" in path.relative_to(tree).parts]),
        "files of engine, without engine/speculation": len([one for one in engine if "speculation" not in one.parts]),
        "files of engine/speculation": len([one for one in engine if "speculation" in one.parts]),
        "lines of ops/ that are kernels": sum(length(f) for path in ops for f in functions(path) if is_kernel(f)),
        f"host functions of more than {MOST_PARAMETERS} parameters": sum(parameters(f) > MOST_PARAMETERS for f in host),
        f"host functions of complexity above {MOST_BRANCHES}": sum(complexity(f) > MOST_BRANCHES for f in host),
        "uses of ': Any'": len(re.findall(r": Any\b", code)),
        "files that name all_reduce": sum("all_reduce" in path.read_text() for path in (*weft, *tests)),
        f"runs of {ALIKE} alike lines in ops/": alike(ops),
        "words of the dialect in weft/ and docs/": len(DIALECT.findall(text)),
        "uses of found and mine as names": len(VAGUE.findall(code)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", nargs="?", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    chosen = parser.parse_args()
    found = figures(chosen.tree)
    for name, value in found.items():
        shown = (
            ", ".join(f"{room} {lines:,}" for room, lines in value.items()) if isinstance(value, dict) else f"{value:,}"
        )
        print(f"{name:52} {shown}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
