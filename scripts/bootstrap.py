"""Make the environments of `make demo` and `make test`. Standard library only; any Python from 3.8 may run it.

Every step is announced before it begins, with what it takes, and says every 15 seconds that it goes on: pip itself is silent.

    bootstrap.py main     .venv          weft, its tests' packages, and torch + Triton by the rules below
    bootstrap.py newest   .venv-newest   the newest Triton 3.x and a NumPy before 2.4 in front of what .venv has

Torch and Triton come from, in this order:

1. an interpreter that has both already (a GPU machine's image, a container): they are used, not installed again;
2. on a machine with an NVIDIA GPU, PyPI: the CUDA build;
3. otherwise the CPU build and nothing larger: `torch==2.13.0+cpu` from wherever pip is configured to look, then from
   PyTorch's own index of CPU builds. Plain `torch` on PyPI is the CUDA build for Linux, so it is never asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAIN = ROOT / ".venv"
NEWEST = ROOT / ".venv-newest"

SUPPORTED = ((3, 13), (3, 12), (3, 11), (3, 10))
TORCH = "2.13.0"  # the CPU build that CI has
TRITON = "3.6.0"  # the oldest supported; CPU builds of torch bring none
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BEAT = 15.0  # seconds between two lines of a command that goes on

# Prints what an interpreter is and where it has torch and Triton, if it has both.
PROBE = """
import json, sys
found = {"version": sys.version_info[:2], "executable": sys.executable, "torch": None, "triton": None}
try:
    import ensurepip, venv
    found["venv"] = True
except ImportError:
    found["venv"] = False
try:
    import torch, triton
    from importlib.metadata import version
    # Not torch.__version__: PyPI's wheel calls itself 2.13.0+cu130 there and 2.13.0 to pip, which is told this one.
    found.update(torch=version("torch"), triton=version("triton"))
except Exception:
    pass
found["sites"] = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
print(json.dumps(found))
"""


def say(line: str) -> None:
    print(f"weft: {line}", flush=True)


def run(*command: object, quiet: bool = False) -> bool:
    """Run a command to its end, with a line now and then while it goes on; True where it succeeded."""
    sink = subprocess.DEVNULL if quiet else None
    arguments, began = [str(part) for part in command], time.monotonic()
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, cwd=str(ROOT)) as process:
        while True:
            try:
                return process.wait(timeout=BEAT) == 0
            except subprocess.TimeoutExpired:
                say(f"... goes on, {time.monotonic() - began:.0f} s so far")


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def pip(environment: Path, *arguments: str, quiet: bool = False) -> bool:
    # Twice quiet: errors only, no remarks about root, caches or sources that lack a package.
    options = ("--quiet", "--quiet", "--disable-pip-version-check", "--no-input", "--no-warn-script-location")
    return run(python_of(environment), "-m", "pip", "install", *options, *arguments, quiet=quiet)


def probe(interpreter: str) -> dict | None:
    """What `interpreter` is, or None if it does not start (a pyenv shim of a version that is not selected, say)."""
    try:
        done = subprocess.run(
            [interpreter, "-c", PROBE], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        return json.loads(done.stdout.decode().strip().splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, ValueError, IndexError):
        return None


def interpreters(chosen: str | None) -> list[dict]:
    """The usable interpreters, newest first; the one that was asked for alone, where one was."""
    names = [chosen] if chosen else ["python3"] + [f"python{major}.{minor}" for major, minor in SUPPORTED]
    # An activated .venv must not be asked to rebuild itself.
    places = os.pathsep.join(place for place in os.get_exec_path() if not place.startswith(str(ROOT)))
    found = {}
    for name in names:
        path = shutil.which(name, path=places)
        about = probe(path) if path else None
        if about and about["venv"] and tuple(about["version"]) in SUPPORTED:
            found.setdefault(about["executable"], about)
    if not found:
        asked = f"{chosen} is not" if chosen else "there is no python3 that is"
        sys.exit(f"weft: {asked} Python 3.10 to 3.13 with venv; install one (Debian: apt install python3-venv)")
    # Stable: of two interpreters of one version, `python3` itself stays first.
    return sorted(found.values(), key=lambda about: tuple(about["version"]), reverse=True)


def has_nvidia_gpu() -> bool:
    if Path("/proc/driver/nvidia/version").exists():
        return True
    tool = shutil.which("nvidia-smi")
    return bool(tool) and run(tool, "-L", quiet=True)


def numbers(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def lends(about: dict) -> bool:
    """Whether this interpreter has a torch and a Triton that weft supports."""
    if not about["torch"] or not about["triton"]:
        return False
    return numbers(about["torch"]) >= (2, 11) and (3, 6) <= numbers(about["triton"]) < (3, 10)


def make_venv(environment: Path, interpreter: str) -> None:
    if not run(interpreter, "-m", "venv", "--clear", environment):
        sys.exit(f"weft: {interpreter} -m venv {environment} failed; see above")


def borrow(environment: Path, sites: list[str]) -> None:
    """Let `environment` see the packages in `sites`, behind its own; a lender may be a virtual environment."""
    own = next((environment / "lib").glob("python3*/site-packages"))
    lines = "".join(f"import site; site.addsitedir({site!r})\n" for site in sites)
    (own / "weft_borrowed.pth").write_text(lines)


def install_cpu_torch(environment: Path) -> str | None:
    """Install the CPU build; returns where it came from, or None."""
    # macOS has only CPU builds, and they carry no "+cpu".
    wanted = f"torch=={TORCH}" if sys.platform == "darwin" else f"torch=={TORCH}+cpu"
    if pip(environment, wanted, quiet=True):
        return "pip's own sources"
    if pip(environment, "--retries", "1", "--timeout", "30", "--extra-index-url", CPU_INDEX, wanted, quiet=True):
        return CPU_INDEX
    return None


def provide_torch(candidates: list[dict]) -> list[str]:
    """Make .venv with torch in it, saying how. Returns the versions that pip must then leave alone."""
    lender = next((about for about in candidates if lends(about)), None)
    if lender:
        say(f"{lender['executable']} has torch {lender['torch']} and Triton {lender['triton']}: using them")
        make_venv(MAIN, lender["executable"])
        borrow(MAIN, lender["sites"])
        return [f"torch=={lender['torch']}", f"triton=={lender['triton']}"]
    if has_nvidia_gpu():
        say(f"{candidates[0]['executable']}, an NVIDIA GPU and no torch: the CUDA build from PyPI, several GB")
        make_venv(MAIN, candidates[0]["executable"])
        return []
    for about in candidates:
        say(f"{about['executable']}, no GPU: installing torch {TORCH} for the CPU, a download of about 200 MB")
        make_venv(MAIN, about["executable"])
        source = install_cpu_torch(MAIN)
        if source:
            say(f"torch {TORCH} came from {source}")
            return [f"triton=={TRITON}"] if sys.platform.startswith("linux") else []
    tried = ", ".join("{}.{}".format(*about["version"]) for about in candidates)
    sys.exit(
        f"weft: no GPU here, and no CPU build of torch {TORCH} for Python {tried} in pip's sources or at {CPU_INDEX}; "
        "install one into an interpreter yourself and run make PYTHON=that-interpreter"
    )


def main_environment(chosen: str | None) -> None:
    say(
        "making .venv: two to five minutes, and 2 GB of disk unless this Python has torch already; later runs begin at once"
    )
    record = MAIN / ".torch.json"
    if chosen is None and record.exists() and probe(str(python_of(MAIN))):
        told = json.loads(record.read_text())  # pyproject.toml changed: torch stays
    else:
        told = provide_torch(interpreters(chosen))
        record.write_text(json.dumps(told))
    say("installing weft, Triton and its tests' packages into .venv, a download of about 400 MB")
    if not pip(MAIN, "--editable", ".[sim,dev]", *told):
        sys.exit("weft: pip could not install weft; see above")
    (MAIN / ".ready").touch()
    say(".venv is ready; `. .venv/bin/activate` puts its weft and its python into this shell")


def newest_environment() -> None:
    say("making .venv-newest, with the newest Triton 3.x and a NumPy before 2.4: about a minute; the rest is .venv's")
    about = probe(str(python_of(MAIN)))
    if about is None:
        sys.exit("weft: .venv does not work; run make clean and try again")
    make_venv(NEWEST, str(python_of(MAIN)))
    # --no-deps, and before borrowing: pip must neither fetch a second torch nor find .venv's Triton good enough.
    if not pip(NEWEST, "--no-deps", "triton>=3.6,<4", "numpy>=1.26,<2.4"):
        sys.exit("weft: pip could not install the newest Triton; see above")
    borrow(NEWEST, about["sites"])
    (NEWEST / ".ready").touch()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("environment", choices=("main", "newest"))
    arguments.add_argument("--python", help="the interpreter to use for .venv")
    options = arguments.parse_args()
    if options.environment == "main":
        main_environment(options.python)
    else:
        newest_environment()


if __name__ == "__main__":
    main()
