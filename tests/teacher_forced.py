"""All logits of given tokens, as one prefill computes them."""

import torch


def all_logits(model, tokens):
    """tokens[batch, length] → [batch, length, V] in fp32, the same on every rank."""
    batch, length = tokens.shape
    each = -(-length // 64)
    cache = model.new_cache(1 + batch * each, 64)
    pages = 1 + torch.arange(batch * each, dtype=torch.int32, device=tokens.device).view(batch, each)
    step = model.prefill_step([(0, length)] * batch, pages, 64)
    return model.lm_head.gather(model(tokens.flatten(), step, cache)).float().view(batch, length, -1)
