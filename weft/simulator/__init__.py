"""N virtual GPUs in one process: a scheduler, a memory, an interpreter of Triton kernels.

``weft.simulate`` (in ``weft.runtime.simulate``) is the way in. Reading order: ``scheduler`` (tasks and who runs next),
``memory`` (addresses), ``machine`` (launches, streams, waiting), ``interpreter`` (all that touches Triton's internals).
"""
