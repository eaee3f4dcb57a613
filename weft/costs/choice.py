"""Choice of a design by predicted times, with the reason that ``explain`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weft.costs.gpu import Gpu, gpu_of, is_known

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# Times that a reason has, the least first.
SHOWN = 3
# Times over the least one up to which no model tells designs apart: then the first design is taken, with the fewest launches.
CLOSE = 1.03


def chosen(times: Mapping[str, float]) -> str:
    """Name of the first design whose time is close to the least of ``times``."""
    most = CLOSE * min(times.values())
    return next(name for name, time in times.items() if time <= most)


def least(times: Mapping[str, float], caps: Capabilities) -> tuple[str, str]:
    """(name of the ``chosen`` design by ``times`` in µs, the reason as a sentence)."""
    name = chosen(times)
    return name, told(name, times, caps, "in a row")


def told(name: str, times: Mapping[str, float], caps: Capabilities, what: str) -> str:
    """Text for ``explain``: times in µs, that of ``name`` first. what: that takes them."""
    ordered = [name, *sorted(times.keys() - {name}, key=lambda other: times[other])]
    shown = ", ".join(f"{one} {_digits(times[one])}" for one in ordered[:SHOWN])
    return f"predicted µs {what}: {shown}{_whose(gpu_of(caps), caps)}"


def _digits(us: float) -> str:
    return f"{us:.3g}" if us < 999.5 else f"{us:.0f}"


def _whose(gpu: Gpu, caps: Capabilities) -> str:
    """Whose constants these are, where they are not of this GPU, or not measured."""
    if not is_known(caps.device_name):
        return f" (constants of {gpu.gpu}: run weft doctor --measure)"
    return "" if gpu.measured else " (constants of data sheets: run weft doctor --measure)"
