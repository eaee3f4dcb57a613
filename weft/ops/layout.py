"""Arguments of an op, in which a record stands for its fields, and of its torch op, with the fields.

Where a parameter of ``forward`` is a NamedTuple, the torch op has its fields in place of it: forward(x, schedule: Schedule) is
``torch.ops.weft.NAME(x, pairs, counts, tiles, tile_count, choices, block)``. So a list of arguments is written once. Defaults
of a record's fields are defaults of the torch op where the record is the only parameter of ``forward``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

import torch
from torch.autograd.function import FunctionCtx


class Kind(NamedTuple):
    """A record, and the kinds of its fields; None: of a value that is no record."""

    record: type
    fields: list[Kind | None]


class Layout:
    """Parameters of a ``forward``, whose annotations are the schema of the torch op.

    defaults  of the torch op's parameters by name, ``inspect.Parameter.empty`` where there is none
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        hints, parameters = get_type_hints(forward), inspect.signature(forward).parameters
        self._kinds = [_kind(hints[name]) for name in parameters]
        alone = len(parameters) == 1
        given = {name: alone or p.default is not inspect.Parameter.empty for name, p in parameters.items()}
        flat = [one for name, p in parameters.items() for one in _parameters(name, hints[name], p.default, given[name])]
        results = None if hints["return"] is type(None) else hints["return"]
        self._signature = inspect.Signature(flat, return_annotation=results)
        self.defaults = {one.name: one.default for one in flat}
        self._all_defaults = tuple(self.defaults.values())
        self._has_records = any(self._kinds)

    def schema(self, mutates: Sequence[str]) -> str:
        """Schema of the torch op, without its name."""

        def prototype() -> None: ...

        prototype.__signature__ = self._signature  # type: ignore[attr-defined]
        return torch.library.infer_schema(prototype, mutates_args=tuple(mutates))

    def given(self, values: Sequence[Any]) -> Sequence[Any]:
        """Arguments of ``forward`` from the torch op's, of which torch omits trailing defaults."""
        whole = (*values, *self._all_defaults[len(values) :])
        return _taken(self._kinds, iter(whole)) if self._has_records else whole

    def named(self, arguments: Iterable[Any]) -> dict[str, Any]:
        """Arguments of ``forward`` by their names in the torch op, with its defaults."""
        return {**self.defaults, **dict(zip(self.defaults, flat(arguments), strict=False))}


def flat(arguments: Iterable[Any]) -> list[Any]:
    """Arguments of the torch op from ``forward``'s."""
    values: list[Any] = []
    for one in arguments:
        if isinstance(one, tuple):
            values.extend(flat(one))
        else:
            values.append(one)
    return values


def _kind(hint: object) -> Kind | None:
    return Kind(hint, [_kind(one) for one in get_type_hints(hint).values()]) if hasattr(hint, "_fields") else None


def _parameters(name: str, hint: Any, default: Any, defaults: bool) -> Iterator[inspect.Parameter]:
    """Parameters of the torch op in place of one.

    defaults  True: the defaults of a record's fields are defaults of the torch op too
    """
    if not hasattr(hint, "_fields"):
        yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=hint, default=default)
        return
    for field, one in get_type_hints(hint).items():
        kept = hint._field_defaults if defaults else {}
        yield from _parameters(field, one, kept.get(field, inspect.Parameter.empty), False)


def _taken(kinds: Iterable[Kind | None], values: Iterator[Any]) -> list[Any]:
    return [next(values) if kind is None else kind.record(*_taken(kind.fields, values)) for kind in kinds]


class Given(SimpleNamespace):
    """Arguments of a call by their names in the torch op, and what ``Op.keeps`` added.

    wanted  names of the arguments whose gradients are asked for
    """


def autograd_formula(
    layout: Layout, keeps: Callable[..., Mapping[str, Any]], backward: Callable[..., Mapping[str, Any]]
) -> tuple[Callable[..., None], Callable[..., tuple]]:
    """(setup_context, backward) for torch.library.register_autograd.

    keeps, backward  methods of an op, which find and give values by their names
    """

    def setup_context(ctx: FunctionCtx, inputs: Sequence[Any], output: object) -> None:
        given = layout.named(inputs)
        kept = keeps(ctx, Given(**given), output)
        saved = {name: value for name, value in kept.items() if _has_tensors(value)}
        ctx.values = {name: value for name, value in {**given, **kept}.items() if not _has_tensors(value)}
        ctx.lengths = {name: len(value) if isinstance(value, list) else None for name, value in saved.items()}
        ctx.save_for_backward(*(x for value in saved.values() for x in (value if isinstance(value, list) else [value])))

    def backward_by_place(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple:
        tensors = iter(ctx.saved_tensors)
        saved = {
            name: next(tensors) if length is None else [next(tensors) for _ in range(length)]
            for name, length in ctx.lengths.items()
        }
        # Without trailing arguments that equal their defaults.
        wanted = {name for name, needed in zip(layout.defaults, ctx.needs_input_grad, strict=False) if needed}
        of = backward(Given(**{**ctx.values, **saved, "wanted": wanted}), *gradients)
        return tuple(of.get(name) for name in layout.defaults)

    return setup_context, backward_by_place


def _has_tensors(value: object) -> bool:
    return isinstance(value, torch.Tensor) or isinstance(value, (list, tuple)) and any(map(_has_tensors, value))
