"""Names of symmetric tensors that were made without one, by the kernels' arguments that they are."""

from __future__ import annotations

import re
from dataclasses import replace

from weft.check.detector.findings import Finding, Side
from weft.simulator.machine.grids import Grid
from weft.simulator.machine.memory import Memory

_UNNAMED = re.compile(r"symmetric tensor #\d+")  # Team.empty


class ArgumentNames:
    """Name of each tensor without one: its argument of the first kernel that the lowest rank gives it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._names: dict[str, tuple[int, str]] = {}  # with the rank

    def launched(self, grid: Grid) -> None:
        for tensor in grid.launch.tensors:
            extent = self._memory.find(tensor.data_ptr())
            if extent is None or not _UNNAMED.fullmatch(extent.name) or tensor.data_ptr() not in grid.names:
                continue
            known = self._names.get(extent.name)
            if known is None or grid.rank < known[0]:
                self._names[extent.name] = grid.rank, grid.names[tensor.data_ptr()]

    def named(self, finding: Finding) -> Finding:
        """The finding, with these names in its texts."""

        def text(given: str) -> str:
            return _UNNAMED.sub(lambda match: self._names.get(match[0], (0, match[0]))[1], given)

        def side(given: Side) -> Side:
            return replace(given, sync=text(given.sync), through=text(given.through), ended=text(given.ended))

        return replace(
            finding, message=text(finding.message), tensor=text(finding.tensor), sides=tuple(map(side, finding.sides)),
            detail=tuple(map(text, finding.detail)),
        )  # fmt: skip
