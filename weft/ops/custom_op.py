"""How weft's ops are made known to torch: as ``torch.library.custom_op`` would do it, without what that adds to every call.

A call passes the dispatcher and its Python kernel, no more; under autograd torch's own formula wrapper comes before it, and in
``torch.inference_mode()`` nothing does. ``torch.library.custom_op`` wraps the kernel several times over (a check that no
output aliases an input, a guard against Dynamo, a counter of mutations). What it promises torch.compile is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("weft", "FRAGMENT")
# What torch.library.custom_op says of its ops too: known to torch.compile, and called with the strides that were traced.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


class CustomOp:
    """``torch.ops.weft.NAME``. The function that it runs returns new tensors, never one that it was given."""

    def __init__(self, name: str, function: Callable[..., Any], mutates_args: Sequence[str]) -> None:
        self.name = f"weft::{name}"
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates_args))
        _LIBRARY.define(name + schema, tags=_TAGS)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` gives empty tensors like the op's results, for tracing."""
        torch.library.register_fake(self.name, function, lib=_LIBRARY)
        return function

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """As ``torch.library.register_autograd``."""
        torch.library.register_autograd(self.name, backward, setup_context=setup_context, lib=_LIBRARY)


def custom_op(
    name: str, *, mutates_args: Sequence[str] = (), backward: bool = True
) -> Callable[[Callable[..., Any]], CustomOp]:
    """A decorator: the function, whose annotations become the schema, is from here on ``torch.ops.weft.NAME``.

    mutates_args  the names of tensors that it writes
    backward      a formula will follow (``register_autograd``); if not, asking for gradients is an error, or where the op
                  writes tensors, for which torch takes no formula, torch's warning
    """

    def register(function: Callable[..., Any]) -> CustomOp:
        op = CustomOp(name, function, mutates_args)
        if not backward and not mutates_args:
            op.register_autograd(_refuse(name))
        return op

    return register


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(f"weft.ops.{name} has no backward; use torch's operations where gradients are needed")

    return refuse
