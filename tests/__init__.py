"""One thread for NumPy's BLAS, from the first import on: workers share few cores, and BLAS threads spin while they wait."""

import os

# NumPy reads it when it is loaded. Two threads made a matrix product of 128 x 128 x 64 300 times as slow beside other work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
