"""``Op``, the object of one op, with the registry of all ops and their definition as torch ops.

    plan = op.plan(call, machine)         # pure and memoised: which design, and why
    out = op.run(plan.design, team, …)    # decides nothing

The command line, ``weft bench``, ``weft tune``, ``weft check``, ``explain`` and the tests go through the registry, so most of
them know an op as soon as it is registered. docs/adding-an-op.md lists the files that a new op touches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch._C import _autograd, _functorch, _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack

from weft.arguments import check_int, did_you_mean, listed, quoted
from weft.ops.case import Accuracy, Case, Draw, Inputs
from weft.ops.knobs import around
from weft.ops.layout import Given, Layout, autograd_formula, flat
from weft.plan import asked, table
from weft.plan.memo import once
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.logs import logger_of
from weft.runtime.team.team import COMPARING, find_team

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from weft.runtime.team.team import Team

logger = logger_of(__name__)
_LIBRARY = torch.library.Library("weft", "FRAGMENT")
# Statements of ``Op.bits``: a row's bits depend on the row alone; they are an input's, or integers.
INVARIANT = "are invariant"
UNCHANGED = f"{INVARIANT}: values are moved, chosen or counted"
# The tags of torch.library.custom_op: known to torch.compile, and called with the strides that were traced.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


class Call(Protocol):
    """Inputs of an op's plan, a NamedTuple. design: the name of one, or "auto"."""

    dtype: torch.dtype
    design: str


class Op:
    """One op. A subclass overrides the parts that differ; ``register`` enters its only instance.

    name     of the function in weft.ops, of ``torch.ops.weft.NAME``, and in tables, reports and results
    alias    name on the command line, accepted wherever the name is
    designs  ways to compute it by name, each a frozen dataclass with that design's own fields, in the order of reports
    bits     what the bits of a row's result depend on, by design or of all alike, as the end of the sentence "its bits …".
             It begins with INVARIANT where that is neither another row nor the ranks nor the design: of a call with the field
             ``invariant`` the plan is such a design. Else sizes of the call (M, T: its rows), W, the number of ranks, or the
             design, which the plan chooses by both. No op inherits it
    sizes    names of the sizes that its plan depends on: ("M", "N", "K"), or ("shape",), the input of each rank; () for an op
             without a plan
    calls    type of its calls, if they are the sizes, a dtype and the name of a design
    no_plan  why an op without a plan needs none
    options  names of further fields of ``call_of``
    variants names of fields of its calls whose rows in the tables are under name+variant: matmul+partials
    dtypes   supported dtypes; None: any of 1, 2, 4 or 8 bytes
    mutates  names of the tensor arguments that it writes
    internal names of designs that no caller asks for
    composed names of designs whose steps have plans of their own, so that rows of the tables have no fields
    rare     names of designs that not every call fits
    moves_quickly  True if a quick search tries the neighbours of its designs too
    form     of its shapes in benchmarks and tables: "bytes" (of the whole tensor,), "rows" (M, H), "gemm" (M, N, K),
             "attention" (pairs, tokens, head_dim), "prefill" (``PrefillShape``), "sharded" (``ShardedShape``), "moe"
             (``MoeShape``); "": none
    collective  True if the ranks compute it together
    differs  arguments that ranks may pass differently, with the dimensions of a tensor's shape that may differ; (): all of it
    spans_nodes True if it works on a team of several nodes
    ranks_differ_in_k  True if ranks may hold different shares of K and must still agree on ``table.agreed_of`` a row

    algorithms  designs that a caller can ask for; "auto" is the first
    torch_op    ``torch.ops.weft.NAME``, once it is defined
    layout      its arguments
    saves       names of the tensors, as the torch op has them, that ``backward`` reads
    """

    name: ClassVar[str]
    alias: ClassVar[str]
    designs: ClassVar[Mapping[str, type]] = {}
    bits: ClassVar[str | Mapping[str, str]]
    sizes: ClassVar[tuple[str, ...]] = ()
    calls: ClassVar[type[tuple]]
    no_plan: ClassVar[str] = ""
    options: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[tuple[torch.dtype, ...] | None] = None
    mutates: ClassVar[Sequence[str]] = ()
    internal: ClassVar[tuple[str, ...]] = ()
    composed: ClassVar[tuple[str, ...]] = ()
    rare: ClassVar[tuple[str, ...]] = ()
    moves_quickly: ClassVar[bool] = False
    form: ClassVar[str] = ""
    collective: ClassVar[bool] = True
    differs: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    spans_nodes: ClassVar[bool] = False
    ranks_differ_in_k: ClassVar[bool] = False
    saves: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        # Plain attributes: torch.compile traces the public functions, which read them.
        self.algorithms = (AUTO, *(name for name in self.designs if name not in self.internal))
        self.torch_op: Any = None

    # --- choosing ----------------------------------------------------------------------------------------------------

    def plan(self, call: Call, machine: Machine) -> Planned:
        """Design of ``call`` on ``machine``, with its reason; ``call.design`` may name it.

        Pure: nothing is timed, allocated or sent. Equal arguments get the same object.
        """
        if asked.RECORDS:
            asked.note(self.name, call, machine)
        return once((self.name, call, machine), lambda: self._chosen(call, machine))

    def _chosen(self, call: Call, machine: Machine) -> Planned:
        planned = self.choose(call, machine)
        if getattr(call, "invariant", False) and not self.bits_of(planned.name).startswith(INVARIANT):
            fit = [name for name in self.designs if self.bits_of(name).startswith(INVARIANT)]
            known = f"pass {' or '.join(fit)}" if fit else "it has no invariant design"
            raise ValueError(f"{self.name}: bits of design {planned.name!r} {self.bits_of(planned.name)}; {known}")
        logger.debug("plan of %s %s: %s; %s", self.name, call, planned.name, planned.reason)
        return planned

    def choose(self, call: Call, machine: Machine) -> Planned:
        """``plan`` without memoisation: from the row of the table if one decides, else by the rule."""
        tuned = self.tuned(call, machine)
        if tuned is not None and call.design in (AUTO, tuned.name):
            return tuned
        name, reason = self.rule(call, machine)
        if call.design not in (AUTO, name):
            name, reason = call.design, f"asked for design={call.design!r}"
        elif call.design == AUTO:
            reason += self.no_row(call, machine)
        return Planned(name, self.default(name, call, machine), reason)

    def bits_of(self, design: str) -> str:
        """``bits`` of a design, or of an op without designs."""
        return self.bits if isinstance(self.bits, str) else self.bits[design]

    def call_of(
        self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO, **fields: bool
    ) -> Any:
        """Call of aligned, contiguous tensors of ``sizes`` (``self.sizes``). ValueError if they do not fit."""
        return self.calls(*self.checked_sizes(sizes), dtype, design, **fields)

    def checked_sizes(self, sizes: Sequence[Any]) -> tuple[int, ...]:
        """ValueError unless ``sizes`` are positive integers."""
        named = zip(self.sizes, sizes, strict=True)
        return tuple(check_int(f"{self.name}: {name}", size, 1, remedy="pass 1 or more") for name, size in named)

    def rule(self, call: Call, machine: Machine) -> tuple[str, str]:
        """Name of the design where no row decides, and the reason as a sentence."""
        raise NotImplementedError

    def default(self, name: str, call: Call, machine: Machine) -> Any:
        """Design of this name with the fields for a call where no row decides."""
        raise NotImplementedError

    def table_key(self, call: Call, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        """Key of rows for ``call`` in the tables: (op, shape, world size)."""
        raise NotImplementedError

    def row_for(self, call: Call, machine: Machine) -> table.Found | None:
        """Row that decides ``call``, or None."""
        op, shape, world_size = self.table_key(call, machine)
        return table.find(op, shape, call.dtype, world_size, machine.caps, self.ranks_differ_in_k)

    def tuned(self, call: Call, machine: Machine) -> Planned | None:
        """Plan of the row that decides ``call``, or None; None with a warning if the row's design is unknown."""
        best = self.row_for(call, machine)
        if best is None:
            return None
        if best.row.design not in self.designs:
            table.warn_of_design(best.file.name, best.row.key, best.row.design)
            return None
        return Planned(best.row.design, self.from_row(best.row, call, machine), best.reason, best.row)

    def from_row(self, row: table.Row, call: Call, machine: Machine) -> Any:
        """Design of ``row``, with its fields. ValueError if the design's fields have changed since."""
        return self.default(row.design, call, machine) if row.design in self.composed else row.as_design(self.designs)

    def check_row(self, row: table.Row) -> None:
        """ValueError if the fields of the design of ``row`` have changed since."""
        if row.design not in self.composed:
            row.as_design(self.designs)

    def no_row(self, call: Call, machine: Machine) -> str:
        """Reason why no row decided, as the end of a sentence."""
        op, shape, world_size = self.table_key(call, machine)
        return table.why_none(op, shape, call.dtype, world_size, machine.caps, self.ranks_differ_in_k)

    def offers(self, design: str, variants: Sequence[str]) -> bool:
        """True if a call with these ``variants`` may ask for a design of this name."""
        return True

    def check_design(self, design: object) -> None:
        """ValueError unless ``design`` is one of this op's."""
        if type(design) not in self.designs.values():
            near = did_you_mean(design, self.designs)
            raise ValueError(f"{self.name}: design={quoted(design)} is not one of {', '.join(self.designs)}{near}")

    # --- tuning ------------------------------------------------------------------------------------------------------

    def space(self, call: Call, machine: Machine, quick: bool = False) -> Iterator[Any]:
        """Designs far apart from each other for ``weft tune`` to time, fewer if ``quick``."""
        return iter(())

    def around(self, design: Any, machine: Machine, quick: bool = False) -> Iterator[Any]:
        """Designs with one knob of ``design`` moved; none if ``quick``, unless the op ``moves_quickly``."""
        return iter(()) if quick and not self.moves_quickly else around(design)

    def by_rule(self, call: Call, machine: Machine) -> Any:
        """The design without rows."""
        return self.default(self.rule(call, machine)[0], call, machine)

    def name_of(self, design: object) -> str:
        """The name of the design's kind."""
        return next(name for name, kind in self.designs.items() if type(design) is kind)

    def config_of(self, design: Any) -> dict[str, Any]:
        """The design's fields as a row of the table has them."""
        composed = [self.designs[name] for name in self.composed]
        return {} if type(design) in composed else dataclasses.asdict(design)

    # --- judging -----------------------------------------------------------------------------------------------------

    def case(
        self, world_size: int, dtype: torch.dtype, sizes: Sequence[int], design: Any = AUTO,
        *, data: str = "random", layout: str = "contiguous", **fields: Any,
    ) -> Case:  # fmt: skip
        """A case of this op. fields: its further arguments."""
        tensors = {"dtype": dtype, "sizes": tuple(sizes), "data": data, "layout": layout}
        return Case(op=self.name, world_size=world_size, design=design, fields=tuple(fields.items()), **tensors)

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: bool) -> Case:
        """The case of a shape as benchmarks and tables name it (``form``)."""
        return self.case(world_size, dtype, shape, **fields)

    def call_of_case(self, case: Case, machine: Machine) -> Any:
        """The call of a case whose design is a name."""
        sizes = case.sizes if len(self.sizes) > 1 else (case.sizes,)
        return self.call_of(sizes, case.dtype, machine, case.design, **dict(case.fields))

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Tensors of ``case`` at this rank, contiguous."""
        raise NotImplementedError

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> Any:
        """Result at ``rank`` in plain torch, in fp64; bit for bit where ``accuracy`` is exact.

        by_rank  inputs of every rank
        """
        raise NotImplementedError

    def accuracy(self, case: Case) -> Accuracy:
        """Accuracy that the result must have: by default the reference's bits."""
        return Accuracy(exact=True)

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> Any:
        """Call the public function, or ``run`` if ``case.design`` is a design, with tensors of ``inputs``."""
        raise NotImplementedError

    def arguments(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Arguments of ``results``, made from tensors of ``inputs`` before a clock starts."""
        return tensors

    def results(self, case: Case, team: Team, *arguments: Any) -> Any:
        """Result of ``call``; several as a tuple, where ``call`` joins them in another kernel."""
        return self.call(case, team, *arguments)

    def defined(self, case: Case, team: Team, out: Any, *tensors: torch.Tensor) -> Any:
        """Part of ``results`` that the op defines, in the form of ``reference``. tensors: of ``inputs``."""
        return out

    def figures(self, *arguments: Any) -> dict[str, float]:
        """Figures of ``arguments`` for reports, beside the time that they take."""
        return {}

    def cases(self) -> Iterator[Case]:
        """Cases that simulated ranks and GPUs run."""
        return iter(())

    def large_cases(self) -> Iterator[Case]:
        """Cases that only GPUs run: many rounds of a bounded workspace, tiles of full size."""
        return iter(())

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        """Least number of bytes that leave each rank."""
        return 0

    def traffic_of(self, case: Case) -> int:
        """``traffic`` of a case."""
        return self.traffic(case.sizes, case.dtype, case.world_size)

    def flops(self, sizes: Sequence[int]) -> int:
        """Floating-point operations of each rank's GEMM; 0 without one."""
        return 0

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes that each rank's GEMM reads and writes, at least."""
        return 0

    def moved_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of the largest tensor that moves between ranks through the op's workspaces."""
        return 0

    # --- running -----------------------------------------------------------------------------------------------------

    def dispatch(self, *arguments: Any) -> Any:
        """Call the torch op, or ``forward`` directly where torch's dispatcher would only add its time.

        That time is half of a small op's. Gradients, tracing, modes and the profiler need the dispatcher.
        """
        if torch.compiler.is_compiling() or not is_plain(arguments):
            return self.torch_op(*flat(arguments))
        self._check(arguments)
        return self.forward(*arguments)

    def through_torch(self, *arguments: Any) -> Any:
        """Call the torch op with the arguments of ``forward``."""
        return self.torch_op(*flat(arguments))

    @functools.cached_property
    def layout(self) -> Layout:
        return Layout(self.forward)

    def from_torch(self, *values: Any) -> Any:
        """Implementation of the torch op."""
        arguments = self.layout.given(values)
        self._check(arguments)
        return self.forward(*arguments)

    def _check(self, arguments: Sequence[Any]) -> None:
        """Compare the ranks' calls where the team does so; ``examine`` them where the host may read."""
        if "team" not in self.layout.defaults:
            if type(self).examine is not Op.examine and _first(arguments).is_cpu:
                self.examine(self.layout.named(arguments))
        elif COMPARING and (given := self.layout.named(arguments))["team"] in COMPARING:
            team = find_team(given.pop("team"))
            team.compare(f"weft.ops.{self.name}", self.agreed(given))
            if not team.is_capturing():
                self.examine(given)

    def examine(self, given: Mapping[str, Any]) -> None:
        """ValueError for wrong elements of tensors, where the host may read them."""

    def agreed(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Shapes, dtypes and values that all ranks must pass alike, by argument."""
        return {
            name: _described(value, self.differs.get(name, ()))
            for name, value in given.items()
            if self.differs.get(name) != ()
        }

    def forward(self, *arguments: Any) -> Any:
        """The op of checked arguments. Returns new tensors, never an argument.

        The annotations are the schema of the torch op, which has the fields of a NamedTuple in place of it (``Layout``). A team
        is passed by its name.
        """
        raise NotImplementedError

    def fake(self, *arguments: Any) -> Any:
        """Empty tensors like the results of ``forward``, for tracing."""
        raise NotImplementedError

    # Where gradients are supported: (given, *gradients of the results) -> gradients of arguments, by name.
    backward: Callable[..., Mapping[str, Any]] | None = None

    def keeps(self, ctx: FunctionCtx, given: Given, output: Any) -> Mapping[str, Any]:
        """Values, tensors and lists of tensors for ``backward``, beside the values of the arguments."""
        return {name: getattr(given, name) for name in self.saves}

    def refuse_backward(self, ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(f"weft.ops.{self.name} has no backward; use torch's operations where gradients are needed")


OpType = TypeVar("OpType", bound=Op)


def _first(arguments: Sequence[Any]) -> Any:
    """The first argument of the torch op; unlike ``flat`` in one frame, since eager calls on GPUs ask too."""
    first = arguments[0]
    while isinstance(first, tuple):
        first = first[0]
    return first


def _described(value: object, differs: tuple[int, ...]) -> str:
    """Shape and dtype of a tensor, with "any" for dimensions that may differ; other values as code."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join("any" if dim in differs else str(size) for dim, size in enumerate(value.shape))
        return f"({sizes}{',' * (value.dim() == 1)}) {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_described(one, differs) for one in value)}]"
    return repr(value)


def is_plain(arguments: Sequence[Any]) -> bool:
    """True if the dispatcher has nothing to do for a call.

    Tensors are of torch's own types; no gradient, tracing, mode or profiler is active.
    """
    return _are_plain(arguments) and not (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _get_tracing_state()
        or _functorch.peek_interpreter_stack()
        or _autograd._profiler_enabled()
    )


def _are_plain(arguments: Sequence[Any]) -> bool:
    for x in arguments:
        kind = type(x)
        if kind in _PLAIN:
            if x.requires_grad and torch.is_grad_enabled():
                return False
        elif kind in _NO_TENSORS:
            continue
        elif isinstance(x, torch.Tensor) or isinstance(x, (list, tuple)) and not _are_plain(x):
            return False
    return True


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NO_TENSORS = (str, bool, int, float, type(None))
_OPS: dict[str, Op] = {}
# Functions of weft.ops that are no op, and why they need no plan.
_FUNCTIONS: dict[str, str] = {}


def define(op: OpType) -> OpType:
    """Define ``torch.ops.weft.NAME``; returns ``op``.

    Without ``register`` it is another signature of a registered op, and asks that one's plan; ``explain``, ``weft tune`` and
    the tests know such calls as variants and fields of that one (``gemm+deferred_norm``).

    A call passes the dispatcher and ``forward`` only; under autograd, but not in ``torch.inference_mode()``, torch's own
    wrapper of the formula comes before them. ``torch.library.custom_op`` would wrap the kernel several times (a check that no
    output aliases an input, a guard against Dynamo, a counter of mutations). Its promises to torch.compile are the same.
    """
    layout = op.layout
    _LIBRARY.define(op.name + layout.schema(op.mutates), tags=_TAGS)
    op.torch_op = getattr(torch.ops.weft, op.name).default
    _LIBRARY.impl(op.name, op.from_torch, "CompositeExplicitAutograd")
    name = f"weft::{op.name}"
    torch.library.register_fake(name, lambda *values: op.fake(*layout.given(values)), lib=_LIBRARY)
    if op.backward is not None:
        setup_context, backward = autograd_formula(layout, op.keeps, op.backward)
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=_LIBRARY)
    elif not op.mutates:  # torch takes no formula for an op that writes its arguments, and warns
        torch.library.register_autograd(name, op.refuse_backward, lib=_LIBRARY)
    return op


def register(op: OpType) -> OpType:
    """Define the torch op and enter ``op`` into the registry; returns ``op``."""
    _OPS[op.name] = define(op)
    return op


def without_plan(name: str, why: str) -> None:
    """State for ``explain`` why a function of weft.ops that is no op needs no plan."""
    _FUNCTIONS[name] = why


def why_no_plan(name: str) -> str:
    """Reason why an op or a function needs no plan; "" for an op with one. ValueError as of ``find_op``."""
    return _FUNCTIONS[name] if isinstance(name, str) and name in _FUNCTIONS else find_op(name).no_plan


def bits_without_plan(name: str) -> str:
    """``Op.bits`` of an op without a plan; "" of a function, which has no result."""
    return "" if name in _FUNCTIONS else find_op(name).bits_of("kernel")


def registered() -> Iterator[Op]:
    """All ops, by their modules' names."""
    return iter(sorted(_OPS.values(), key=lambda op: type(op).__module__))


def find_op(name: str) -> Op:
    """Op of this name or alias. ValueError, with all aliases, if there is none."""
    wanted = name.replace("-", "_") if isinstance(name, str) else ""
    for op in _OPS.values():
        if wanted in (op.name, op.alias.replace("-", "_")):
            return op
    aliases = sorted(op.alias for op in _OPS.values())
    near = did_you_mean(name, [*aliases, *(op.name for op in _OPS.values())])
    raise ValueError(f"op={quoted(name)} is not one of {listed(aliases)}{near}")
