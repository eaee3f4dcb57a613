"""Stand-ins for what a launch, a warm-up and an autotuner of Triton give host code."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from weft.errors import NotInterpretable
from weft.simulator.interpreter.port import GridSizes
from weft.triton_api import Autotuner, JITFunction


class Compiled:
    """Stand-in for ``CompiledKernel``: nothing is compiled, so registers and shared memory are assumed.

    n_regs    the most that a thread may have
    metadata  ``shared``: a quarter of a Hopper SM's shared memory, in bytes
    """

    n_regs, n_spills = 255, 0

    def __init__(self, jit_fn: JITFunction, options: dict[str, Any]) -> None:
        warps, stages = options.get("num_warps", 4), options.get("num_stages", 3)
        self.name, self._jit_fn, self._options = jit_fn.__name__, jit_fn, options
        self.metadata = SimpleNamespace(
            name=self.name, shared=57344, num_warps=warps, num_stages=stages, num_ctas=options.get("num_ctas", 1)
        )

    @property
    def asm(self) -> dict[str, str]:
        raise NotInterpretable(
            f"the assembly of kernel {self.name} (asm) is not there: the simulator compiles nothing; leave out what shows it"
        )

    def _init_handles(self) -> None: ...

    def __getitem__(self, grid: GridSizes) -> Callable[..., Compiled]:
        def launch(*args: Any, stream: object = None) -> Compiled:
            return self._jit_fn.run(*args, grid=grid, warmup=False, **self._options)

        return launch


def options_among(jit_fn: JITFunction, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The launch options among a launch's arguments by name."""
    names = {p.name for p in jit_fn.params}
    return {name: value for name, value in kwargs.items() if name not in names}


def run_first_configuration(tuner: Autotuner, *args: Any, **kwargs: Any) -> Compiled:
    """``Autotuner.run`` with the first configuration that pruning leaves: simulated time means nothing."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    config = tuner.best_config = tuner.prune_configs(kwargs)[0]
    if config.pre_hook is not None:
        config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
    result = tuner.fn.run(*args, **kwargs, **config.all_kwargs())
    tuner.nargs = None
    return result
