"""``help`` and ``inspect.signature`` of primitives."""

import inspect
import pydoc

import pytest
import triton

import weft.language as wl
from weft.language import bulk

PRIMITIVES = {name: getattr(wl, name) for name in wl.__all__ if name != "shmem"}
PRIMITIVES |= {
    f"shmem.{name}": member
    for name, member in vars(wl.shmem).items()
    if callable(member) and not name.startswith("_") and member.__module__ == "weft.language.shmem"
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_help_shows_a_primitive_s_own_signature_and_docstring(name):
    primitive = PRIMITIVES[name]
    own = getattr(primitive, "fn", primitive)
    shown = pydoc.render_doc(primitive, renderer=pydoc.plaintext)
    assert f"\n{own.__name__}{inspect.signature(own)}\n" in shown
    assert inspect.signature(primitive) == inspect.signature(own)
    assert primitive.__doc__ == own.__doc__ and own.__doc__.splitlines()[0] in shown
    assert "JITFunction object" not in shown and len(own.__doc__.splitlines()[0]) > 20


def test_a_documented_primitive_is_to_triton_what_it_was():
    """Same type, source and cache key."""
    plain = triton.jit(bulk.put.fn)
    assert isinstance(wl.put, triton.JITFunction) and type(plain) is triton.JITFunction
    assert wl.put.cache_key == plain.cache_key and wl.put.src == plain.src and wl.put.params[5].name == "BLOCK"
    assert type(wl.put).__name__ == "JITFunction"


def test_a_primitive_is_still_an_attribute_of_what_holds_it():
    class Holder:
        primitive = wl.put

    assert Holder().primitive is wl.put and Holder.primitive is wl.put
