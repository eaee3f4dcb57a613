"""``Op``: all that weft knows of one op, in one object; the registry of all ops; and how an op becomes a torch op.

    plan = op.plan(call, machine)         # pure and memoised: which design, and why
    out = op.run(plan.design, team, …)    # decides nothing

The command line, ``weft bench``, ``weft tune``, ``weft check``, ``explain`` and the tests go through the registry, so an op is
added by one file that registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from weft.arguments import quoted
from weft.ops.case import Accuracy, Case, Draw, Inputs
from weft.plan import table
from weft.plan.memo import once
from weft.plan.planned import AUTO, Machine, Planned

_LIBRARY = torch.library.Library("weft", "FRAGMENT")
# As torch.library.custom_op tags its ops: known to torch.compile, and called with the strides that were traced.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


class Op:
    """One op. A subclass fills in what is its own; ``register`` makes the one instance known.

    name     of the function in weft.ops, of ``torch.ops.weft.NAME``, and in tables, reports and results
    alias    on the command line, accepted wherever the name is
    designs  the ways to compute it by name, each a frozen dataclass with that design's own fields; the order is that of reports
    sizes    names of the sizes that its plan depends on: ("M", "N", "K"), or ("shape",), the input of each rank; () for an op
             without a plan
    options  names of ``call_of``'s further fields
    dtypes   that it takes; None: any of 1, 2, 4 or 8 bytes
    mutates  names of the tensor arguments that it writes
    internal names of designs that no caller asks for

    algorithms  designs that a caller can ask for; "auto" is the first
    torch_op    ``torch.ops.weft.NAME``, once it is defined
    """

    name: ClassVar[str]
    alias: ClassVar[str]
    designs: ClassVar[Mapping[str, type]] = {}
    sizes: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[tuple[torch.dtype, ...] | None] = None
    mutates: ClassVar[Sequence[str]] = ()
    internal: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        # Plain attributes: torch.compile traces the public functions, which read them.
        self.algorithms = (AUTO, *(name for name in self.designs if name not in self.internal))
        self.torch_op: Any = None

    # --- choosing ----------------------------------------------------------------------------------------------------

    def plan(self, call: Any, machine: Machine) -> Planned:
        """The design of ``call`` on ``machine``, and the reason. ``call.design`` may name one; "auto" chooses.

        Pure: nothing is timed, allocated or sent. The same object for the same arguments.
        """
        return once((self.name, call, machine), lambda: self.choose(call, machine))

    def choose(self, call: Any, machine: Machine) -> Planned:
        """``plan`` without its memory: a row of the table if one decides, else the rule."""
        found = self.tuned(call, machine)
        if found is not None and call.design in (AUTO, found.name):
            return found
        name, reason = self.rule(call, machine)
        if call.design not in (AUTO, name):
            name, reason = call.design, f"asked for design={call.design!r}"
        elif call.design == AUTO:
            reason += self.no_row(call, machine)
        return Planned(name, self.default(name, call, machine), reason)

    def call_of(
        self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO, **fields: bool
    ) -> Any:
        """The call of aligned, contiguous tensors of ``sizes`` (``self.sizes``). ValueError where they do not fit the op."""
        raise NotImplementedError

    def rule(self, call: Any, machine: Machine) -> tuple[str, str]:
        """The name of the design where no row decides, and the reason as a sentence."""
        raise NotImplementedError

    def default(self, name: str, call: Any, machine: Machine) -> Any:
        """The design of this name with the fields that a call gets where no row decides."""
        raise NotImplementedError

    def table_key(self, call: Any, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        """Where rows for ``call`` stand in the tables: (op, shape, world size)."""
        raise NotImplementedError

    def found(self, call: Any, machine: Machine) -> table.Found | None:
        """The row that decides ``call``, if one does."""
        op, shape, world_size = self.table_key(call, machine)
        return table.find(op, shape, call.dtype, world_size, machine.caps)

    def tuned(self, call: Any, machine: Machine) -> Planned | None:
        """The plan of the row that decides ``call``, if one does."""
        found = self.found(call, machine)
        if found is None:
            return None
        return Planned(found.row.design, self.from_row(found.row, call, machine), found.reason, found.row)

    def from_row(self, row: table.Row, call: Any, machine: Machine) -> Any:
        """The design that ``row`` names, with its fields. ValueError where the design's fields have changed since."""
        return row.as_design(self.designs)

    def no_row(self, call: Any, machine: Machine) -> str:
        """Why no row decided, as the end of a sentence."""
        op, shape, world_size = self.table_key(call, machine)
        return table.why_none(op, shape, call.dtype, world_size, machine.caps)

    def check_design(self, design: Any) -> None:
        """ValueError unless ``design`` is one of this op's."""
        if type(design) not in self.designs.values():
            raise ValueError(f"{self.name}: design={quoted(design)} is not one of {', '.join(self.designs)}")

    # --- judging -----------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """This rank's tensors of ``case``, contiguous."""
        raise NotImplementedError

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> Any:
        """The result at ``rank`` of every rank's inputs in plain torch: in fp64, or bit for bit where ``accuracy`` is exact."""
        raise NotImplementedError

    def accuracy(self, case: Case) -> Accuracy:
        """How exact the result is."""
        raise NotImplementedError

    def call(self, case: Case, team: Any, *tensors: torch.Tensor) -> Any:
        """The public function, or ``run`` where ``case.design`` is a design, with the tensors of ``inputs``."""
        raise NotImplementedError

    def cases(self) -> Iterator[Case]:
        """The cases that simulated ranks and GPUs run."""
        return iter(())

    def large_cases(self) -> Iterator[Case]:
        """Cases that only GPUs run: many rounds of a bounded workspace, tiles of full size."""
        return iter(())

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        """Bytes that leave each rank, at least."""
        return 0

    def flops(self, sizes: Sequence[int]) -> int:
        """Floating-point operations of each rank that count: of the GEMM."""
        return 0

    # --- running -----------------------------------------------------------------------------------------------------

    def dispatch(self, *arguments: Any) -> Any:
        """The torch op; ``forward`` at once where torch's dispatcher would add nothing but its time, half of a small op's.

        Gradients, tracing, modes and the profiler need the dispatcher.
        """
        if torch.compiler.is_compiling() or not _is_plain(arguments):
            return self.torch_op(*arguments)
        return self.forward(*arguments)

    def forward(self, *arguments: Any) -> Any:
        """The torch op. Its annotations are the schema; a team travels by its name. Returns new tensors, never an argument."""
        raise NotImplementedError

    def fake(self, *arguments: Any) -> Any:
        """Empty tensors like ``forward``'s results, for tracing."""
        raise NotImplementedError

    # Where gradients are supported: (ctx, inputs, output) and (ctx, *gradients), as of torch.library.register_autograd.
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None

    def refuse_backward(self, ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(f"weft.ops.{self.name} has no backward; use torch's operations where gradients are needed")


def _is_plain(arguments: Sequence[Any]) -> bool:
    """True if the dispatcher has nothing to do for a call: tensors of torch's own type, no gradient asked for, no tracing, no
    mode, no profiler."""
    with_gradients = torch.is_grad_enabled()
    for x in arguments:
        if isinstance(x, torch.Tensor):
            if type(x) not in _PLAIN or (with_gradients and x.requires_grad):
                return False
        elif type(x) is list and not _is_plain(x):
            return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state()
        or torch._C._functorch.peek_interpreter_stack()
        or torch._C._autograd._profiler_enabled()
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OPS: dict[str, Op] = {}


def define(op: Op) -> None:
    """Define ``torch.ops.weft.NAME``.

    A call passes the dispatcher and ``forward``, no more; under autograd torch's own formula wrapper comes before it, and in
    ``torch.inference_mode()`` nothing does. ``torch.library.custom_op`` wraps the kernel several times over (a check that no
    output aliases an input, a guard against Dynamo, a counter of mutations). Its promises to torch.compile are the same.
    """
    schema = torch.library.infer_schema(op.forward, mutates_args=tuple(op.mutates))
    _LIBRARY.define(op.name + schema, tags=_TAGS)
    _LIBRARY.impl(op.name, op.forward, "CompositeExplicitAutograd")
    op.torch_op = getattr(torch.ops.weft, op.name).default
    name = f"weft::{op.name}"
    torch.library.register_fake(name, op.fake, lib=_LIBRARY)
    if op.backward is not None:
        torch.library.register_autograd(name, op.backward, setup_context=op.setup_context, lib=_LIBRARY)
    elif not op.mutates:  # torch takes no formula for an op that writes its arguments, and warns
        torch.library.register_autograd(name, op.refuse_backward, lib=_LIBRARY)


def register(op: Op) -> None:
    """Define the torch op, and put ``op`` into the registry."""
    define(op)
    _OPS[op.name] = op


def registered() -> Iterator[Op]:
    """All ops, in the order in which they were registered."""
    return iter(_OPS.values())


def find_op(name: str) -> Op:
    """The op of this name or alias. ValueError if there is none, with all there are."""
    wanted = name.replace("-", "_") if isinstance(name, str) else ""
    for op in _OPS.values():
        if wanted in (op.name, op.alias.replace("-", "_")):
            return op
    known = ", ".join(f"{op.name} ({op.alias})" if op.alias != op.name else op.name for op in _OPS.values())
    raise ValueError(f"op={quoted(name)} is not one of {known}")
