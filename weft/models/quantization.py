"""Weights in fp8 and in 4 bits, as the quantization_config of a config.json describes them.

Block scales as Qwen3-FP8 and DeepSeek-V3 have them, scales of channels or tensors as compressed-tensors, ModelOpt and older
vLLM write them; MXFP4 and int4 of compressed-tensors. Everything else is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.kernels.four_bit import MX_GROUP
from weft.models.cache_scales import check_cache_scheme
from weft.models.checkpoint import Checkpoint
from weft.models.joined import Joined, joined_name
from weft.models.multimodal import text_name
from weft.parallel import four_bit
from weft.parallel.four_bit import FourBitFormat
from weft.parallel.quantized import BLOCK, Format, Formats, Fp8Format

# What --quantization may be: made from weights of 16 or 32 bits as they are read.
MADE = {
    "fp8": Fp8Format(scheme="block"),
    "fp8_per_block": Fp8Format(scheme="block"),
    "fp8_per_channel": Fp8Format(scheme="channel"),
    **four_bit.MADE,
}

# Keys of quantization_config without effect on what is computed.
WITHOUT_EFFECT = {
    "quant_method",
    "quantization_status",
    "version",
    "global_compression_ratio",
    "producer",
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "dequantize",
    "is_checkpoint_fp8_serialized",
}
# A regular expression of compressed-tensors' `ignore` is matched if it cannot take long: few repeats, of single characters.
LONGEST_PATTERN, MOST_REPEATS = 200, 3
PATTERN = re.compile(r"(?:[\w\-^$|]|\\[.dw\-](?:[+*])?|\.(?:[+*])?|\[[\w\-]+\][+*]?|\((?:\?:)?(?!\()|\)(?![+*?{]))*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Matrices of the layers that are quantized.

    method   in messages: quant_method, or the name of what is made at load
    format   of all these matrices
    ignored  modules of 16 bits: their names, prefixes or ends of names, patterns with *, or "re:" and a regular expression
    """

    method: str
    format: Format
    ignored: tuple[str, ...] = ()

    @classmethod
    def made(cls, name: str) -> Quantization:
        """Made at load. ValueError for a name that is not in MADE."""
        if name not in MADE:
            raise ValueError(f"quantization={quoted(name)} is not one of {', '.join(map(repr, MADE))}")
        return cls(method=name, format=MADE[name])

    @classmethod
    def of(cls, content: object) -> Quantization | None:
        """Reads a quantization_config; None if weights are not quantized.

        CheckpointError for what weft does not run.
        """
        if not content:
            return None
        method = content.get("quant_method") if isinstance(content, Mapping) else content
        reader = READERS.get(method) if method is not content and isinstance(method, str) else None
        if reader is None:
            raise CheckpointError(
                f"config.json: quantization_config with quant_method={quoted(method)} is not supported; weft runs weights in "
                f"fp8 and 4 bits of {', '.join(map(repr, READERS))}, and weights of 16 or 32 bits: take such a checkpoint"
            )
        check_cache_scheme(content)
        return reader(content)

    def named_in(self, checkpoint: Checkpoint) -> Quantization:
        """The same with the names that scales have there.

        vLLM's fp8 of whole tensors names them weight_scale and input_scale, transformers' (Mistral's files) as below.
        """
        form = self.format
        of_vllm = isinstance(form, Fp8Format) and form.scheme == "tensor" and form.scale == "weight_scale"
        if not of_vllm or checkpoint.has_any(".weight_scale") or not checkpoint.has_any(".weight_scale_inv"):
            return self
        return replace(self, format=replace(form, scale="weight_scale_inv", inputs="activation_scale"))

    def ignores(self, name: str) -> bool:
        """True for a module of 16 bits."""
        return any(_names(entry, name) for entry in self.ignored)

    def formats(self, prefix: str, joined: Collection[Joined] = ()) -> Formats:
        """Formats of a module's matrices.

        joined  rules for modules of the checkpoint that hold several matrices, and that `ignored` may name

        CheckpointError where of the matrices of one GEMM some are quantized and some are not.
        """

        def is_of_16_bits(name: str) -> bool:
            holder = joined_name(f"{prefix}.{name}.weight", joined)
            return self.ignores(f"{prefix}.{name}") or (
                holder is not None and self.ignores(holder.removesuffix(".weight"))
            )

        def of(names: Sequence[str]) -> Format | None:
            of_16_bits = [name for name in names if is_of_16_bits(name)]
            if of_16_bits and len(of_16_bits) < len(names):
                other = next(name for name in names if name not in of_16_bits)
                raise CheckpointError(
                    f"config.json: quantization_config names {prefix}.{of_16_bits[0]} as not quantized, but not {other}; weft "
                    f"computes both in one GEMM: take a checkpoint in which both are, or neither"
                )
            return None if of_16_bits else self.format

        return of


def _names(entry: str, module: str) -> bool:
    """True if an entry of a list of ignored modules names this one."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    if "*" in entry:
        return fnmatchcase(module, entry) or fnmatchcase(module, f"{entry}.*")
    return module == entry or module.startswith(f"{entry}.") or module.endswith(f".{entry}") or f".{entry}." in module


def _refused(method: str, what: str, supported: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: quantization_config of quant_method={method!r} with {what} is not supported; weft runs {supported}: "
        f"take another checkpoint, or one of 16 bits"
    )


def _check(method: str, content: Mapping[str, Any], values: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """CheckpointError for other values than these, and for unknown keys that ask for something."""
    for name, value in content.items():
        if name in values:
            if not any(value == one and type(value) is type(one) for one in values[name]):
                raise _refused(method, f"{where}{name}={quoted(value)}", f"{name}={values[name][0]!r}")
        elif value and not (not where and name in WITHOUT_EFFECT):
            raise _refused(method, f"{where}{quoted(name)[1:-1]}={quoted(value)}", "what it does without this key")


def _ignored(method: str, content: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Modules that are not quantized, under any of these keys."""
    modules: list[str] = []
    for name in names:
        entries = content.get(name) or []
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise CheckpointError(
                f"config.json: {name}={quoted(entries)} of quantization_config is not a list of names"
            )
        modules += entries
    for entry in modules:
        pattern = entry.removeprefix("re:")
        repeats = sum(pattern.count(one) for one in "*+")
        if entry.startswith("re:"):
            fits = len(pattern) <= LONGEST_PATTERN and repeats <= MOST_REPEATS and PATTERN.fullmatch(pattern)
            if not fits or not _compiles(pattern):
                raise _refused(method, f"the pattern {quoted(entry)}", "names, and patterns such as 're:.*lm_head'")
        elif repeats > MOST_REPEATS:
            raise _refused(method, f"the pattern {quoted(entry)}", f"patterns of at most {MOST_REPEATS} asterisks")
    return tuple(map(text_name, modules))


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _fp8(content: Mapping[str, Any]) -> Quantization:
    """Reads transformers' and vLLM's fp8: blocks with weight_block_size, else a scale for each tensor."""
    method = "fp8"
    names = ("modules_to_not_convert", "ignored_layers")
    block = content.get("weight_block_size")
    schemes = ("dynamic",) if block else ("dynamic", "static")
    rest = {name: value for name, value in content.items() if name not in names}
    _check(
        method,
        rest,
        {
            "weight_block_size": ([BLOCK, BLOCK], None),
            "activation_scheme": schemes,
            "fmt": ("e4m3", "float8_e4m3fn", None),
            "scale_fmt": ("float", None),
            "expert_dtype": ("fp8", None),
        },
    )
    scheme, scale = ("block", "weight_scale_inv") if block else ("tensor", "weight_scale")
    static = content.get("activation_scheme") == "static"
    form = Fp8Format(scheme=scheme, scale=scale, static_inputs=static)
    return Quantization(method=method, format=form, ignored=_ignored(method, content, *names))


# compressed-tensors' weights, by strategy → scheme, with the strategies of inputs that go with them.
STRATEGIES = {
    "block": ("block", ("group",)),
    "channel": ("channel", ("token",)),
    "tensor": ("tensor", ("token", "tensor")),
}


def _compressed_tensors(content: Mapping[str, Any]) -> Quantization | None:
    """Reads llm-compressor's: one group of layers, all in one format; None for an fp8 cache alone."""
    method, groups = "compressed-tensors", content.get("config_groups")
    rest = {name: value for name, value in content.items() if name not in ("config_groups", "ignore")}
    if not groups:
        _check(method, {name: value for name, value in rest.items() if name != "format"}, {})
        return None
    # The format goes first: its name says most.
    _check(method, rest, {"format": tuple(PACKINGS)})
    if not isinstance(groups, Mapping) or len(groups) != 1 or not isinstance(next(iter(groups.values())), Mapping):
        raise _refused(method, f"config_groups={quoted(groups)}", "one group")
    [(name, group)] = groups.items()
    sides = {side: group.get(side) for side in ("weights", "input_activations")}
    rest_of_group = {key: value for key, value in group.items() if key not in sides}
    packing = content.get("format", "float-quantized")
    _check(method, rest_of_group, {"targets": (["Linear"],), "format": (packing, None)}, f"{name}.")
    if not isinstance(sides["weights"], Mapping):
        raise _refused(method, f"{name}.weights={quoted(sides['weights'])}", "weights in fp8 or 4 bits")
    form = PACKINGS[packing](method, name, **sides)
    return Quantization(method=method, format=form, ignored=_ignored(method, content, "ignore"))


def _check_side(method: str, side: str, content: Mapping[str, Any], values: Mapping[str, tuple[Any, ...]]) -> None:
    """CheckpointError unless weights or inputs of compressed-tensors have these values."""
    number = {"num_bits": (8,), "type": ("float",), "symmetric": (True, None)} | values
    unread = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"} - values.keys()
    read = {key: value for key, value in content.items() if key not in unread}
    _check(method, {key: None for key in number if key not in read} | read, number, f"{side}.")


def _float_quantized(method: str, name: str, weights: Mapping[str, Any], input_activations: object) -> Fp8Format:
    """Weights and inputs in fp8."""
    if not isinstance(inputs := input_activations, Mapping):
        raise _refused(method, f"{name}.input_activations={quoted(inputs)}", "weights and input_activations in fp8")
    strategy, unread = weights.get("strategy"), {"actorder": (weights.get("actorder"),)}
    scheme, of_inputs = STRATEGIES.get(strategy, (None, ())) if isinstance(strategy, str) else (None, ())
    if scheme is None:
        raise _refused(method, f"weights.strategy={quoted(strategy)}", ", ".join(map(repr, STRATEGIES)))
    _check_side(
        method,
        "weights",
        weights,
        unread
        | {
            "strategy": tuple(STRATEGIES),
            "dynamic": (False, None),
            "block_structure": ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}") if scheme == "block" else (None, ""),
            "group_size": (None, BLOCK if scheme == "block" else -1),
        },
    )
    static = inputs.get("dynamic") is False or inputs.get("dynamic") is None
    if static:
        of_inputs = ("tensor",) if scheme != "block" else ("group",)
    elif scheme == "tensor":
        of_inputs = ("token",)
    _check_side(
        method,
        "input_activations",
        inputs,
        {
            "strategy": of_inputs,
            "dynamic": (True, False, None) if scheme != "block" else (True,),
            "group_size": (None, -1) if scheme != "block" else (BLOCK,),
            "actorder": (inputs.get("actorder"),),
        },
    )
    return Fp8Format(scheme=scheme, scale="weight_scale", static_inputs=static)


def _pack_quantized(method: str, name: str, weights: Mapping[str, Any], input_activations: object) -> FourBitFormat:
    """Weights in int4 with inputs of 16 bits."""
    _check_no_inputs(method, name, input_activations)
    grouped = weights.get("strategy") == "group"
    _check_side(
        method,
        "weights",
        weights,
        {
            "num_bits": (4,),
            "type": ("int",),
            "strategy": ("group", "channel"),
            "symmetric": (True, False, None),
            "group_size": INT_GROUPS if grouped else (None, -1),
            "dynamic": (False, None),
            # "group" stores columns in another order; "weight" and "static" say how numbers were chosen.
            "actorder": (None, "weight", "static"),
        },
    )
    group, symmetric = weights["group_size"] if grouped else 0, weights.get("symmetric") is not False
    return FourBitFormat(kind="int4", group=group, symmetric=symmetric, stored=True)


def _mxfp4_packed(method: str, name: str, weights: Mapping[str, Any], input_activations: object) -> FourBitFormat:
    """Weights in MXFP4 with inputs of 16 bits."""
    _check_no_inputs(method, name, input_activations)
    values = {"num_bits": (4,), "strategy": ("group",), "group_size": (MX_GROUP,), "dynamic": (False, None)}
    _check_side(method, "weights", weights, values | {"actorder": (None,)})
    return FourBitFormat(kind="mxfp4", stored=True)


def _check_no_inputs(method: str, name: str, inputs: object) -> None:
    if inputs is not None:
        raise _refused(method, f"{name}.input_activations={quoted(inputs)}", "weights in 4 bits with inputs of 16 bits")


def _mxfp4(content: Mapping[str, Any]) -> Quantization:
    """Reads gpt-oss's: stacked experts in MXFP4."""
    method, names = "mxfp4", "modules_to_not_convert"
    _check(method, {name: value for name, value in content.items() if name != names}, {})
    # As transformers has it, whatever the list says: experts alone are in MXFP4.
    ignored = (*_ignored(method, content, names), "self_attn")
    return Quantization(method=method, format=FourBitFormat(kind="mxfp4", stored=True), ignored=ignored)


# Columns of a scale of int4.
INT_GROUPS = (128, 64, 32)
PACKINGS = {
    "float-quantized": _float_quantized,
    "pack-quantized": _pack_quantized,
    "mxfp4-pack-quantized": _mxfp4_packed,
}
"""format of compressed-tensors → reader of a group's weights and inputs."""


def _modelopt(content: Mapping[str, Any]) -> Quantization | None:
    """Reads ModelOpt's: a scale for each tensor and its inputs; None for an fp8 cache alone."""
    method, names = "modelopt", ("ignore", "exclude_modules")
    algorithm = content.get("quant_algo")
    # Groups say in compressed-tensors' words what quant_algo says.
    rest = {name: value for name, value in content.items() if name not in (*names, "config_groups")}
    if algorithm is None and not content.get("config_groups"):
        _check(method, rest, {})
        return None
    _check(method, {"quant_algo": algorithm, **rest}, {"quant_algo": ("FP8",)})
    form = Fp8Format(scheme="tensor", scale="weight_scale", static_inputs=True)
    return Quantization(method=method, format=form, ignored=_ignored(method, content, *names))


def modelopt_file(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """quantization_config of older ModelOpt, in hf_quant_config.json; None: there is no such file."""
    name = "hf_quant_config.json"
    if not (checkpoint.directory / name).exists():
        return None
    content = checkpoint.read_json(name).get("quantization")
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{checkpoint.directory}: {name} has no quantization; download it again")
    return {**content, "quant_method": "modelopt"}


READERS = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "mxfp4": _mxfp4}
"""quant_method → reader of its quantization_config."""
