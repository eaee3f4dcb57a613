"""scripts/bootstrap.py, which `make` runs with whatever Python it finds."""

import importlib.util
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "bootstrap.py"


def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lender(tmp_path, **versions: tuple[str, str]) -> str:
    """An interpreter that has packages of these names: (what the module calls itself, what pip calls it)."""
    site = tmp_path / "site-packages"
    for name, (own, to_pip) in versions.items():
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(f"__version__ = {own!r}\n")
        described = site / f"{name}-{to_pip}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {to_pip}\n")
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    return str(interpreter)


def test_the_version_that_is_lent_is_the_one_that_pip_knows(tmp_path):
    about = bootstrap().probe(lender(tmp_path, torch=("2.13.0+cu130", "2.13.0"), triton=("3.7.1", "3.7.1")))
    assert (about["torch"], about["triton"]) == ("2.13.0", "3.7.1")
    assert str(tmp_path / "site-packages") in about["sites"]
    assert bootstrap().lends(about)


def test_an_older_torch_or_another_triton_is_not_lent(tmp_path):
    for number, (torch, triton) in enumerate([("2.10.1", "3.6.0"), ("2.13.0", "3.5.1"), ("2.13.0", "4.0.0")]):
        place = tmp_path / str(number)
        place.mkdir()
        about = bootstrap().probe(lender(place, torch=(torch, torch), triton=(triton, triton)))
        assert about["torch"] == torch
        assert not bootstrap().lends(about)


def test_every_step_is_announced_before_it_begins(tmp_path, monkeypatch, capsys):
    script = bootstrap()
    done = []

    def step(name, result):
        def take(*arguments, **options):
            done.append((name, capsys.readouterr().out))
            return result

        monkeypatch.setattr(script, name, take)

    about = {"executable": "python3", "version": [3, 12], "torch": None, "triton": None, "sites": []}
    monkeypatch.setattr(script, "MAIN", tmp_path)
    for name, result in {"interpreters": [about], "has_nvidia_gpu": False, "make_venv": None, "pip": True}.items():
        step(name, result)
    script.main_environment(None)
    said = dict(reversed(done))  # before the first call of each
    assert "two to five minutes, and 2 GB" in said["interpreters"]
    assert "installing torch" in said["make_venv"]
    assert [name for name, _ in done].count("pip") == 2 and "installing weft" in done[-1][1]
    assert ". .venv/bin/activate" in capsys.readouterr().out


def test_a_command_that_goes_on_says_so(monkeypatch, capsys):
    script = bootstrap()
    monkeypatch.setattr(script, "BEAT", 0.01)
    assert script.run(sys.executable, "-c", "import time; time.sleep(0.1)")
    assert "weft: ... goes on, 0 s so far" in capsys.readouterr().out
    assert not script.run(sys.executable, "-c", "raise SystemExit(3)")


def test_make_demo_and_make_test_begin_with_a_line():
    """`make -n` prints the commands in their order."""
    for target in ("demo", "test"):
        planned = subprocess.run(["make", "-n", target], cwd=SCRIPT.parent.parent, capture_output=True, text=True)
        lines = [line for line in planned.stdout.splitlines() if not line.startswith("make")]
        assert lines[0].startswith(("echo", "python")) and any("minute" in line for line in lines), planned.stdout
