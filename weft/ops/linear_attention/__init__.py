"""Linear attention: the gated delta rule, and the short convolution before it."""
