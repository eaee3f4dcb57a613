"""MTP heads: one more layer of a model, over its output and the token that follows, for drafts.

    row p    eh_proj @ [norm of the embedding of token p + 1; norm of h_p], through the layer and a norm
    h_p      normed output of the model at token p or, where the model has not been there, what the row before gave
    gives    h of the next row, and by the model's head logits of token p + 2

Embedding and head are the model's, or a copy of the head in fp8. One head drafts all tokens, each from the one before.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft import ops
from weft.models.checkpoint import SCALES, Checkpoint
from weft.models.decoder import Decoder
from weft.models.dummy import fill_dummy
from weft.models.heads import body_beside, norm_beside
from weft.models.mtp_layouts import LAYOUTS, Layout, layout_in
from weft.models.quantization import MADE, Quantization
from weft.models.stacked_experts import as_stored
from weft.parallel.linear import empty_parameter
from weft.parallel.quantized import in_blocks
from weft.parallel.sharding import Shard, under, whole
from weft.parallel.step import PagedCache, Step
from weft.parallel.tensors import NormWeights, VocabWeights

# Ends of names of tensors of a quantized layer.
QUANTIZED = (*SCALES, "_packed")


class Mtp(nn.Module):
    """MTP head of a model, split over the same ranks; eh_proj is whole on each.

    layers  of the model's Tap: its output
    body    the layer, as a stage of a decoder without ends

    It runs replicated whatever the model's mode, as an EAGLE-3 head does.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        positions: int,
        kv_cache_dtype: str = "auto",
        layout: Layout = LAYOUTS[0],
        quantized: bool = False,
    ) -> None:
        """`positions`: tokens of the longest sequence; `quantized`: the layer is, as the model's layers are."""
        super().__init__()
        sizes, last = model.config, model.config.num_hidden_layers - 1
        # As the last layer is.
        of = sizes.attention
        sizes = replace(
            sizes,
            experts=sizes.experts and replace(sizes.experts, layers=(sizes.experts.in_layer(last),)),
            attention=replace(of, windows=(of.window(last),), rotated=(of.rotated[last % len(of.rotated)],)),
            quantization=sizes.quantization if quantized else None,
            linear_attention=None,  # heads of models with gated delta nets attend
        )
        self.team, self.layout, self.index = model.team, layout, last + 1
        self.layers = (self.index,)
        self.body = body_beside(sizes, model, positions, kv_cache_dtype, self.index)
        width = sizes.hidden_size
        self.enorm, self.hnorm, self.norm = (norm_beside(sizes, model) for _ in range(3))
        self.eh_proj = empty_parameter(width, 2 * width, team=model.team, dtype=model.dtype)
        self._embedding, self._head = model.embed_tokens, model.lm_head
        self._copied: VocabWeights | None = None  # the head that drafts are chosen by, where it is not the model's

    def shards(self) -> dict[str, Shard]:
        """Name of a tensor in a checkpoint → this rank's part of it."""

        def named(part: str) -> str:
            return self.layout.named(part, self.index)

        shards = under(named("layer"), self.body.layers[0].shards())
        for part in ("enorm", "hnorm", "norm"):
            shards |= under(named(part), getattr(self, part).shards())
        return shards | {f"{named('eh_proj')}.weight": whole(self.eh_proj)}

    @classmethod
    def of(cls, checkpoint: Checkpoint, model: Decoder, *, positions: int, kv_cache_dtype: str = "auto") -> Mtp:
        """Head in the model's checkpoint. Collective. ValueError for a checkpoint without a head."""
        layout = layout_in(checkpoint, model.config.num_hidden_layers)
        if layout is None:
            wanted = " and no ".join(one.named("eh_proj", model.config.num_hidden_layers) for one in LAYOUTS)
            raise ValueError(f"{checkpoint.directory} has no MTP head: no {wanted}; leave out method='mtp'")
        layer = layout.named("layer", model.config.num_hidden_layers)
        names = checkpoint.unused(())
        made = model.config.quantization
        quantized = made is not None and made.method in MADE and made == Quantization.made(made.method)
        quantized |= any(name.startswith(f"{layer}.") and name.endswith(QUANTIZED) for name in names)
        last = model.config.num_hidden_layers - 1
        if f"{layer}.mlp.gate_proj.weight" in names and model.config.has_experts(last):
            raise ValueError(
                f"{checkpoint.directory} has an MTP head without experts after layers with experts, which weft does not run; "
                f"leave out method='mtp'"
            )
        head = cls(model, positions=positions, kv_cache_dtype=kv_cache_dtype, layout=layout, quantized=quantized)
        shards, weights, experts = head.shards(), model.config.family.weights, model.config.experts
        if experts is not None:
            shards = as_stored(shards, checkpoint, weights, experts.num_experts)
        checkpoint.load(shards, None, weights.joined)
        return head

    def fill_dummy(self) -> Mtp:
        """Fill with random weights, as of Decoder. Returns self."""
        fill_dummy(self.shards(), self.team)
        return self

    def given(self, states: list[Tensor], step: Step) -> Tensor:
        """h_p of all tokens [T, hidden_size], from what a Tap takes."""
        [output] = states
        return output

    def forward(
        self, tokens: Tensor, hidden: Tensor, step: Step, cache: PagedCache, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(normed, h of the next row) of these rows [n], which are the same; None: of all.

        tokens, hidden  [T] and [T, hidden_size]: of each row token p + 1 and h_p
        """
        recipe, layer = step.plan.recipe.of_single_layers(), self.body.layers[0].weights
        local = recipe.local
        embedded = recipe.embed(tokens, self._embedding.weights)
        parts = ((embedded, self.enorm), (hidden, self.hnorm))
        both = torch.cat([local.add_norm(x, None, NormWeights.of(norm))[0] for x, norm in parts], 1)
        x = ops.matmul(both, self.eh_proj) if step.plan.fused else F.linear(both, self.eh_proj)
        x, residual = recipe.decoder_layer(x, None, layer, step, cache.layer(0))
        if rows is not None:
            x, residual = x[rows], residual[rows]
        normed, _ = local.add_norm(x, residual, NormWeights.of(self.norm))
        return normed, normed

    def logits(self, normed: Tensor) -> Tensor:
        """This rank's logits, by the model's head or its copy."""
        return self.body.plan(len(normed)).recipe.local.logits(normed, self.head)

    @property
    def head(self) -> VocabWeights:
        """Head by which drafts are chosen."""
        return self._copied or self._head.weights

    def choose_in_fp8(self) -> None:
        """Choose drafts by a copy of the model's head in blocks of fp8, of its weights as they are now."""
        head = self._head.weights
        self._copied = head._replace(weight=in_blocks(head.weight))
