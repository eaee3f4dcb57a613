"""The tutorials, followed command by command; what they show is what is printed."""

import os
import subprocess
import sys

import pytest

from tests.documents import TUTORIALS, follow, scripts


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_reader_sees_what_a_tutorial_shows(page, tmp_path):
    follow(page, tmp_path)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_scripts_of_a_tutorial_run_on_gpus(page, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for script in scripts(page, tmp_path):
        done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
