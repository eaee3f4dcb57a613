"""Times of decode steps with drafts, their drafting included: by them an engine chooses draft lengths.

verify pass   queries = drafts + 1 tokens of each sequence
a model       drafts: a pass of two tokens of a sequence, then of one for each further draft; without drafts the first alone
a head        drafts: a pass of the verified tokens, then of one for each further draft; without drafts the first alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.costs.gpu import is_known
from weft.costs.predicted import predict
from weft.engine.speculation.drafting import StepTimes
from weft.engine.speculation.loading import Draft
from weft.engine.speculation.options import SpeculativeConfig
from weft.kernels.fp8 import E4M3
from weft.models import Decoder, DecoderConfig
from weft.models.mtp import Mtp
from weft.models.steps import Layout, step_time

# Tokens of a sequence at which steps are predicted: their time is linear in it.
CONTEXTS = (512, 4608)
# Launches of a step that only rows have whose token is chosen.
CHOOSING = ("last norm", "head", "choice", "choice over ranks")
# Launch of a step that verifies: of its drafting, not of a pass of what drafts.
ACCEPTING = "drafts and acceptance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Model or head that drafts beside a model, on the same ranks.

    config      sizes of the model that drafts, or of a head as a model of one layer
    is_head     it takes hidden states of the model
    joining     (N, K) of the matrix by which each draft of a head joins a token's embedding and hidden states; None: none
    taking      (N, K) of the matrix over the hidden states of verified tokens; None: none
    head_share  bytes of the matrix that chooses drafts, over its bytes in the model's format
    """

    config: DecoderConfig
    is_head: bool = True
    joining: tuple[int, int] | None = None
    taking: tuple[int, int] | None = None
    head_share: float = 1.0

    @classmethod
    def of(cls, draft: Draft, options: SpeculativeConfig) -> Drafting:
        if isinstance(draft, Decoder):
            return cls(config=_sizes(draft), is_head=False)
        layer = replace(_sizes(draft.body), num_hidden_layers=1)
        if isinstance(draft, Mtp):
            share = 0.5 if options.draft_head == "fp8" else 1.0
            return cls(config=layer, joining=tuple(draft.eh_proj.shape), head_share=share)
        return cls(config=replace(layer, vocab_size=draft.config.draft_vocab_size), taking=tuple(draft.fc.shape))


def step_times(
    model: Decoder, draft: Draft | None, options: SpeculativeConfig, batches: Sequence[int]
) -> StepTimes | None:
    """Times of steps of these batches, by draft length; None: nothing is known of this GPU. Collective."""
    gpu, times = model.team.caps.device_name, None
    if is_known(gpu):
        slices = model.expert_layout == "slices"
        cache_bytes = 1 if model.cache_dtype == E4M3 else model.dtype.itemsize
        layout = Layout(
            world_size=model.team.size, slices=slices, spread=model.context_parallel, cache_bytes=cache_bytes
        )
        drafting = None if draft is None else Drafting.of(draft, options)
        sizes = _sizes(model)
        times = {
            batch: tuple(line(sizes, drafting, layout, gpu, (batch, length)) for length in options.lengths)
            for batch in batches
        }
    return model.team.exchange(times)[0]


def line(
    config: DecoderConfig, drafting: Drafting | None, layout: Layout, gpu: str, size: tuple[int, int]
) -> tuple[float, float]:
    """Seconds of a step of `size`, (sequences, drafts): after no tokens, and for each token of a sequence."""
    near, far = (seconds(config, drafting, layout, gpu, (*size, context)) for context in CONTEXTS)
    slope = max(0.0, far - near) / (CONTEXTS[1] - CONTEXTS[0])
    return near - slope * CONTEXTS[0], slope


def seconds(
    config: DecoderConfig, drafting: Drafting | None, layout: Layout, gpu: str, size: tuple[int, int, int]
) -> float:
    """Predicted time of a step of `size`: sequences, drafts, tokens of a sequence."""
    batch, drafts, context = size
    # Without drafts a step takes as long as a decode step (benchmarks/lab/h200-x2-speculation.json).
    verified = step_time(config, (batch, context, 1, drafts + 1)[: 4 if drafts else 3], layout, gpu).seconds
    if drafting is None:
        return verified

    def of_matrix(shape: tuple[int, int] | None, rows: int) -> float:
        return 0.0 if shape is None else predict("matmul", (rows, *shape), config.dtype, 1, gpu).seconds

    def of_layers(queries: int) -> float:
        parts = step_time(drafting.config, (batch, context, 1, queries), layout, gpu).parts
        layers = sum(part.seconds for part in parts if part.launch.what not in (*CHOOSING, ACCEPTING))
        return layers + of_matrix(drafting.joining, batch * queries)

    parts = step_time(drafting.config, (batch, context, 1, 1), layout, gpu).parts
    share = {"head": drafting.head_share}
    choosing = sum(part.seconds * share.get(part.launch.what, 1.0) for part in parts if part.launch.what in CHOOSING)
    first = of_layers(drafts + 1 if drafting.is_head else 2) + of_matrix(drafting.taking, batch * (drafts + 1))
    if drafts == 0 and not drafting.is_head:
        return verified + first  # it only reads
    further = max(0, drafts - 1)
    return verified + first + choosing + further * (of_layers(1) + choosing)


def _sizes(model: Decoder) -> DecoderConfig:
    """Sizes of a model as it computes."""
    return replace(model.config, dtype=model.dtype)
