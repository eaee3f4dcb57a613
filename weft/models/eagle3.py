"""EAGLE-3: a draft head of one layer over three hidden states of the model whose tokens it drafts.

    row p       h_p and token p + 1, at position p
    h_p         fc @ [low; middle; high]: hidden states of the model at token p, before three layers
                or, where the model has not been there, what the row before gave
    attention   takes [norm of the token's embedding; norm of h_p], 2 * hidden_size
    gives       hidden states, which are h of the next row, and by norm and lm_head logits of token p + 2

The head has a vocabulary of fewer tokens: draft id i is token id i + d2t[i] of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft import ops
from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models.checkpoint import Checkpoint
from weft.models.config import DecoderConfig
from weft.models.decoder import Decoder
from weft.models.dummy import fill_dummy
from weft.models.family import flag
from weft.models.heads import body_beside, norm_beside, shared_mode
from weft.parallel.linear import empty_parameter
from weft.parallel.sharding import Shard, under, whole
from weft.parallel.step import PagedCache, Step
from weft.parallel.tensors import NormWeights
from weft.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# Of the layer in published checkpoints: SafeAILab's and SpecForge's, then vLLM's.
LAYERS = ("midlayer", "layers.0")
READ = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_config", "architectures", "model_type")
AUX = "eagle_aux_hidden_state_layer_ids"
STATES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Sizes of a head, under the names of config.json.

    sizes                 of its layer, and the model's vocabulary
    draft_vocab_size      tokens that it can draft
    layers                of the model, whose inputs it takes; None: 2, the middle one, and the third but last
    norm_before_residual  True: the residual of attention is the norm of h_p, not h_p
    """

    sizes: DecoderConfig
    draft_vocab_size: int
    layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Eagle3Config:
        """Reads a config.json. CheckpointError for a model that is no such head, and for unknown keys."""
        classes = content.get("architectures")
        if not (isinstance(classes, list) and any(name in classes for name in ARCHITECTURES)):
            raise CheckpointError(
                f"config.json: architectures={quoted(classes)} is not supported; an EAGLE-3 head is {ARCHITECTURES[0]!r}"
            )
        rest = {name: value for name, value in content.items() if name not in (*READ, AUX)}
        sizes = DecoderConfig.from_dict({**rest, "model_type": "llama"})
        if sizes.num_hidden_layers != 1:
            raise CheckpointError(
                f"config.json: num_hidden_layers={sizes.num_hidden_layers} is not supported; an EAGLE-3 head has 1"
            )
        if content.get("target_hidden_size") not in (None, sizes.hidden_size):
            raise CheckpointError(
                f"config.json: target_hidden_size={quoted(content['target_hidden_size'])} is not "
                f"hidden_size={sizes.hidden_size}, which weft does not run"
            )
        vocab = content.get("draft_vocab_size") or sizes.vocab_size
        if type(vocab) is not int or not 1 <= vocab <= sizes.vocab_size:
            raise CheckpointError(
                f"config.json: draft_vocab_size={quoted(vocab)} is not an integer in 1 .. vocab_size={sizes.vocab_size}"
            )
        return cls(
            sizes=sizes,
            draft_vocab_size=vocab,
            layers=_layers_of(content),
            norm_before_residual=flag(content, "norm_before_residual"),
        )


def _layers_of(content: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Layers in a config.json, by index; None: it names none.

    vLLM names at the top level the layers whose inputs are taken, SpecForge in eagle_config the ones whose outputs are.
    """
    nested = content.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"config.json: eagle_config={quoted(nested)} is not an object")
    ids, after = (content[AUX], 0) if content.get(AUX) else (nested.get(AUX), 1)
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != STATES or not all(type(layer) is int for layer in ids):
        raise CheckpointError(f"config.json: {AUX}={quoted(ids)} is not a list of {STATES} layers")
    return tuple(layer + after for layer in ids)


class Eagle3(nn.Module):
    """EAGLE-3 head beside a model, split over the same ranks; fc is whole on each.

    layers  of the model whose inputs it takes (Tap)
    body    its layer, as a stage of a decoder without ends
    ids     [draft_vocab_size] int64: token id of each draft id

    It runs replicated whatever the model's mode: of few tokens, and of prompts one layer beside many.
    ValueError, in a line, for a head that does not fit the model.
    """

    def __init__(self, config: Eagle3Config, model: Decoder, *, positions: int, kv_cache_dtype: str = "auto") -> None:
        """`positions`: tokens of the longest sequence."""
        super().__init__()
        sizes, of_model = config.sizes, model.config
        for name in ("hidden_size", "vocab_size"):
            if getattr(sizes, name) != (wanted := getattr(of_model, name)):
                raise ValueError(
                    f"{name}={getattr(sizes, name)}, and the model has {wanted}; pass the head of this model"
                )
        depth = of_model.num_hidden_layers
        self.layers = config.layers or (2, depth // 2, depth - 3)
        if not all(0 <= one < two for one, two in zip(self.layers, (*self.layers[1:], depth), strict=True)):
            raise ValueError(
                f"layers {', '.join(map(str, self.layers))} are not {STATES} ascending ones of the model's {depth}; "
                f"pass the head of this model"
            )
        attention = replace(sizes.attention, inputs=2)
        self.config, self.team = config, model.team
        self.body = body_beside(replace(sizes, attention=attention), model, positions, kv_cache_dtype)
        shared = {"team": model.team, "mode": shared_mode(model), "dtype": model.dtype}
        width = sizes.hidden_size
        self.fc = empty_parameter(width, STATES * width, team=model.team, dtype=model.dtype)
        self.hidden_norm, self.norm = (norm_beside(sizes, model) for _ in range(2))
        self.lm_head = VocabParallelHead(config.draft_vocab_size, width, **shared)
        self.embed_tokens: VocabParallelEmbedding = model.embed_tokens
        self._own_embedding = False
        self._target = model.lm_head
        spread = torch.arange(config.draft_vocab_size, device=model.team.device)
        self.take_ids(spread * sizes.vocab_size // config.draft_vocab_size)

    def take_ids(self, ids: Tensor) -> None:
        """Set the token ids of all draft ids."""
        self.ids = ids
        first = self._target.start
        # Draft ids whose tokens this rank's part of the model's head has, and their columns there.
        self._owned = ((ids >= first) & (ids < first + self._target.local_size)).nonzero()[:, 0]
        self._columns = ids[self._owned] - first

    def shards(self, layer: str = LAYERS[0]) -> dict[str, Shard]:
        """Name of a tensor in a checkpoint → this rank's part of it; `layer`: of LAYERS."""
        shards = under(layer, self.body.layers[0].shards())
        shards |= under(f"{layer}.hidden_norm", self.hidden_norm.shards()) | under("norm", self.norm.shards())
        shards |= {"fc.weight": whole(self.fc)} | under("lm_head", self.lm_head.shards())
        return shards | (under("embed_tokens", self.embed_tokens.shards()) if self._own_embedding else {})

    def load(self, checkpoint: Checkpoint) -> None:
        """Read this rank's slices. Where the checkpoint has no embedding, the model's is shared. Collective."""
        if checkpoint.has("embed_tokens.weight"):
            sizes, model = self.config.sizes, self.embed_tokens
            self.embed_tokens = VocabParallelEmbedding(
                sizes.vocab_size, sizes.hidden_size, team=self.team, mode=model.mode, dtype=model.weight.dtype
            )
            self._own_embedding = True
        layer = next((name for name in LAYERS if checkpoint.has(f"{name}.hidden_norm.weight")), LAYERS[0])
        checkpoint.load(self.shards(layer))
        drafts, tokens = self.config.draft_vocab_size, self.config.sizes.vocab_size
        if checkpoint.has("d2t"):
            ids = checkpoint.read("d2t").long()
            if ids.shape != (drafts,):
                raise CheckpointError(
                    f"{checkpoint.directory}: d2t has shape {tuple(ids.shape)}, but draft_vocab_size is {drafts}"
                )
            ids = ids + torch.arange(drafts)
            if int(ids.min()) < 0 or int(ids.max()) >= tokens or len(ids.unique()) < drafts:
                raise CheckpointError(f"{checkpoint.directory}: d2t does not name {drafts} of {tokens} token ids")
            self.take_ids(ids.to(self.ids.device))
        elif drafts < tokens:
            raise CheckpointError(f"{checkpoint.directory}: tensor d2t is missing; the checkpoint is not complete")

    def fill_dummy(self) -> Eagle3:
        """Fill with random weights, as of Decoder; draft ids are token ids at even distances. Returns self."""
        fill_dummy(self.shards(), self.team)
        return self

    def given(self, states: list[Tensor], step: Step) -> Tensor:
        """h_p of all tokens [T, hidden_size], from the hidden states that a Tap takes."""
        rows = torch.cat(states, 1)
        product = ops.matmul(rows, self.fc) if step.plan.fused else F.linear(rows, self.fc)
        return step.plan.recipe.whole_rows(product, step.tokens)

    def forward(
        self, tokens: Tensor, hidden: Tensor, step: Step, cache: PagedCache, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(normed, hidden) of these rows [n]; None: of all.

        tokens, hidden  [T] and [T, hidden_size]: of each row token p + 1 and h_p
        """
        recipe, layer = step.plan.recipe.of_single_layers(), self.body.layers[0].weights
        local = recipe.local
        embedded, _ = local.add_norm(recipe.embed(tokens, self.embed_tokens.weights), None, layer.input_norm)
        normed, residual = local.add_norm(hidden, None, NormWeights.of(self.hidden_norm))
        residual = normed if self.config.norm_before_residual else residual
        x = recipe.attention(torch.cat((embedded, normed), 1), layer.attention, step, cache.layer(0))
        normed, residual = local.add_norm(x, residual, layer.post_norm, layer.first_matrix)
        x = recipe.feed_forward(normed, layer.mlp)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        return local.add_norm(x, residual, NormWeights.of(self.norm))

    def logits(self, normed: Tensor) -> Tensor:
        """Logits as this rank's part of the model's head gives them; -inf for tokens that have no draft id."""
        gathered = self.lm_head.gather(self.body.plan(len(normed)).recipe.local.logits(normed, self.lm_head.weights))
        wide = gathered.new_full((len(gathered), self._target.local_size), float("-inf"))
        return wide.index_copy_(1, self._columns, gathered[:, self._owned])
