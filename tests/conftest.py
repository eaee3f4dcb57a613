"""What all tests share: the `gpu` marker, the choice of tests for another Triton, one CPU thread a worker."""

import contextlib
import functools
import gc
import signal
import zlib

import pytest
import torch

import weft
from tests.sampled import leave_grids_to_the_sweep
from tests.samples import SAMPLES
from weft.runtime import launch

# A shell that starts `make test` in the background has SIGINT ignored, and tests of interrupts would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine drawing three numbers may take a second.
with contextlib.suppress(ImportError):  # machines with GPUs may lack it
    from hypothesis import HealthCheck, settings

    settings.register_profile("weft", suppress_health_check=[HealthCheck.too_slow], deadline=None)
    settings.load_profile("weft")

# Several workers share few cores, and simulated tiles are small: more threads only get in each other's way.
torch.set_num_threads(1)

# Until all tests are collected: nearly all that collecting makes stays.
gc.disable()

TRITON_SENSITIVE = ("tests/simulator/", "tests/language/")
# `make test` compiles each kernel of the ops for sm_90, and every other one for one of these; on another Triton the others, for
# one of all four. `make sweep` compiles the rest.
OTHER_ARCHS = ("sm_80", "sm_100", "gfx942")


def pytest_addoption(parser):
    parser.addoption(
        "--triton-sensitive",
        action="store_true",
        help="only what another Triton may change: tests/simulator, tests/language, the triton_internals marker",
    )

    parser.addoption(
        "--share-gpus", action="store_true", help="tests of more ranks than there are GPUs too: they take turns, slowly"
    )
    parser.addoption(
        "--ahead", action="store_true", help="start the ranks of the next GPU test while one runs (tests/ahead.py)"
    )


@pytest.fixture(scope="session", autouse=True)
def _ranks_ahead(request):
    if not request.config.getoption("--ahead") or not (gpus := torch.cuda.device_count()):
        yield
        return
    from tests.ahead import Ahead

    ahead = Ahead(gpus, launch.RANKS_LOAD, launch.RANKS_LOAD_LATER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "early_processes", ahead.processes)
        yield
    ahead.close()


@pytest.fixture(autouse=True)
def _share_gpus(request, monkeypatch):
    if request.config.getoption("--share-gpus"):
        monkeypatch.setattr(weft, "launch", functools.partial(weft.launch, share_gpus=True))


@pytest.fixture
def as_found(monkeypatch):
    """Findings of kernels that other tests compile: no check takes them to Triton IR, nor looks for simpler schedules.

    Both are looked at in tests/check and tests/zoo; a search for a simpler schedule runs up to 16.
    """
    from weft.check.runner import Runner
    from weft.check.shrinking import Shrinking

    prepare = Runner.__init__
    monkeypatch.setattr(Shrinking, "shrunk", lambda self, entry: entry.replay)
    monkeypatch.setattr(Runner, "__init__", lambda self, *given: prepare(self, *given[:3], compile=False))


def pytest_ignore_collect(collection_path, config):
    """With --triton-sensitive, a file that cannot hold such a test is not even imported."""
    if config.getoption("--triton-sensitive") and collection_path.name.startswith("test_"):
        place = collection_path.relative_to(config.rootpath).as_posix()
        if not place.startswith(TRITON_SENSITIVE) and "triton_internals" not in collection_path.read_text():
            return True
    return None


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(config, items):
    gpus = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = marker.args[0] if marker and marker.args and not config.getoption("--share-gpus") else 1
        if marker and gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {gpus}"))
    if config.getoption("--triton-sensitive"):
        kept = [item for item in items if is_triton_sensitive(item)]
        config.hook.pytest_deselected(items=[item for item in items if not is_triton_sensitive(item)])
        items[:] = kept
    leave_to_the_sweep(items, config.getoption("--triton-sensitive"))
    leave_grids_to_the_sweep(items, SAMPLES)


def pytest_collection_finish(session):
    """Freeze what the collection made: passes of the garbage collector over it are a tenth of the CPU time of tests.

    Passes over what tests make are as much at Python's thresholds (700, 10, 10): a simulation allocates fast.
    """
    gc.freeze()
    gc.set_threshold(10_000, 5, 10)
    gc.enable()


def leave_to_the_sweep(items, on_another_triton):
    """Mark the compilations of ops' kernels that `make test` leaves out, the same ones each time."""
    by_kernel = {}  # test without the GPU's architecture -> (architecture, test)
    for item in items:
        if not item.nodeid.startswith(TRITON_SENSITIVE):
            arch = getattr(item, "callspec", None) and item.callspec.params.get("arch")
            kernel = item.nodeid.replace(arch, "ARCH") if isinstance(arch, str) else item.nodeid
            by_kernel.setdefault(kernel, []).append((arch, item))
    for kernel, alike in by_kernel.items():
        chance = zlib.crc32(kernel.encode())
        left = [item for arch, item in alike if on_another_triton or arch in OTHER_ARCHS]
        if left and chance % 2 == on_another_triton:  # the two environments take different halves
            left.pop(chance // 2 % len(left))
        for item in left:
            item.add_marker(pytest.mark.sweep)


def is_triton_sensitive(item):
    return item.nodeid.startswith(TRITON_SENSITIVE) or item.get_closest_marker("triton_internals") is not None
