"""Times of gated delta nets and of attention over latents (MLA) on one GPU, and what their bytes or sums would take.

    python -m benchmarks.delta_and_latents OUT.json [--seconds 60]

In CUDA graphs; inputs are cold (more copies than the L2 holds). Prompts: 8,192 tokens, heads of one rank of Qwen3.6-27B (8 key
heads, 24 value heads at two ranks) and the 2 and 8 heads that flash-linear-attention publishes. Steps: of 1, 8, 32 and 128
sequences, a token each, and a token and three drafts. Latents: heads of DeepSeek-V2-Lite, and of DeepSeek-V3 whole and at two
ranks; of each row the share of the GPU's memory bandwidth, and the rate of its two products. Each result is compared with plain
torch first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Rows, copies, timed
from weft import ops
from weft.ops.case import Case
from weft.ops.linear_attention.delta_rule import DeltaSizes, Recurrence, sizes_of
from weft.ops.linear_attention.gated_delta_net_step import GATED_DELTA_NET_STEP
from weft.runtime.arithmetic import cdiv

PROMPT, TAPS, EPS = 8192, 4, 1e-6
# Key heads, value heads of one rank; K = V = 128.
HEADS = ((2, 8), (8, 24), (16, 48))
BATCHES = (1, 8, 32, 128)
# Heads of a rank, sequences, tokens of context.
LATENTS = (
    (16, 1, 4096),
    (16, 32, 4096),
    (16, 128, 4096),
    (64, 32, 4096),
    (128, 1, 4096),
    (128, 32, 4096),
    (128, 128, 4096),
)
LATENT, ROPE, PAGE = 512, 64, 64


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def gates(tokens: int, heads: int) -> ops.Gates:
    return ops.Gates(draw(tokens, heads), draw(tokens, heads), *(draw(heads, dtype=torch.float32) for _ in range(2)))


def places(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def error_of(out: torch.Tensor, qkv: torch.Tensor, of: ops.Gates, sizes: DeltaSizes, state: torch.Tensor) -> float:
    """Largest error of the first rows over the largest result, against the recurrence in fp64."""
    rows = min(len(qkv), 200)
    whole = Recurrence.of(
        qkv[:rows].double(), ops.Gates(*(x[:rows].double() if x.dim() > 1 else x.double() for x in of)), sizes
    )
    wanted = whole.run(state.double())[0]
    return ((out[:rows].double() - wanted).abs().max() / wanted.abs().max()).item()


def prompts(key_heads: int, heads: int) -> Iterator[tuple[str, dict[str, Any]]]:
    sizes = DeltaSizes(key_heads, heads, 128, 128)
    chunks = ops.SequenceChunks.make([(0, PROMPT)], [0]).to(torch.device("cuda"))
    qkv, of = draw(PROMPT, sizes.columns), gates(PROMPT, heads)
    state = torch.zeros(1, heads, 128, 128, device="cuda")
    error = error_of(ops.gated_delta_rule(qkv, of, state, chunks), qkv, of, sizes, torch.zeros_like(state[0]))
    given = copies(lambda: draw(PROMPT, sizes.columns), 2 * PROMPT * sizes.columns)
    yield "delta rule", {**timed(lambda x: ops.gated_delta_rule(x, of, state, chunks), given, None), "error": error}
    weight, conv = draw(sizes.columns, TAPS), draw(1, TAPS - 1, sizes.columns)
    yield "convolution", timed(lambda x: ops.causal_conv1d(x, weight, conv, chunks), given, None)
    wide = copies(lambda: (draw(PROMPT, heads, 128), draw(PROMPT, heads * 128)), 4 * PROMPT * heads * 128)
    one = draw(128)
    yield "gated norm", timed(lambda x: ops.rms_norm_gated(*x, one, EPS), wide, None)


def steps(key_heads: int, heads: int, batch: int, queries: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of ``queries`` new tokens of each sequence, after half as many drafts that the state does not have yet."""
    sizes, rows, pending = DeltaSizes(key_heads, heads, 128, 128), batch * queries, queries // 2
    lengths = [100 + token for _ in range(batch) for token in range(1, queries + 1)]
    drafted = (places([pending] * batch), queries - 1) if pending else ()
    given = ops.DeltaTokens(places(lengths), places(list(range(batch))), *drafted)
    qkv, z, of, weight = (
        draw(rows, sizes.columns),
        draw(rows, heads * 128),
        gates(rows, heads),
        draw(sizes.columns, TAPS),
    )
    norm, ring = (draw(128), EPS), TAPS + 2 * (queries - 1)

    def kept() -> ops.DeltaSlots:
        inputs, rates = draw(batch, ring, sizes.columns), draw(batch, ring, 2 * heads)
        return ops.DeltaSlots(inputs, rates, draw(batch, heads, 128, 128, dtype=torch.float32))

    nbytes = 4 * batch * heads * 128 * 128
    states = copies(kept, nbytes)
    error = error_of_step(qkv, z, of, weight, norm, ops.DeltaSlots(*(part.clone() for part in states[0])), given)
    result = timed(lambda s: ops.gated_delta_net_step(qkv, z, of, weight, norm, s, given), states, None)
    yield "step", {**result, "error": error, "bytes": 2 * nbytes}


def error_of_step(
    qkv: torch.Tensor,
    z: torch.Tensor,
    of: ops.Gates,
    weight: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    kept: ops.DeltaSlots,
    tokens: ops.DeltaTokens,
) -> float:
    """Largest error of the first sequence's rows over the largest result, against the op's reference in fp64."""
    first, new = ops.DeltaSlots(*(part[:1].double().cpu() for part in kept)), tokens.queries
    out = ops.gated_delta_net_step(qkv, z, of, weight, norm, kept, tokens)[:new].double().cpu()
    sizes = (*sizes_of(qkv, kept.state), TAPS, new)
    case = Case(op="gated_delta_net_step", world_size=1, dtype=qkv.dtype, sizes=sizes)
    inputs = (qkv[:new], z[:new], of.a[:new], of.b[:new], of.A_log, of.dt_bias, weight, norm[0])
    pending = None if tokens.pending is None else tokens.pending[:1].cpu()
    one = ops.DeltaTokens(tokens.lengths[:new].cpu(), tokens.slots[:1].cpu(), pending, tokens.most_pending)
    wanted = GATED_DELTA_NET_STEP.of_tokens(case, one, [x.double().cpu() for x in inputs] + list(first))[0]
    return ((out - wanted).abs().max() / wanted.abs().max()).item()


def latents(heads: int, batch: int, context: int, queries: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
    per = cdiv(context, PAGE)
    cache = draw(batch * per, PAGE, LATENT + ROPE)
    q, q_rope = draw(batch * queries, heads, LATENT), draw(batch * queries, heads, ROPE)
    pages = torch.randperm(batch * per, device="cuda").to(torch.int32).view(batch, per)
    lengths, scale = places([context] * (batch * queries)), (128 + 64) ** -0.5
    out, _ = ops.mla_decode_attention(q, q_rope, cache, pages, lengths, scale, queries)
    rows = cache[pages[0].long()].flatten(0, 1)[:context].float()
    scores = torch.cat((q[0], q_rope[0]), 1).float() @ rows.T * scale
    wanted = scores.softmax(1) @ rows[:, :LATENT]
    error = ((out[0].float() - wanted).abs().max() / wanted.abs().max()).item()
    nbytes = 2 * batch * context * (LATENT + ROPE)
    given = copies(lambda: cache.clone(), nbytes)
    result = timed(lambda c: ops.mla_decode_attention(q, q_rope, c, pages, lengths, scale, queries)[0], given, None)
    flops = 2 * batch * queries * heads * context * (2 * LATENT + ROPE)
    yield "latents", {**result, "error": error, "bytes": nbytes, "flops": flops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="skip what is left after this time")
    options = parser.parse_args()
    start, rows = time.monotonic(), Rows(options.out)

    def note(results: Iterator[tuple[str, dict[str, Any]]], **shape: int) -> None:
        for name, result in results:
            rows.add({**shape, "what": name, **result})
        torch.cuda.empty_cache()

    todo: list[tuple[Iterator[tuple[str, dict[str, Any]]], dict[str, int]]] = [
        *((prompts(*of), {"tokens": PROMPT, "key_heads": of[0], "heads": of[1]}) for of in HEADS),
        *(
            (steps(8, 24, batch, new), {"batch": batch, "key_heads": 8, "heads": 24, "queries": new})
            for new in (1, 4)
            for batch in BATCHES
        ),
        *((latents(*of), dict(zip(("heads", "batch", "context"), of, strict=True))) for of in LATENTS),
        (latents(16, 32, 4096, 4), {"heads": 16, "batch": 32, "context": 4096, "queries": 4}),
    ]
    for results, shape in todo:
        if time.monotonic() - start < options.seconds:
            note(results, **shape)


if __name__ == "__main__":
    main()
