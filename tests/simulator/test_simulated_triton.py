"""docs/simulated-triton.md: every function of tl is called, and the page holds the simulator's answers."""

import pytest
import triton

from tests.simulator import simulated_triton

REMOVED = {"make_block_ptr"}  # Triton 3.9 keeps the name and raises NotImplementedError


def test_every_function_of_tl_has_a_call():
    assert set(simulated_triton.functions()) <= simulated_triton.CALLS.keys()


def test_the_page_is_up_to_date():
    text = simulated_triton.PAGE.read_text()
    if f"Triton {triton.__version__}:" in text:
        assert simulated_triton.page() == text, "run: python -m tests.simulator.simulated_triton"
        return
    # Another Triton: what the page lists and this Triton has runs here too, or is refused too.
    known = [name for name in simulated_triton.functions() if f"`{name}`" in text or f"`tl.{name}`" in text]
    found = simulated_triton.answers({name: simulated_triton.CALLS[name] for name in known if name not in REMOVED})
    assert {name for name, refusal in found.items() if refusal} == {"dot_scaled"}


def test_a_call_that_fails_is_no_refusal():
    with pytest.raises(TypeError):
        simulated_triton.answers({"arange": "tl.arange(0, 16, 16, 16)"})
