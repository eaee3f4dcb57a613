"""All logits of given tokens, as a prefill, chunks of it, or decoding computes them."""

from itertools import pairwise

import torch


def all_logits(model, tokens):
    """tokens[batch, length] → [batch, length, V] in fp32, the same on every rank."""
    batch, length = tokens.shape
    each = -(-length // 64)
    cache = model.new_cache(1 + batch * each, 64)
    pages = 1 + torch.arange(batch * each, dtype=torch.int32, device=tokens.device).view(batch, each)
    step = model.prefill_step([(0, length)] * batch, pages, 64)
    return model.lm_head.gather(model(tokens.flatten(), step, cache)).float().view(batch, length, -1)


def in_three_ways(model, tokens, cuts):
    """All logits [batch, length, V]: by one prefill, in chunks cut at `cuts`, by decoding after a prefill of two tokens."""
    device = model.team.device
    tokens = tokens.to(device)
    batch, length = tokens.shape
    # Pages in no order.
    table = (1 + torch.randperm(batch * 8, generator=torch.Generator().manual_seed(0))).view(batch, 8)
    table = table.to(torch.int32).to(device)

    def gathered(part, step, cache):
        return model.lm_head.gather(model(part.flatten(), step, cache)).view(*part.shape, -1)

    def prefill(before, end, cache):
        return gathered(tokens[:, before:end], model.prefill_step([(before, end - before)] * batch, table, 16), cache)

    def new_cache():
        return model.new_cache(1 + batch * 8, 16)

    cache = new_cache()
    in_chunks = [prefill(before, end, cache) for before, end in pairwise((0, *cuts, length))]
    cache = new_cache()
    decoded = [prefill(0, 2, cache)]
    for at in range(2, length):
        step = model.decode_step(torch.full((batch,), at, device=device), table, 16)
        decoded.append(gathered(tokens[:, at : at + 1], step, cache))
    return [
        found.float().cpu() for found in (all_logits(model, tokens), torch.cat(in_chunks, 1), torch.cat(decoded, 1))
    ]
