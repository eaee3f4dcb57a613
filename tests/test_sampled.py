"""The sample of a grid: first, last, most values; its table names tests that exist."""

import re
from pathlib import Path

import pytest

from tests.sampled import samples, spread
from tests.samples import SAMPLES


def test_a_sample_has_the_first_and_the_last_case_and_every_value_that_fits():
    cases = [{"world_size": size, "dtype": dtype} for size in (1, 2, 3) for dtype in ("fp32", "bf16")]
    assert spread(cases, 3) == [5, 0, 2]
    assert spread(cases, 1) == [5]
    assert spread(cases, 0) == []
    assert sorted(spread(cases, 9)) == [0, 1, 2, 3, 4, 5]
    assert spread([{"case": number} for number in range(9)], 4) == [8, 0, 4, 2]


def test_a_table_of_samples_is_read_to_its_last_row():
    rows = 'tests/a.py\n    # Why.\n    test_b 2\n    test_c "x, y" |\n        "-2]"\ntests/d.py\n    test_e 0\n'
    assert samples(rows) == {"tests/a.py": {"test_b": 2, "test_c": ("x, y", "-2]")}, "tests/d.py": {"test_e": 0}}
    with pytest.raises(ValueError, match="no number"):
        samples("tests/a.py\n    test_b no number\n")


def test_every_sampled_grid_exists():
    tests = Path(__file__).parents[1]
    for file, grids in SAMPLES.items():
        source = (tests / file).read_text()
        missing = [name for name in grids if not re.search(rf"^def {name}\(", source, re.MULTILINE)]
        assert not missing, f"{file} has no {missing}: take them out of tests/samples.py, or name what replaced them"
