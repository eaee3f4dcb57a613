"""Captures of CUDA graphs: no garbage is collected meanwhile, since a graph that is freed then ends the capture."""

import contextlib
import gc
from pathlib import Path

import pytest
import torch

import weft
from weft.runtime import graphs


class Graph:
    """Stands for a torch.cuda.CUDAGraph."""

    def __init__(self, noted):
        self.noted = noted

    def capture_begin(self, *pool, capture_error_mode):
        self.noted.append((pool, capture_error_mode, gc.isenabled()))

    def capture_end(self):
        self.noted.append(gc.isenabled())


@pytest.fixture
def noted(monkeypatch):
    noted = []

    @contextlib.contextmanager
    def of_torch(graph, pool, capture_error_mode):
        graph.capture_begin(pool, capture_error_mode=capture_error_mode)
        yield
        graph.capture_end()

    monkeypatch.setattr(torch.cuda, "graph", of_torch)
    monkeypatch.setattr(graphs, "on_stream", lambda stream: contextlib.nullcontext())
    return noted


SCOPES = {
    "recording": lambda graph: graphs.recording(graph, "a pool"),
    "capturing": lambda graph: graphs.capturing(graph, None, "a pool"),
}


@pytest.mark.parametrize("scope", SCOPES)
def test_no_garbage_is_collected_during_a_capture(scope, noted):
    with SCOPES[scope](Graph(noted)):
        assert not gc.isenabled()
    assert noted == [(("a pool",), "thread_local", False), False] and gc.isenabled()
    with pytest.raises(ZeroDivisionError), SCOPES[scope](Graph(noted)):
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_collection_stays_off_where_it_was_off(noted):
    gc.disable()
    try:
        with graphs.recording(Graph(noted)):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_weft_captures_in_these_scopes_alone():
    package = Path(weft.__file__).parent
    found = [file.relative_to(package) for file in package.rglob("*.py") if "torch.cuda.graph(" in file.read_text()]
    assert found == [Path("runtime/graphs.py")]
