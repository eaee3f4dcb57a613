"""Choice of a design by predicted times, with the reason that ``explain`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weft.costs.gpu import Gpu, gpu_of, is_known

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# Times that a reason has, the least first.
SHOWN = 3


def least(times: Mapping[str, float], caps: Capabilities) -> tuple[str, str]:
    """(name of the design with the least of ``times``, in µs, the reason as a sentence)."""
    ordered = sorted(times, key=lambda name: times[name])
    shown = ", ".join(f"{name} {times[name]:.3g}" for name in ordered[:SHOWN])
    return ordered[0], f"predicted µs in a row: {shown}{_whose(gpu_of(caps), caps)}"


def _whose(gpu: Gpu, caps: Capabilities) -> str:
    """Whose constants these are, where they are not of this GPU, or not measured."""
    if not is_known(caps.device_name):
        return f" (constants of {gpu.gpu}: run weft doctor --measure)"
    return "" if gpu.measured else " (constants of data sheets: run weft doctor --measure)"
