"""scripts/reference.py, the API reference: every public name is in it, with a docstring of its own."""

import importlib.util
import inspect
import types
from pathlib import Path

import pytest
import triton

import weft

SCRIPT = Path(__file__).parent.parent / "scripts" / "reference.py"
spec = importlib.util.spec_from_file_location("reference", SCRIPT)
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


# Importing torch's and transformers' tensor parallelism takes seconds.
SLOW = "weft.integrations.torch", "weft.integrations.transformers"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep) if name in SLOW else name for name in reference.MODULES]
)
def test_every_public_name_is_in_the_reference_with_its_docstring(name):
    public, module = reference.public(name), reference.documented(name)
    left_out = {each for each in public if each not in module.__all__}
    packages = {f"{name}.{each}" for each in left_out if isinstance(public[each], types.ModuleType)}
    assert packages <= {*reference.MODULES} and left_out <= {"__version__", *(one.split(".")[-1] for one in packages)}
    assert module.__all__ and inspect.getdoc(module)
    for each in module.__all__:
        value = getattr(module, each)
        assert not isinstance(value, triton.JITFunction), "a primitive is shown as the function that it compiles"
        if inspect.isclass(value) or inspect.isroutine(value):
            assert (value.__doc__ or "").strip(), f"{name}.{each} has no docstring"


def test_the_modules_that_weft_names_have_pages():
    named = {f"weft.{name}" for name in weft.__all__ if isinstance(getattr(weft, name), types.ModuleType)}
    assert named - {"weft.check", "weft.trace"} <= {*reference.MODULES}, "those two are called, and are on weft's page"


def test_docstrings_are_shown_as_they_are():
    assert reference.as_text("a <- ``b``\n  `c`  d & e") == "a &lt;- <code>b</code>\n  <code>c</code>  d &amp; e"


@pytest.mark.sweep
def test_the_pages_have_a_section_for_every_public_name(tmp_path):
    pytest.importorskip("pdoc")
    reference.write(tmp_path)
    for name in reference.MODULES:
        page = (tmp_path / f"{name.replace('.', '/')}.html").read_text()
        assert [each for each in reference.documented(name).__all__ if f'id="{each}"' not in page] == []
