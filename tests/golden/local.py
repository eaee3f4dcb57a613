"""Calls of the ops of one rank, on fixed random data."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import weft
from weft import ops
from weft.ops import DeferredNorm
from weft.ops.vocab.top_p_mass import LOWEST, SHIFTS, narrow

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
EPS = 1e-6
# (query heads, KV heads, head dim, page size)
HEADS = ((16, 2, 128, 64), (4, 4, 64, 16), (6, 2, 16, 32))
# Lengths of sequences, the new token included; 0 is a padding row.
LENGTHS = ((1,), (0, 63, 64, 65), (300, 0, 17, 128))


class Data:
    """Random tensors that depend on a case's name and their order only."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def order(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator)

    def deferred(self, x: torch.Tensor, parts: int) -> DeferredNorm:
        squares = 10 ** (2 * torch.rand((x.shape[-2], parts), generator=self.generator))
        return DeferredNorm(x, squares, EPS)


def shown(value: Any) -> Any:
    """A result as tensors and tuples of them."""
    if isinstance(value, DeferredNorm):
        return value.scaled, value.squares
    return tuple(shown(member) for member in value) if isinstance(value, tuple) else value


def rows(data: Data) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Element-wise ops and small-M GEMMs."""
    for M, N in ((1, 1024), (3, 300), (17, 80)):
        gate_up, x, residual = data(M, 2 * N), data(M, N), data(M, N)
        weight = 1 + data(N) / 8
        yield f"silu_mul-{M}x{N}", lambda g=gate_up: ops.silu_mul(g)
        yield f"sigmoid_mul-{M}x{N}", lambda g=gate_up, N=N: ops.sigmoid_mul(g[:, :N], g[:, N:])
        norm = data.deferred(gate_up, 5)
        yield f"silu_mul-{M}x{N}-deferred", lambda g=norm: ops.silu_mul(g)
        yield f"add_rms_norm-{M}x{N}", lambda a=(x, residual, weight): ops.add_rms_norm(*a, EPS)
        tokens, weight = torch.arange(M) * 7 % 50, data(40, N)
        yield f"embed_rows-{M}x{N}", lambda a=(tokens, weight): ops.vocab_embedding(*a, 8)
    for M, N, K in ((1, 96, 256), (7, 64, 512), (40, 96, 136)):
        x, weight = data(M, K), data(N, K) / K**0.5
        for name in ("matmul", "matmul_silu_mul", "matmul_parts"):
            op = getattr(ops, name)
            yield f"{name}-{M}x{N}x{K}", lambda op=op, a=(x, weight): op(*a)
            if name != "matmul" and data.dtype == torch.bfloat16:
                norm = data.deferred(x, 4)
                yield f"{name}-{M}x{N}x{K}-deferred", lambda op=op, a=(norm, weight): op(*a)


def attention(data: Data) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ops on a paged cache, whose contents are part of the result."""
    for q_heads, kv_heads, D, S in HEADS:
        for lengths in LENGTHS:
            B, width = len(lengths), (q_heads + 2 * kv_heads) * D
            most = -(-max(lengths) // S) + 1
            pages = data.order(B * most).to(torch.int32).view(B, most)
            cache = [data(B * most, kv_heads, S, D) for _ in range(2)]
            weights = [1 + data(D) / 4 for _ in range(2)]
            angles = data(max(lengths) + 1, D, dtype=torch.float32)
            held = torch.tensor(lengths, dtype=torch.int32)
            name = f"{q_heads}-{kv_heads}-{D}-{S}-{'_'.join(map(str, lengths))}"
            qkv = data(B, width)
            kinds = {"": qkv, "-split": data(3, B, width, dtype=torch.float32), "-deferred": data.deferred(qkv, 20)}
            for kind, given in kinds.items():

                def decode(given=given, weights=weights, angles=angles, cache=cache, pages=pages, held=held):
                    mine = [x.clone() for x in cache]
                    return ops.decode_attention(given, *weights, EPS, angles, *mine, pages, held), *mine

                yield f"decode_attention-{name}{kind}", decode

                def rotate(given=given, weights=weights, angles=angles, cache=cache, pages=pages, held=held, S=S):
                    mine = [x.clone() for x in cache]
                    at, slots, *rest = ops.decode_metadata(held.long() - 1, pages, S, 8)
                    q = ops.qk_norm_rope(given, *weights, EPS, angles, at, slots, *mine)
                    return q, at, slots, *rest, *mine

                yield f"qk_norm_rope-{name}{kind}", rotate
            q = data(B, q_heads, D)
            yield f"paged_attention-{name}", lambda a=(q, *cache, pages, held): ops.paged_attention(*a)
            spans = [(length // 2, length - length // 2) for length in lengths]
            q = data(sum(length for _, length in spans), q_heads, D)
            yield f"paged_prefill_attention-{name}", lambda a=(q, *cache, pages, spans): ops.paged_prefill_attention(*a)


def sampling(data: Data) -> Iterator[tuple[str, Callable[[], Any]]]:
    for B, N in ((1, 5000), (5, 1025)):
        logits = 4 * data(B, N)
        temperature = torch.linspace(0, 2, B)
        seed, position = torch.arange(B) * 12_345_678_901, torch.arange(B)
        yield f"best_words-{B}x{N}", lambda a=(logits, 7): ops.join_argmax(ops.sample_argmax(*a))
        sampled = (logits, 7, temperature, seed, position)
        yield f"best_words-{B}x{N}-sampled", lambda a=sampled: ops.join_argmax(ops.sample_argmax(*a))

        def nucleus(logits=logits, temperature=temperature, B=B):
            low = torch.full((B,), LOWEST, dtype=torch.int32)
            wanted = torch.zeros(B, dtype=torch.int64)
            best, top_p = logits.float().amax(dim=1), torch.full((B,), 0.8)
            for shift in SHIFTS:
                narrow(ops.top_p_mass(logits, best, temperature, low, shift), top_p, low, wanted, shift)
            return low, wanted

        yield f"likelihood_above-{B}x{N}", nucleus


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    for group in (rows, attention, sampling):
        for dtype in DTYPES:
            for name, run in group(Data(f"{group.__name__} {dtype}", DTYPES[dtype])):
                yield f"local/{name}-{dtype}", lambda run=run: weft.simulate(lambda team: shown(run()), 1)[0]
