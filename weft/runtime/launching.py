"""Launches of compiled kernels without the look-up that Triton makes at every call.

``kernel[grid](*arguments)`` binds all arguments by name, describes each and hashes the description: 20 to 25 us of host time on
a host of H200s, more than the kernel itself takes for small messages. A ``Launch`` keeps the compiled kernels of one kernel and
one set of constants, by the few properties of its arguments that Triton specialises on, and calls them directly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import _C

from weft.runtime.team.view import TeamView
from weft.triton_api import CompiledKernel, JITFunction, knobs, launcher_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Triton's own launch. The simulator, and `weft tune` where it only compiles, replace it.
_TRITON_RUN = JITFunction.run
_HOOKS = knobs.runtime


class Launch:
    """A kernel with the values of its constexpr parameters and its compiler options.

    kernel     a ``@triton.jit`` function whose constexpr parameters come last
    constants  constexpr parameters and compiler options by name, as ``kernel[grid](…, **constants)`` takes them; a parameter
               that has a default may be left out
    fixed      arguments that are the same in every call; they come after the first ``before`` arguments

    The first call with arguments of a kind goes through Triton, which compiles; later ones launch the compiled kernel. Where
    ``JITFunction.run`` has been replaced (simulated ranks), every call goes through it.
    """

    __slots__ = ("_addresses", "_before", "_compiled", "_constants", "_constexprs", "_fixed", "_kernel")

    def __init__(
        self, kernel: JITFunction, constants: Mapping[str, Any], fixed: tuple[Any, ...] = (), before: int = 0
    ) -> None:
        self._kernel, self._constants, self._fixed, self._before = kernel, dict(constants), fixed, before
        # Triton's launcher, which a kept kernel is given to, knows no defaults.
        self._constexprs = tuple(
            constants.get(p.name, p.default)
            for p in kernel.params
            if p.is_constexpr and (p.name in constants or p.has_default)
        )
        self._addresses = _with_addresses(fixed)
        self._compiled: dict[tuple, tuple[CompiledKernel, Callable[..., None], tuple]] = {}

    def __call__(self, programs: int | tuple[int, int], *varying: object) -> None:
        """Run ``programs`` programs, or a grid, on the current stream.

        ``varying``: arguments that are neither constexpr nor fixed.
        """
        before = self._before
        if JITFunction.run is _TRITON_RUN:
            kind: list[Any] = []
            given = _describe(varying, kind)
            ready = self._compiled.get(tuple(kind))
            if ready is not None:
                compiled, run, head = ready
                width, height = (programs, 1) if type(programs) is int else programs
                stream = _C._cuda_getCurrentRawStream(_C._cuda_getDevice())
                if is_profiled():
                    arguments = (*varying[:before], *self._fixed, *varying[before:], *self._constexprs)
                    compiled[(width, height, 1)](*arguments, stream=stream)
                else:
                    arguments = (*given[:before], *self._addresses, *given[before:], *self._constexprs)
                    run(width, height, 1, stream, *head, *arguments)
                return
        grid = programs if isinstance(programs, tuple) else (programs,)
        arguments = (*varying[:before], *self._fixed, *varying[before:])
        made = self._kernel[grid](*arguments, **self._constants)
        if isinstance(made, CompiledKernel) and JITFunction.run is _TRITON_RUN:
            self._compiled[tuple(kind)] = made, *launcher_of(made)

    def of_pair(self, programs: int, number: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """``self(programs, x, out, number)`` as a function of x and out, whose dtypes stay; fewer look-ups."""
        before, constexprs, addresses = self._before, self._constexprs, self._addresses
        launchers: dict[int, tuple[Callable[..., None], tuple]] = {}

        def call(x: torch.Tensor, out: torch.Tensor) -> None:
            given = x.data_ptr(), out.data_ptr(), number
            alignment = (given[0] & 15) << 4 | (given[1] & 15)
            ready = launchers.get(alignment)
            if ready is not None and JITFunction.run is _TRITON_RUN and not is_profiled():
                run, head = ready
                stream = _C._cuda_getCurrentRawStream(_C._cuda_getDevice())
                run(programs, 1, 1, stream, *head, *given[:before], *addresses, *given[before:], *constexprs)
                return
            self(programs, x, out, number)
            kind: list[Any] = []
            _describe((x, out, number), kind)
            if (compiled := self._compiled.get(tuple(kind))) is not None:
                launchers[alignment] = compiled[1:]

        return call


def is_profiled() -> bool:
    """True if a profiler has hooks that Triton calls at every launch."""
    return bool(_HOOKS.launch_enter_hook.calls or _HOOKS.launch_exit_hook.calls)


def _with_addresses(arguments: tuple) -> tuple:
    """``arguments`` with the address of each tensor in its place."""
    return tuple(
        x.data_ptr() if isinstance(x, torch.Tensor) else _with_addresses(x) if isinstance(x, tuple) else x
        for x in arguments
    )


def _describe(arguments: tuple, kind: list[Any]) -> list[Any]:
    """Append to ``kind`` the properties of arguments for which Triton may compile another kernel.

    Returns the arguments with the address of each tensor in its place, for which Triton's launcher would ask the tensor and the
    driver. The properties are dtypes, the alignment of pointers, and of integers whether they are 1, a multiple of 16, of 64
    bits, unsigned or bools. A team's view is the same at every call, but for its rings while it is traced.
    """
    given: list[Any] = []
    for x in arguments:
        of = type(x)
        if of is torch.Tensor:
            address = x.data_ptr()
            kind += (x.dtype, address & 15)
            given.append(address)
            continue
        if of is int:
            if -(2**31) <= x < 2**31:
                kind.append(1 if x == 1 else 16 * (x & 15 == 0))
            else:
                kind.append((32 if x < 2**63 else 64) + 16 * (x & 15 == 0))
        elif of is TeamView:
            kind.append(x.trace is None)
        elif of is tl.constexpr:
            kind += (of, type(x.value), x.value)
        elif of is bool:  # not 1 or 0: a kernel for i1 keeps only the lowest bit of an integer
            kind += (of, x)
        elif of is float:
            kind.append(of)
        elif x is None:
            kind.append(None)
        elif isinstance(x, tuple):
            kind.append(~len(x))  # unlike any integer's
            x = tuple(_describe(x, kind))
        elif isinstance(x, torch.Tensor):  # a parameter
            kind += (x.dtype, x.data_ptr() & 15)
            x = x.data_ptr()
        elif isinstance(x, float):  # NumPy's float64
            kind.append(float)
        else:  # a tensor descriptor, whose base is aligned
            kind += (x.base.dtype, *x.block_shape)
        given.append(x)
    return given


def launch_of(team: Team, kernel: JITFunction, key: Hashable, constants: Callable[[], Mapping[str, Any]]) -> Launch:
    """The team's ``Launch`` of ``kernel`` under ``key``, which identifies its ``constants()``."""
    launches = team.workspace("launches", dict)
    # By name: hashing a JITFunction walks all that it calls.
    launch = launches.get(at := (kernel.__name__, key))
    if launch is None:
        launch = launches[at] = Launch(kernel, constants())
    return launch


_ON_DEVICES: dict[tuple[torch.device, int, Hashable], Launch] = {}


def launch_on(
    device: torch.device, kernel: JITFunction, key: Hashable, constants: Callable[[], Mapping[str, Any]]
) -> Launch:
    """The ``Launch`` of ``kernel`` on ``device``, for ops without a team; else like ``launch_of``."""
    # By identity, which the Launch keeps alive: kernels of the same name may differ.
    launch = _ON_DEVICES.get(at := (device, id(kernel), key))
    if launch is None:
        launch = _ON_DEVICES[at] = Launch(kernel, constants())
    return launch


def forget_launches_on(kind: str) -> None:
    """Drop the launches on devices of this kind, whose constants are of the GPU that ranks planned as."""
    for at in [at for at in _ON_DEVICES if at[0].type == kind]:
        del _ON_DEVICES[at]
