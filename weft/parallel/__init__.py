"""Recipes: ways to compute a decoder layer over the ranks of a team.

step_plan.py chooses one per forward pass.

embed(tokens, table) -> x                                               this rank's, as the recipe's type
decoder_layer(x, residual, weights, step, cache) -> x, residual         x + residual are the hidden states
attention(normed, weights, step, cache) -> x; mlp(normed, weights) -> x  the halves of a layer
logits(x, residual, norm, head, step, rows) -> [n, V'/W]                after these tokens; None: after each
local                                                                   work between the collectives: fused.py or plain.py
"""
