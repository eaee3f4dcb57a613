"""Types of the public names: what type checkers are told is what is there. `make lint` has mypy read tests/typed_program.py."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import weft
from tests.test_reference import SLOW, reference

# Types in kernels are the compiler's.
KERNELS = "weft.language", "weft.language.shmem"
HOST = [name for name in reference.MODULES if name not in (*KERNELS, *SLOW)]
LAZY = {"weft": "_EXPORTS", "weft.engine": "_MODULES", "weft.models": "_PLACES"}


@pytest.mark.parametrize("module", LAZY)
def test_names_that_are_loaded_on_first_use_are_what_type_checkers_see(module):
    package = importlib.import_module(module)
    tree = ast.parse(Path(package.__file__).read_text())
    [seen] = [node for node in tree.body if isinstance(node, ast.If)]
    names = {}
    for node in seen.body:
        if isinstance(node, ast.ImportFrom):
            source = importlib.import_module(node.module)
            for alias in node.names:
                names[alias.name] = getattr(source, alias.name, None) or importlib.import_module(
                    f"{node.module}.{alias.name}"
                )
        else:  # former names
            names |= dict.fromkeys(each.id for each in node.targets[0].elts)
    assert names.keys() == {*getattr(package, LAZY[module])} == {*package.__all__} - {"__version__"}
    for name, value in names.items():
        at_run_time = getattr(package, name)
        assert value is None or value is at_run_time or value is getattr(at_run_time, name)  # weft.check and weft.trace


@pytest.mark.parametrize("module", HOST)
def test_public_functions_of_the_host_have_types(module):
    bare = []
    for name, value in reference.public(module).items():
        members = vars(value).items() if inspect.isclass(value) else [(name, value)]
        for member, function in members:
            if not inspect.isfunction(function) or member.startswith("_") and member != "__init__":
                continue
            signature = inspect.signature(function)
            given = [each.annotation for each in signature.parameters.values() if each.name not in ("self", "cls")]
            if inspect.Signature.empty in (*given, signature.return_annotation):
                bare.append(f"{module}.{name}: {member}")
    assert bare == []


def test_the_package_says_that_it_has_types():
    assert (Path(weft.__file__).parent / "py.typed").exists()
