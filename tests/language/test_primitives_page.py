"""docs/primitives.md is what the code gives, and its examples run."""

import pytest

import weft
from tests.compiling import compiled
from tests.documents import record_launches
from tests.language import examples, primitives_page

CHECKS = [check for name, check in vars(examples).items() if name.startswith("check_")]


def test_the_page_is_the_generated_one():
    assert primitives_page.lacking() == []
    assert primitives_page.PAGE.read_text() == primitives_page.write(), "run python -m tests.language.primitives_page"


def test_a_primitive_without_an_entry_or_an_example_is_named(monkeypatch):
    monkeypatch.delitem(primitives_page.LOWERINGS, "notify")
    monkeypatch.delattr(examples, "hints")
    monkeypatch.delitem(primitives_page.SHMEM, "fence")
    monkeypatch.delitem(primitives_page.CONSTANTS, "CMP_GE")
    named = [line.partition(":")[0] for line in primitives_page.lacking()]
    assert named == ["CMP_GE", "fence", "notify", "prefetch", "zero_here"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_example_is_right_free_of_races_and_compiles(check, monkeypatch):
    launches = record_launches(monkeypatch)
    report = weft.check(check, [2, 3], schedules=4)
    assert report.ok, str(report)
    assert launches
    for kernel, arguments, constants in launches.values():
        assert compiled(kernel, *arguments, arch="sm_90", **constants).asm


@pytest.mark.gpu(2)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_example_runs_on_gpus(check):
    weft.launch(check, 2, "cuda")
