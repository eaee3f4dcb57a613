"""Build the wheel and the source distribution, and install each into clean environments on each supported Python that is here.

    python scripts/package_check.py                 # `make sweep` runs it
    python scripts/package_check.py --with-torch    # pip installs torch and Triton too: gigabytes, where pip has no CPU build

Of each environment:

without torch   pip installs the file alone, then its dependencies but torch and Triton: `import weft`, its version and entry
                points; all files of weft/ that git has; `weft --version` and `weft --help`
with torch      where this interpreter has torch, the environment of its version borrows torch and Triton from it:
                examples/hello.py on virtual ranks, and an answer of the built-in model

A Python that is missing is named, and fails nothing. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
MOST_BYTES = 3_000_000  # of the wheel
LARGE = ("torch", "triton")
BUILD = "from setuptools import build_meta as b; b.build_sdist({0!r}); b.build_wheel({0!r})"
BARE = """
import sys, weft
from importlib.metadata import distribution, version
assert weft.__file__.startswith(sys.prefix), weft.__file__
assert version("weft") == weft.__version__, (version("weft"), weft.__version__)
groups = {each.group for each in distribution("weft").entry_points}
assert groups == {"console_scripts", "pytest11", "vllm.general_plugins", "sglang.srt.plugins"}, groups
"""


class Failed(Exception):
    """A check that did not hold."""


def run(*command: object, cwd: Path) -> str:
    """Output of a command, run without the caller's Python settings. Failed where its status is not 0."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def pythons() -> dict[str, str]:
    """Interpreter of each supported version: this one, else one of the path, else one of pyenv's."""
    found = {"{}.{}".format(*sys.version_info): sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in SUPPORTED:
        candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
        for candidate in filter(None, candidates):
            probe = "import ensurepip, sys, venv; print('{}.{}'.format(*sys.version_info))"
            answer = subprocess.run([candidate, "-c", probe], capture_output=True, text=True)
            if answer.stdout.strip() == version:
                found.setdefault(version, str(candidate))
    return {version: found[version] for version in SUPPORTED if version in found}


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution of what git has, in ``folder``."""
    source, place = folder / "source", folder / "dist"
    for name in tracked("."):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    python = environment(folder / "build", sys.executable)
    requires = re.search(r'^requires = \["(.*)"\]', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)[1]
    run(python, "-m", "pip", "install", "--quiet", requires, cwd=folder)
    place.mkdir()
    run(python, "-c", BUILD.format(str(place)), cwd=source)
    return next(place.glob("*.whl")), next(place.glob("*.tar.gz"))


@cache  # as of the build, whatever happens to the checkout meanwhile
def tracked(folder: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def environment(place: Path, interpreter: str) -> Path:
    """A new virtual environment's interpreter."""
    run(interpreter, "-m", "venv", place, cwd=place.parent)
    return place / "bin" / "python"


def check_wheel(wheel: Path) -> None:
    """Its size, and that it holds what git has of weft/ and nothing else."""
    size = wheel.stat().st_size
    if size > MOST_BYTES:
        raise Failed(f"{wheel.name} has {size} bytes, more than {MOST_BYTES}; leave data out, or raise MOST_BYTES")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if missing := sorted({*tracked("weft")} - names):
        raise Failed(f"{wheel.name} lacks {missing}; name them in pyproject.toml's package-data")
    if more := sorted(names - {*tracked("weft")}):
        raise Failed(f"{wheel.name} has {more}, which git does not")
    print(f"{wheel.name}: {size / 1e6:.2f} MB, {len(names)} files", flush=True)


def check_without_torch(python: Path, file: Path, folder: Path) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", file, cwd=folder)
    run(python, "-c", BARE, cwd=folder)  # `import weft` needs no other package
    listed = "from importlib.metadata import requires; print('\\n'.join(requires('weft')))"
    needed = [line for line in run(python, "-c", listed, cwd=folder).splitlines() if "extra ==" not in line]
    small = [line for line in needed if re.split(r"\W", line)[0] not in LARGE]
    run(python, "-m", "pip", "install", "--quiet", *small, cwd=folder)
    place = Path(run(python, "-c", "import weft; print(weft.__path__[0])", cwd=folder).strip()).parent
    if lacking := [name for name in tracked("weft") if not (place / name).is_file()]:
        raise Failed(f"{file.name}, installed, lacks {lacking}")
    for flag in ("--version", "--help"):
        run(python.parent / "weft", flag, cwd=folder)


def check_with_torch(python: Path, folder: Path, borrowed: bool) -> None:
    if borrowed:
        sites = [site for site in sys.path if site.endswith(("site-packages", "dist-packages"))]
        own = next((python.parent.parent / "lib").glob("python3*/site-packages"))
        # After what is installed: addsitedir appends, and reads the .pth files there, by which a lender borrows itself.
        (own / "borrowed.pth").write_text("".join(f"import site; site.addsitedir({site!r})\n" for site in sites))
    else:
        run(python, "-m", "pip", "install", "--quiet", "weft[sim]", cwd=folder)
    run(python, "-c", BARE, cwd=folder)
    shutil.copy(ROOT / "examples" / "hello.py", folder)
    if "[0.0, 1.0, 2.0, 3.0]" not in (said := run(python, "hello.py", cwd=folder)):
        raise Failed(f"hello.py says:\n{said}")
    answer = run(python.parent / "weft", "generate", "--prompt", "123+456=", "--world-size", "2", cwd=folder)
    if "579" not in answer:
        raise Failed(f"weft generate says:\n{answer}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with-torch", action="store_true", help="let pip install torch and Triton on every Python")
    options = parser.parse_args()
    present = pythons()
    own = "{}.{}".format(*sys.version_info)
    has_torch = subprocess.run([sys.executable, "-c", "import torch, triton"], capture_output=True).returncode == 0
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = build(folder)
        check_wheel(wheel)
        for version, interpreter in present.items():
            place = folder / version
            place.mkdir()
            lends = has_torch and version == own
            try:
                python = environment(place / "environment", interpreter)
                for file in (wheel, sdist):
                    check_without_torch(python, file, place)
                if options.with_torch or lends:
                    check_with_torch(python, place, borrowed=not options.with_torch)
                how = "with and without torch" if options.with_torch or lends else "without torch"
                print(f"Python {version}: wheel and sdist pass, {how}", flush=True)
            except Failed as error:
                failures += 1
                print(f"Python {version}: failed\n{error}", flush=True)
            shutil.rmtree(place)
    if missing := [version for version in SUPPORTED if version not in present]:
        print(f"not here, so not checked: Python {', '.join(missing)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
