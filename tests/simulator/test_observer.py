"""Events of an Observer: a misspelt override would be a method that nothing calls."""

import inspect

import pytest

from weft.check.detector.detector import Detector
from weft.check.detector.happens_before import HappensBefore
from weft.simulator.observer import Observer
from weft.trace.virtual_time import VirtualTime

# Public methods of each observer in weft that are no events.
OTHERS = {
    Detector: {"removed"},
    HappensBefore: {"hold", "host_access", "host_touches", "host_works", "stream", "thread"},
    VirtualTime: {"events", "library_gemm", "time_of"},
}


def parameters(method):
    return [p.replace(annotation=p.empty) for p in inspect.signature(method).parameters.values()]


@pytest.mark.parametrize("kind", OTHERS)
def test_methods_of_observers_are_events_with_equal_parameters(kind):
    public = {name: method for name, method in vars(kind).items() if not name.startswith("_")}
    assert public.keys() - vars(Observer).keys() == OTHERS[kind]
    for name in public.keys() & vars(Observer).keys():
        assert parameters(public[name]) == parameters(getattr(Observer, name)), name


def test_all_observers_in_weft_are_tested():
    kinds = {*Observer.__subclasses__(), *(kind for one in OTHERS for kind in one.__subclasses__())}
    assert {kind for kind in kinds if kind.__module__.startswith("weft.")} == OTHERS.keys()
