"""Stand-ins for what a launch, a warm-up and an autotuner of Triton give host code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import triton

from weft.errors import NotInterpretable
from weft.simulator.interpreter.port import GridSizes
from weft.simulator.interpreter.stand_ins import StaticAssertionFailed
from weft.triton_api import Autotuner, JITFunction


class Compiled:
    """Stand-in for ``CompiledKernel``: nothing is compiled, so registers and shared memory are assumed.

    n_regs    the most that a thread may have if one program fills an SM
    metadata  ``shared``: a quarter of a Hopper SM's shared memory, in bytes
    """

    n_spills = 0

    def __init__(self, jit_fn: JITFunction, options: dict[str, Any]) -> None:
        warps, stages = options.get("num_warps", 4), options.get("num_stages", 3)
        self.n_regs = min(255, 65536 // (32 * warps))
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
    """``Autotuner.run`` with the first configuration that pruning leaves and that compiles.

    Simulated time means nothing. A single configuration is not pruned, as in Triton.
    """
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    if len(tuner.configs) == 1:
        result = _run_configuration(tuner, tuner.configs[0], args, kwargs)
    else:
        key = _key(tuner, {**tuner.nargs, **kwargs})
        known = tuner.cache.get(key)
        result = (
            _run_configuration(tuner, known, args, kwargs) if known else _first_that_compiles(tuner, key, args, kwargs)
        )
    tuner.nargs = None
    return result


def _first_that_compiles(tuner: Autotuner, key: tuple, args: tuple, kwargs: dict[str, Any]) -> Compiled:
    *earlier, last = tuner.prune_configs(kwargs)
    for config in earlier:
        with suppress(StaticAssertionFailed):
            return _choose(tuner, key, config, args, kwargs)
    return _choose(tuner, key, last, args, kwargs)


def _choose(tuner: Autotuner, key: tuple, config: triton.Config, args: tuple, kwargs: dict[str, Any]) -> Compiled:
    tuner.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()}, reset_only=True)
    result = _run_configuration(tuner, config, args, kwargs)
    tuner.cache[key] = config
    return result


def _run_configuration(tuner: Autotuner, config: triton.Config, args: tuple, kwargs: dict[str, Any]) -> Compiled:
    tuner.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
    return tuner.fn.run(*args, **kwargs, **config.all_kwargs())


def _key(tuner: Autotuner, given: dict[str, Any]) -> tuple:
    """Triton's key of a choice: the values of ``key=``, then the dtypes of the tensors."""
    named = {name: value for name, value in given.items() if name in tuner.arg_names}
    values = [named[name] for name in tuner.keys if name in named]
    return (*values, *(str(value.dtype) for value in named.values() if hasattr(value, "dtype")))
