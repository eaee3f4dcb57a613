"""N virtual GPUs in one process: a scheduler, a memory and an interpreter of Triton kernels.

The entry point is ``weft.simulate`` (in ``weft.runtime.simulate``). Reading order: ``scheduler`` (tasks and the choice of the
next one), ``memory`` (addresses), ``machine`` (launches, streams, waits), ``interpreter`` (everything that touches Triton's
internals). ``weft check`` adds an observer, its detector (``weft.check.detector``).
"""
