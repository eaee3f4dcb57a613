"""Activations of a gated MLP's gate, in fp32."""

import triton
import triton.language as tl

ACTIVATIONS = ("silu", "gelu_tanh")
"""Names: silu(x) = x * sigmoid(x), and GELU by a hyperbolic tangent, x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))."""
SLOPE, CUBE = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """Activation of fp32 ``gate``, by its name."""
    if ACTIVATION == "gelu_tanh":
        turned = gate * (SLOPE + SLOPE * CUBE * gate * gate)
        return gate / (1.0 + tl.exp(-turned))
    else:
        return gate / (1.0 + tl.exp(-gate))
