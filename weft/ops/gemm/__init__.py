"""GEMMs of one rank: cuBLAS, small-M and persistent kernels."""
