"""The layout's rules, read off the source: imports point downward, and what must live in one place lives there."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "weft").rglob("*.py"))

# From docs/design.md, top first. A file may import from its own layer and from those below it.
LAYERS = (
    "cli",
    "console",
    "serve",
    "engine",
    "text",
    "models",
    "layers",
    "parallel",
    "ops",
    "tiles",
    "costs",
    "plan",
    "transport",
    "kernels",
    "language",
    "runtime",
    "simulator",
    "triton_api",
    "errors",
    "arguments",
    "callable_package",
)
# Beside the cli: they may use everything but it and one another.
BESIDE_CLI = ("bench", "check", "integrations", "tune", "trace", "predict")
# Two exceptions: what is tuned is measured and checked by the harness, not by a second one that may differ from it; and shapes
# are read in one place.
ALONGSIDE = {("tune", "bench"), ("predict", "bench")}
# An engine that is asked to tune at its start loads the search, which measures with the harness.
UPWARD = {("weft/engine/engine.py", "tune")}

ENVIRONMENT_FILE = "weft/runtime/environment.py"
ASSEMBLY_FILES = ("weft/language/lowering/gcn.py", "weft/language/lowering/ptx.py")
TRITON_API = "weft/triton_api.py"
# Packages that load their names on first use; what they import, type checkers alone see.
ON_FIRST_USE = ("weft", "weft.engine", "weft.models")
# Triton's modules that every file may import, the longest name first; also those of triton.language.extra.
TRITON_PUBLIC = (
    "triton.tools.tensor_descriptor", "triton.tools", "triton.language.extra", "triton.language.math", "triton.language",
    "triton",
)  # fmt: skip
# `import weft` must work without them.
SIMULATOR_ONLY = ("greenlet", "ml_dtypes")


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def layer_of(file: Path) -> str:
    """The first part below weft/: "ops" for weft/ops/gemm/persistent.py, "cli" for weft/cli.py."""
    return file.relative_to(ROOT / "weft").parts[0].removesuffix(".py")


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imports(nodes: list[ast.AST], file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, relative ones resolved; `from weft import ops` gives weft.ops."""
    package = name_of(file).removesuffix(".py").split("/")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


class Source(NamedTuple):
    """What these tests ask of a file, of one walk: a parse of all of weft takes seconds.

    imports, internals, calls  (line, text), of `imports`, `internals_of_triton` and `runs_what_it_reads`
    names                      attributes and names, each with the first line
    """

    imports: list[tuple[int, str]]
    internals: list[tuple[int, str]]
    calls: list[tuple[int, str]]
    names: dict[str, int]


@cache
def source_of(file: Path) -> Source:
    nodes = nodes_of(file.read_text())
    names = {name: line for line, name in sorted(attributes_and_names(nodes), reverse=True)}
    return Source(list(imports(nodes, file)), list(internals_of_triton(nodes)), list(runs_what_it_reads(nodes)), names)


def upward(imported: list[tuple[int, str]], file: Path) -> list[str]:
    """Imports of `file` that its layer may not make."""
    here = layer_of(file)
    if here in ("__init__", "__main__"):  # the package's front doors name everything
        return []
    wrong = []
    for line, module in imported:
        parts = module.split(".")
        if parts[0] != "weft" or len(parts) < 2 or parts[1] == here:
            continue
        there = parts[1]
        if there not in LAYERS and there not in BESIDE_CLI:
            allowed = False  # weft itself, or a layer that nobody has placed
        elif here in BESIDE_CLI:
            allowed = there in LAYERS[1:] or (here, there) in ALONGSIDE
        elif here == "cli":
            allowed = True
        else:
            allowed = there in LAYERS and LAYERS.index(there) > LAYERS.index(here)
            allowed = allowed or (name_of(file), there) in UPWARD
        if not allowed:
            wrong.append(f"{name_of(file)}:{line} imports {module}")
    return wrong


def test_every_part_of_weft_has_a_place():
    placed = {*LAYERS, *BESIDE_CLI, "__init__", "__main__"}
    assert {layer_of(file) for file in FILES} <= placed


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_downward(file):
    assert upward(source_of(file).imports, file) == []


def imported_files() -> dict[str, set[str]]:
    """Modules of weft that each imports, late imports and those for types alone included."""
    modules = {name_of(file).removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in FILES}
    found = {}
    for module, file in modules.items():
        named = {name for _, name in source_of(file).imports if module not in ON_FIRST_USE}
        found[module] = {name if name in modules else name.rpartition(".")[0] for name in named} & modules.keys() - {
            module
        }
    return found


def circle(imported: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none if there is no circle."""
    left = dict(imported)
    while ends := [module for module, others in left.items() if not others & left.keys()]:
        for module in ends:
            del left[module]
    path = [next(iter(left))] if left else []
    while path and path[-1] not in path[:-1]:
        path.append(next(iter(left[path[-1]] & left.keys())))
    return path[path.index(path[-1]) :] if path else []


def test_no_imports_in_circles():
    assert circle(imported_files()) == []


def test_a_circle_would_be_seen():
    imported = {"weft.a": {"weft.b"}, "weft.b": {"weft.c"}, "weft.c": {"weft.b"}, "weft.d": set()}
    assert circle(imported) in (["weft.b", "weft.c", "weft.b"], ["weft.c", "weft.b", "weft.c"])


def test_an_upward_import_would_be_seen():
    def seen(source, file="weft/ops/example.py"):
        return upward(list(imports(nodes_of(source), ROOT / file)), ROOT / file)

    assert seen("from weft.layers import TPMLP")
    assert seen("from weft import engine")
    assert seen("def f():\n    import weft.cli")
    assert seen("from ..models import qwen3")
    assert seen("from weft.tune import search", "weft/bench/example.py")
    assert not seen("from weft.language import wait\nfrom . import tiles\nfrom weft.errors import WeftError")


def attributes_and_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, alias.name


@pytest.mark.parametrize(
    ("words", "homes"),
    [
        ({"environ", "environb", "getenv", "putenv"}, (ENVIRONMENT_FILE,)),
        ({"inline_asm_elementwise"}, ASSEMBLY_FILES),
    ],
    ids=["environment", "assembly"],
)
def test_has_its_home(words, homes):
    strays = [
        f"{name_of(file)}:{source_of(file).names[word]} {word}"
        for file in FILES
        if name_of(file) not in homes
        for word in words & source_of(file).names.keys()
    ]
    assert strays == []


def internals_of_triton(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Imports and uses of Triton's modules that are not public, and of private names of public ones."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, f"imports {alias.name}") for alias in node.names if is_internal(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, f"imports {name}") for name in names if is_internal(name))
        elif isinstance(node, ast.Attribute) and root_of(node) in ("tl", "triton"):
            name = re.sub(r"^tl\.", "triton.language.", ast.unparse(node))
            if is_internal(name):
                yield node.lineno, f"uses {name}"


def root_of(node: ast.expr) -> str:
    """The variable `x` of `x.y.z`; "" if there is none."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_internal(name: str) -> bool:
    """Of a dotted name: a module of Triton's that is not public, or a private name below one that is."""
    if name.split(".")[0] != "triton":
        return False
    public = next(module for module in TRITON_PUBLIC if f"{name}.".startswith(f"{module}."))
    below = name.removeprefix(public).split(".")[1:]
    is_private = any(re.match(r"_(?!_)", part) for part in below)
    is_module = bool(below) and isinstance(getattr(importlib.import_module(public), below[0], None), ModuleType)
    return is_private or (is_module and public != "triton.language.extra")


def test_one_file_imports_the_internals_of_triton():
    uses = """
import triton.knobs
from triton.runtime.jit import JITFunction
from triton import knobs
from triton import language, _utils
from triton.language import core
tl.load._x
tl.standard.zeros
triton.runtime.driver
"""
    assert {line for line, _ in internals_of_triton(nodes_of(uses))} == {2, 3, 4, 5, 6, 7, 8, 9}
    public = """
import triton.language as tl
from triton.language.extra import cuda
from triton.language.extra.cuda import gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor
tl.math.exp, tl.load, triton.jit, tl.extra.cuda.libdevice.exp
"""
    assert list(internals_of_triton(nodes_of(public))) == []
    strays = [
        f"{name_of(file)}:{line} {use}"
        for file in FILES
        if name_of(file) != TRITON_API
        for line, use in source_of(file).internals
    ]
    assert strays == []


def test_only_the_simulator_needs_its_packages():
    strays = [
        f"{name_of(file)}:{line} imports {module}"
        for file in FILES
        if layer_of(file) != "simulator"
        for line, module in source_of(file).imports
        if module.split(".")[0] in SIMULATOR_ONLY
    ]
    assert strays == []


def runs_what_it_reads(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Calls by which data from outside may become code: unpickling, and torch's collectives of objects, which unpickle."""
    for node in nodes:
        if isinstance(node, ast.Call):
            last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = ast.unparse(node.func) if last in ("load", "loads", "Unpickler", "eval", "exec") else last
            if (
                name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "eval", "exec", "numpy.load")
                or last.endswith(("gather_object", "_object_list", "send_object"))
                or any(keyword.arg == "allow_pickle" for keyword in node.keywords)
            ):
                yield node.lineno, name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            yield from ((node.lineno, name) for name in names & {"yaml", "dill", "cloudpickle", "marshal", "shelve"})


def test_only_what_a_parent_and_its_own_ranks_send_by_pipe_is_unpickled():
    assert sorted(runs_what_it_reads(nodes_of("torch.load(x)\ndist.all_gather_object(x, y)\nimport yaml"))) == [
        (1, "torch.load"), (2, "all_gather_object"), (3, "yaml"),
    ]  # fmt: skip
    found = [f"{name_of(file)} {call}" for file in FILES for _, call in source_of(file).calls]
    # The groups of weft check give virtual ranks of one process what another one of them has pickled.
    among = ["weft/check/torch_programs/groups.py", "weft/runtime/early.py", "weft/runtime/launch.py"]
    assert sorted(set(found)) == [f"{file} pickle.loads" for file in among]


STAGES = (
    "weft.cli",
    "weft.ops, weft.models, weft.layers, weft.tiles",
    "weft.check.run, weft.engine, weft.bench.harness.compiling",
)


@pytest.fixture(scope="module")
def loaded():
    """Modules after each of STAGES, in one process without the simulator's packages."""
    lines = ["import json, sys", *(f"sys.modules[{name!r}] = None" for name in SIMULATOR_ONLY)]
    for stage in STAGES:
        lines += [f"import {stage}", "print(json.dumps(list(sys.modules)))"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=ROOT, stdout=subprocess.PIPE)
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_what_runs_on_gpus_imports_without_the_simulator_s_packages(loaded):
    assert "triton.runtime.interpreter" not in loaded[-1]


def test_the_help_needs_no_torch(loaded):
    assert not {"torch", "triton", "numpy"} & loaded[0]


def test_ops_models_and_layers_need_no_compiler_of_torch(loaded):
    """Importing torch._dynamo takes as long as importing torch."""
    assert not {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"} & loaded[1]
