"""weft's layers in a model of Transformers, which goes on to work as before, ``generate`` included.

The model's own tensor-parallel plan says which of its modules are split over ranks. An attention keeps the model's rotary
angles, mask, cache and attention function; weft computes its projections, and the feed-forward layers whole.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from weft.arguments import check_instance
from weft.layers.attention import TPAttention
from weft.layers.gradients import asked_for
from weft.layers.invariant_model import check_call, replace_rest
from weft.layers.mlp import TPMLP
from weft.layers.moe import MoE
from weft.ops.collectives.all_gather import all_gather
from weft.parallel.linear import check_team
from weft.parallel.modes import Mode, mode_named
from weft.parallel.recipe import StepPlan
from weft.parallel.rotary import rotary_angles
from weft.parallel.sequences import Sequences
from weft.parallel.step_plan import plan_layer, splits_tokens
from weft.runtime.logs import logger_of

if TYPE_CHECKING:
    from transformers import Cache

    from weft.runtime.team.team import Team

logger = logger_of(__name__)

# Attributes of an attention of Transformers that attention functions read.
ATTRIBUTES = ("config", "layer_idx", "layer_type", "scaling", "attention_dropout", "is_causal", "sliding_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """Modules of a model that ``replace`` replaced or left alone, by name, with * for any number.

    layers  the layer's name
    left    the reason
    """

    layers: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        layers, left = (
            "; ".join(f"{name} ({told})" for name, told in modules.items()) or "nothing"
            for modules in (self.layers, self.left)
        )
        return f"replaced {layers}. Left alone: {left}"


def replace(model: nn.Module, team: Team, *, mode: Mode = "auto") -> Replaced:
    """Put TPAttention, TPMLP and MoE into a model of Transformers, in place, by its ``tp_plan``.

    model  whole, the same on every rank, on the team's device
    mode   of every pass: "replicated", "reference", or "sequence_parallel": a rank holds 1/W of each sequence between the
           layers, so that norms and residuals are split too; lengths are padded to W's multiple. "auto": sequence_parallel
           where the pass has enough tokens to split, replicated otherwise; "invariant": logits have the bits of weft's
           engine with the same option (docs/same-bits.md); norms and head are replaced too, and no cache is kept

    Every rank calls the model with the same tokens, and gets the same logits. Ranks that draw tokens at random must draw the
    same: torch.manual_seed before ``generate``. What is left alone stays whole on every rank; the log names it too. A module
    that computes anything else than weft's layer is left alone; in "sequence_parallel" and "auto" such an attention is an
    error. Weights keep their ``requires_grad``: TPMLP says which gradients they get. Gradients of modules
    left alone are this rank's part, to be summed over the ranks.

    ValueError for a model without a plan or of which nothing can be replaced, for sizes that W does not divide, and later for
    calls that ask for attention weights, router logits or, where a rank holds 1/W, hidden states. The model's weights are
    now this rank's share: ``save_pretrained`` is refused.
    """
    check_instance("model", model, nn.Module, "a model of Transformers")
    check_team(team)
    mode, name = mode_named(mode), type(model).__name__
    plan, decoder = _decoder_of(model)
    current = _Pass(team, mode, decoder.config.hidden_size)
    made, left = {}, {}
    for path, module, kind in _planned(model, plan):
        try:
            made[path] = kind(module, decoder.config, current)
        except ValueError as error:
            left[_starred(path)] = str(error)
    if not made:
        raise ValueError(f"model={name}: nothing replaced; {'; '.join(left.values()) or 'its tp_plan splits no layer'}")
    attentions = sum(isinstance(layer, _Attention) for layer in made.values())
    _check_left(mode, list(left.values()), attentions, len(decoder.layers))
    for path, layer in made.items():
        model.set_submodule(path, layer)
    layers = {_starred(path): type(layer.layer).__name__ for path, layer in made.items()}
    if mode == "invariant":
        layers |= {_starred(path): kind for path, kind in replace_rest(model).items()}
    left |= _whole(model, plan, (*layers, *left))
    current.watch(decoder)
    model.save_pretrained = _refuse_to_save
    replaced = Replaced(layers=layers, left=left)
    logger.info("%s over %d ranks: %s", name, team.size, replaced)
    return replaced


def _decoder_of(model: nn.Module) -> tuple[dict[str, str], Any]:
    """(plan, decoder) of a model of Transformers. ValueError for another one."""
    name, plan = type(model).__name__, getattr(model, "tp_plan", None)
    if not plan:
        raise ValueError(f"model={name} has no tp_plan; replace() takes models of Transformers that have one")
    decoder = getattr(model, getattr(model, "base_model_prefix", ""), model)
    if not all(hasattr(decoder, part) for part in ("layers", "norm", "config")):
        raise ValueError(f"model={name} has no layers and norm in its base model; replace() takes decoders")
    return plan, decoder


def _check_left(mode: str, reasons: list[str], attentions: int, layers: int) -> None:
    """ValueError where modules were left alone that the mode needs.

    attentions  replaced ones; layers: their number
    """
    if mode in ("sequence_parallel", "auto") and attentions != layers:
        raise ValueError(
            f"mode={mode!r}: {attentions} of {layers} attentions fit, and the rest would see 1/W of the tokens; pass "
            f"mode='replicated'; {'; '.join(reasons)}"
        )
    if mode == "invariant" and reasons:
        raise ValueError(f"mode='invariant': {'; '.join(reasons)}; choose another mode")


class _Pass:
    """Split of the tokens in the current forward pass, shared by a model's layers.

    sharded  a rank holds 1/W of each sequence
    length   tokens of each sequence, without padding
    """

    def __init__(self, team: Team, mode: str, hidden_size: int) -> None:
        self.team, self.mode, self.hidden_size, self.sharded, self.length = team, mode, hidden_size, False, 0
        self._angles: torch.Tensor | None = None

    def angles_of(self, config: Any, head_dim: int) -> torch.Tensor | None:
        """Table of angles [1, positions, head_dim] of all layers in mode "invariant"; None in other modes."""
        if self.mode == "invariant" and self._angles is None:
            sizes = config.max_position_embeddings, head_dim, config.rope_parameters
            self._angles = rotary_angles(*sizes, self.team.device)[None]
        return self._angles

    def splits(self, tokens: int) -> bool:
        """True if ``tokens`` are split over the ranks between the layers."""
        return self.mode == "sequence_parallel" or (
            self.mode == "auto" and self.team.size > 1 and splits_tokens(tokens, self.hidden_size, self.team)
        )

    def plan(self, layer: nn.Module, x: torch.Tensor) -> StepPlan:
        """Plan of ``layer`` for this rank's x [batch, length, hidden]."""
        mode = "sequence_parallel" if self.sharded else "replicated" if self.mode == "auto" else self.mode
        tokens = x.shape[0] * x.shape[1] * (self.team.size if self.sharded else 1)
        # Of the fused local work only the MLP's has no backward.
        fused = False if isinstance(layer, TPMLP) and asked_for(layer, x) and mode != "invariant" else None
        return plan_layer(tokens, mode=mode, team=self.team, fused=fused)

    def watch(self, decoder: nn.Module) -> None:
        """Install hooks that split the tokens for the layers, gather them after, and refuse some calls."""
        decoder.register_forward_pre_hook(self._check, with_kwargs=True)
        if self.mode in ("sequence_parallel", "auto"):
            decoder.layers[0].register_forward_pre_hook(self._split)
            decoder.norm.register_forward_pre_hook(self._gather)

    def _check(self, decoder: nn.Module, args: tuple, options: dict[str, Any]) -> None:
        if self.mode == "invariant":
            asked = options.get("use_cache")
            check_call({**options, "use_cache": decoder.config.use_cache if asked is None else asked})
        refused = {
            "output_attentions": "a rank has a part of the heads",
            "output_router_logits": "MoE chooses experts in a kernel",
        }
        if self.mode in ("sequence_parallel", "auto"):
            refused["output_hidden_states"] = "a rank has 1/W of the rows; replace(mode='replicated') keeps them whole"
        for name, why in refused.items():
            asked = options.get(name)
            if getattr(decoder.config, name, False) if asked is None else asked:
                raise ValueError(
                    f"{type(decoder).__name__}: {name}=True is not possible over ranks: {why}; leave it out"
                )

    def _split(self, layer: nn.Module, args: tuple) -> tuple | None:
        x, *further = args
        batch, self.length, _ = x.shape
        self.sharded = self.splits(batch * self.length)
        if not self.sharded:
            return None
        padding = -self.length % self.team.size
        x = F.pad(x, (0, 0, 0, padding)) if padding else x
        return (x.chunk(self.team.size, dim=1)[self.team.rank].contiguous(), *further)

    def _gather(self, norm: nn.Module, args: tuple) -> tuple | None:
        if not self.sharded:
            return None
        [x] = args
        whole = all_gather(x, self.team).unflatten(0, (self.team.size, -1)).transpose(0, 1).flatten(1, 2)
        return (whole[:, : self.length],)


class _Attention(nn.Module):
    """TPAttention, called as an attention of Transformers."""

    def __init__(self, module: nn.Module, config: object, current: _Pass) -> None:
        super().__init__()
        self.layer = _like(TPAttention.from_module(module, config, current.team, current.mode), module)
        self.current = current
        for name in ATTRIBUTES:
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))
        self.num_key_value_groups = self.layer.group
        # In fp32, as the engine has them; Transformers rounds them.
        self.angles = current.angles_of(config, self.layer.head_dim)
        theirs = inspect.unwrap(type(module).forward)
        # Since transformers 5.24, where past_key_values is called so, a cache also takes the options of the attention.
        self._shares_options = "cache" in inspect.signature(theirs).parameters
        known = theirs.__globals__
        self._functions, self._eager = known.get("ALL_ATTENTION_FUNCTIONS"), known.get("eager_attention_forward")
        if not hasattr(self._functions, "get_interface"):
            raise ValueError(f"module={type(module).__name__} has no attention functions as in transformers 5")

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **options: object,
    ) -> tuple[torch.Tensor, None]:
        cache = past_key_values if cache is None else cache
        (cos, sin), current, half = position_embeddings, self.current, self.layer.head_dim // 2
        batch, length = len(hidden_states), cos.shape[1]
        # Here, not in a hook alone: a checkpointed layer runs again after other passes.
        current.sharded = current.splits(batch * length)
        padding = -length % current.team.size if current.sharded else 0

        def attend(*parts: torch.Tensor) -> torch.Tensor:
            q, k, v = (part[:, :, :length] for part in parts)
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx, **({"kwargs": options} if self._shares_options else {}))
            attention = self._functions.get_interface(self.config._attn_implementation, self._eager)
            dropout = self.attention_dropout if self.training else 0.0
            how = {"dropout": dropout, "scaling": self.scaling, "sliding_window": self.layer.window}
            attended, _ = attention(self, q, k, v, attention_mask, **how, **options)
            return F.pad(attended, (0, 0, 0, 0, 0, padding)) if padding else attended

        if self.angles is not None:
            plan, angles = current.plan(self.layer, hidden_states), self.angles[:, :length]
            step = Sequences(plan=plan, batch=batch, length=length, angles=angles)
            return self.layer(hidden_states, step), None
        angles = torch.cat((cos[..., :half], sin[..., :half]), dim=-1)
        step = Sequences(
            plan=current.plan(self.layer, hidden_states),
            batch=batch,
            length=length + padding,
            angles=F.pad(angles, (0, 0, 0, padding)) if padding else angles,
            attend=attend,
        )
        return self.layer(hidden_states, step), None


class _FeedForward(nn.Module):
    """TPMLP or MoE, called as a feed-forward of Transformers, after the attention of its layer."""

    def __init__(self, layer: TPMLP | MoE, current: _Pass) -> None:
        super().__init__()
        self.layer, self.current = layer, current

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden_states, self.current.plan(self.layer, hidden_states))


def _mlp(module: nn.Module, config: object, current: _Pass) -> _FeedForward:
    return _FeedForward(_like(TPMLP.from_module(module, current.team, current.mode), module), current)


def _mixture(module: nn.Module, config: object, current: _Pass) -> _FeedForward:
    layer = MoE.from_module(module, current.team, current.mode, layout="slices")
    return _FeedForward(_like(layer, module), current)


def _like(layer: nn.Module, module: nn.Module) -> Any:
    """``layer``, in training and with gradients if ``module`` is."""
    return layer.train(module.training).requires_grad_(any(one.requires_grad for one in module.parameters()))


# Children and their styles in a plan, by which a module is known, and what makes its layer.
KINDS: tuple[tuple[dict[str, str], Callable[..., nn.Module]], ...] = (
    ({"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}, _Attention),
    ({"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}, _mlp),
    ({"experts": "moe_tp_experts"}, _mixture),
)


def _planned(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, nn.Module, Callable[..., nn.Module]]]:
    """Yield (name, module, maker of its layer) for modules that the plan splits as weft's layers do."""
    for path, module in model.named_modules():
        children = dict(module.named_children())
        for styles, kind in KINDS:
            if all(name in children and plan.get(_starred(f"{path}.{name}")) == styles[name] for name in styles):
                yield path, module, kind


def _whole(model: nn.Module, plan: dict[str, str], named: tuple[str, ...]) -> dict[str, str]:
    """Reasons of modules whose weights are whole on every rank, but for ``named`` ones."""
    reasons = {}
    for path, module in model.named_modules():
        name = _starred(path)
        if any(name == one or name.startswith(f"{one}.") for one in named):
            continue
        if next(module.parameters(recurse=False), None) is not None:
            style = plan.get(name)
            reasons[name] = f"no layer for {style}" if style else "not in its tp_plan"
    return reasons


def _starred(path: str) -> str:
    """A module's name as plans have it: model.layers.*.mlp for model.layers.3.mlp."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _refuse_to_save(*args: object, **options: object) -> None:
    raise RuntimeError("save_pretrained: this rank has its share of the weights; save the model before replace()")
