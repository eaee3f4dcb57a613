"""The README's Python runs as it stands, as one script in the simulator; what else it names exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_blocks_run(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    script = tmp_path / "readme.py"  # a file: Triton reads a kernel's source from it
    script.write_text("\n\n".join(blocks))
    # Without GPUs, so that it says the same everywhere; and where weft is imported from the checkout, so it is here.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    # Where the README says what is printed, that is what is printed.
    assert done.stdout.strip() == str([[0.0, 1.0, 2.0, 3.0]] * 4)


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.findall(r"^    make (\w[\w-]*)", README + (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    assert named
    assert set(named) <= targets


def test_links_lead_somewhere():
    links = re.findall(r"\[[^\]\n]+\]\((?!http)([^)#\s]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
