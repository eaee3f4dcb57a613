"""Checks of a primitive's arguments, made by the compiler and by the simulator.

The same functions run in both, so that both refuse a misuse with the same message. They emit no code.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from weft.errors import NotAPeer
from weft.triton_api import builtin

# Signal type -> signed type in which its values are compared.
_SIGNED = {"int32": tl.int32, "uint32": tl.int32, "int64": tl.int64, "uint64": tl.int64}


def signed_type(primitive: str, signal: object) -> tl.dtype:
    """Signed type as wide as the signal at ``signal``. TypeError if it points to no signal type."""
    element = _pointed_to(primitive, "signal", signal)
    if element.name not in _SIGNED:
        raise TypeError(
            f"{primitive}: signal points to {element}; a signal is one int32, uint32, int64 or uint64: make it with "
            f"team.signals(shape)"
        )
    return _SIGNED[element.name]


def check_value(primitive: str, signal: object, value: object) -> None:
    """TypeError or ValueError unless ``value`` fits the signal at ``signal``."""
    bits = signed_type(primitive, signal).primitive_bitwidth
    known = _known(value)
    if isinstance(known, tl.tensor):
        _check_integer(primitive, "value", known)
    elif not isinstance(known, int):
        raise TypeError(f"{primitive}: value is {_named(known)}; pass an integer")
    elif not -(1 << (bits - 1)) <= known < 1 << bits:
        raise ValueError(
            f"{primitive}: value={known} does not fit into the {bits} bits of the signal; pass one that does"
        )


def check_team_view(primitive: str, team: object) -> None:
    """TypeError unless ``team`` is what a kernel gets for ``team.view``."""
    if "deltas" not in _fields(team):
        raise TypeError(f"{primitive}: team is {_named(_known(team))}; pass the kernel's argument that was team.view")


def check_flagged_block(primitive: str, name: str, ptr: object, mask: object) -> None:
    """TypeError unless ``ptr`` can be a block of Lamport data and ``mask`` selects elements of it."""
    ptr, mask = _known(ptr), _known(mask)
    if not isinstance(ptr, tl.tensor) or not ptr.dtype.is_ptr() or not _is_block(ptr):
        raise TypeError(
            f"{primitive}: {name} is {_named(ptr)}; pass a block of pointers, such as {name} + tl.arange(0, BLOCK)"
        )
    if ptr.dtype.element_ty.primitive_bitwidth not in (16, 32):
        raise TypeError(
            f"{primitive}: {name} points to {ptr.dtype.element_ty}; data that are their own flag are fp16, bf16 or fp32"
        )
    if not isinstance(mask, tl.tensor) or not mask.dtype.is_bool():
        raise TypeError(f"{primitive}: mask is {_named(mask)}; pass a block of booleans, such as offsets < n")


def _check_integer(primitive: str, name: str, x: tl.tensor) -> None:
    if _is_block(x) or not x.dtype.is_int():
        raise TypeError(f"{primitive}: {name} is {_named(x)}; pass an integer scalar")


def _pointed_to(primitive: str, name: str, ptr: object) -> tl.dtype:
    ptr = _known(ptr)
    if not isinstance(ptr, tl.tensor) or not ptr.dtype.is_ptr():
        raise TypeError(f"{primitive}: {name} is {_named(ptr)}; pass a scalar pointer")
    if _is_block(ptr):
        raise TypeError(f"{primitive}: {name} is {_named(ptr)}; pass a scalar pointer, such as {name} + index")
    return ptr.dtype.element_ty


def _is_block(x: tl.tensor) -> bool:
    return x.type is not x.dtype and x.type.is_block()


def _shape(x: tl.tensor) -> list[int]:
    return [_known(size) for size in x.type.shape] if _is_block(x) else []


def _known(x: object) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


def _fields(x: object) -> tuple[str, ...]:
    """Field names of a NamedTuple, which the compiler holds as Triton's own tuple; () for other values."""
    return tuple(x.type.fields or ()) if isinstance(x, tl.tuple) else getattr(x, "_fields", ())


def _named(x: object) -> str:
    """Description of ``x`` for a message."""
    if fields := _fields(x):
        return f"a tuple ({', '.join(fields)})"
    if not isinstance(x, tl.tensor):
        return repr(x) if isinstance(x, (int, float, str)) or x is None else f"a {type(x).__name__}"
    kind = f"pointer{'s' if _is_block(x) else ''} to {x.dtype.element_ty}" if x.dtype.is_ptr() else str(x.dtype)
    if _is_block(x):
        return f"a block of shape {_shape(x)} of {kind}"
    return f"a run-time value of type {kind}" if not x.dtype.is_ptr() else f"a {kind}"


@builtin
def signed_type_of(primitive, signal, _semantic=None):
    """``signed_type`` in a kernel, a compile-time constant."""
    return tl.constexpr(signed_type(_known(primitive), signal))


@builtin
def check_signal(primitive, signal, value, _semantic=None):
    """``check_value`` in a kernel."""
    check_value(_known(primitive), signal, value)


@builtin
def check_lamport(primitive, mask, _semantic=None, **pointers):
    """``check_flagged_block`` in a kernel, for each of ``pointers``."""
    for name, ptr in pointers.items():
        check_flagged_block(_known(primitive), name, ptr, mask)


@builtin
def check_multimem(primitive, ptr, mask, team, _semantic=None):
    """Check the arguments of a multimem primitive at compile time.

    TypeError unless ``ptr`` is a block of pointers to fp16, bf16 or fp32, ``mask`` a block of booleans and ``team`` a view;
    ValueError where the team has no multicast.
    """
    primitive, ptr, mask = map(_known, (primitive, ptr, mask))
    if not isinstance(ptr, tl.tensor) or not ptr.dtype.is_ptr() or not _is_block(ptr):
        raise TypeError(
            f"{primitive}: ptr is {_named(ptr)}; pass a block of pointers, such as ptr + 8 * tl.arange(0, BLOCK)"
        )
    if ptr.dtype.element_ty not in (tl.float16, tl.bfloat16, tl.float32):
        raise TypeError(f"{primitive}: ptr points to {ptr.dtype.element_ty}; multimem adds fp16, bf16 and fp32")
    if not isinstance(mask, tl.tensor) or not mask.dtype.is_bool():
        raise TypeError(f"{primitive}: mask is {_named(mask)}; pass a block of booleans, such as offsets < n")
    check_team_view(primitive, team)
    if not _known(team.multicast):
        raise ValueError(
            f"{primitive} needs NVLink multicast, which this team lacks (team.caps.multicast); use tl.load and tl.store of "
            f"wl.symm_at(ptr, peer, team) in a loop over wl.num_ranks(team)"
        )


@builtin
def check_symmetric(primitive, ptr, peer, team, _semantic=None):
    """TypeError unless ``ptr`` is a pointer or block, ``peer`` an integer or block, ``team`` a view.

    NotAPeer for a peer that is known and no rank of the team.
    """
    primitive, ptr, peer = map(_known, (primitive, ptr, peer))
    if not isinstance(ptr, tl.tensor) or not ptr.dtype.is_ptr():
        raise TypeError(f"{primitive}: ptr is {_named(ptr)}; pass a pointer into a symmetric tensor")
    if not (peer.dtype.is_int() if isinstance(peer, tl.tensor) else isinstance(peer, int)):
        raise TypeError(f"{primitive}: peer is {_named(peer)}; pass an integer or a block of integers")
    check_team_view(primitive, team)
    size = _known(team.size)
    if isinstance(peer, int) and not 0 <= peer < size:
        raise NotAPeer(primitive, peer, size)


@builtin
def is_scalar(x, _semantic=None):
    """True if ``x`` is one value that is known at run time only; a compile-time constant."""
    known = _known(x)
    return tl.constexpr(isinstance(known, tl.tensor) and not _is_block(known))


@builtin
def check_team(primitive, team, _semantic=None):
    """``check_team_view`` in a kernel."""
    check_team_view(_known(primitive), team)


@builtin
def check_team_or_none(primitive, team, _semantic=None):
    """``check_team``, but None passes."""
    if _known(team) is not None:
        check_team_view(_known(primitive), team)


@builtin
def check_prefetch(ptr, nbytes, _semantic=None):
    """TypeError or ValueError unless ``ptr`` is a block and ``nbytes`` one int32 or a block of its shape."""
    ptr, nbytes = _known(ptr), _known(nbytes)
    if not isinstance(ptr, tl.tensor) or not ptr.dtype.is_ptr():
        raise TypeError(f"prefetch: ptr is {_named(ptr)}; pass a block of pointers")
    if not (nbytes.dtype.name in ("int32", "uint32") if isinstance(nbytes, tl.tensor) else isinstance(nbytes, int)):
        raise TypeError(f"prefetch: nbytes is {_named(nbytes)}; pass int32")
    if isinstance(nbytes, tl.tensor) and _is_block(nbytes) and _shape(nbytes) != _shape(ptr):
        raise ValueError(f"prefetch: nbytes is {_named(nbytes)}, ptr {_named(ptr)}; pass blocks of one shape")


@builtin
def check_epoch(primitive, epoch, _semantic=None):
    """TypeError unless ``epoch`` is one pointer to an integer type that can count calls."""
    element = _pointed_to(_known(primitive), "epoch", epoch)
    if element.name not in _SIGNED:
        raise TypeError(
            f"{_known(primitive)}: epoch points to {element}; it is two int32 of this rank: make them with "
            f"team.local((2,), torch.int32) or team.signals((2,))"
        )


@builtin
def check_pointers(primitive, _semantic=None, **pointers):
    """TypeError unless each of ``pointers`` is one pointer, not a block."""
    for name, ptr in pointers.items():
        _pointed_to(_known(primitive), name, ptr)


@builtin
def check_scalars(primitive, _semantic=None, **values):
    """TypeError unless each of ``values`` is one integer, a compile-time constant or not."""
    for name, x in values.items():
        known = _known(x)
        if isinstance(known, tl.tensor):
            _check_integer(_known(primitive), name, known)
        elif not isinstance(known, int):
            raise TypeError(f"{_known(primitive)}: {name} is {_named(known)}; pass an integer scalar")


@builtin
def check_constants(primitive, _semantic=None, **values):
    """TypeError unless each of ``values`` is a compile-time constant."""
    for name, x in values.items():
        if isinstance(_known(x), tl.tensor):
            raise TypeError(
                f"{_known(primitive)}: {name} is {_named(x)}; it is a compile-time constant: pass a literal or a tl.constexpr"
            )


@builtin
def check_signal_count(primitive, n, most, _semantic=None):
    """TypeError or ValueError unless ``n`` is a compile-time constant in 1 .. ``most``."""
    primitive, n, most = map(_known, (primitive, n, most))
    if isinstance(n, tl.tensor):
        raise TypeError(
            f"{primitive}: n is {_named(n)}; it is a compile-time constant: pass a literal or a tl.constexpr"
        )
    if not isinstance(n, int) or not 1 <= n <= most:
        raise ValueError(f"{primitive}: n={n} is no count of signals; pass one in 1 .. {most}")


@builtin
def check_grid_counter(primitive, counter, _semantic=None):
    """TypeError unless ``counter`` is one pointer to int64."""
    element = _pointed_to(_known(primitive), "counter", counter)
    if element.name != "int64":
        raise TypeError(
            f"{_known(primitive)}: counter points to {element}; it is one int64 of this rank: make it with "
            f"team.local((1,), torch.int64)"
        )


@builtin
def check_channel(primitive, channel, _semantic=None):
    """TypeError unless ``channel`` is what a kernel gets for ``channel.view``."""
    if _fields(channel) != ("signals", "epoch", "chunks"):
        raise TypeError(
            f"{_known(primitive)}: channel is {_named(_known(channel))}; pass the kernel's argument that was channel.view"
        )


@builtin
def check_call(primitive, call, _semantic=None):
    """TypeError unless ``call`` is what ``next_call`` or ``current_call`` has returned."""
    if _fields(call) != ("signals", "epoch", "chunks", "now"):
        raise TypeError(
            f"{_known(primitive)}: call is {_named(_known(call))}; pass what wl.next_call(channel) or "
            f"wl.current_call(channel) returned"
        )
