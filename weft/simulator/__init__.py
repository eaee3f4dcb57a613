"""N virtual GPUs in one process: a scheduler, a memory and an interpreter of Triton kernels.

The entry point is ``weft.simulate`` (in ``weft.runtime.simulate``). Reading order: ``machine.tasks`` and ``machine.scheduler``,
``machine.memory`` (addresses), ``machine.accesses``, ``machine.launches`` and ``machine.machine`` (streams, waits),
``interpreter`` (kernels). ``observer`` has the events that a machine sends to a check.
"""
