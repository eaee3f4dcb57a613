"""Programs on ``torch.distributed._symmetric_memory``, run on virtual ranks without an edit.

``program`` runs a file on each rank, in separate ``processes`` as far as a thread can have one. While they run, ``scope``
replaces the parts of torch that need GPUs: ``devices`` (tensors), ``streams``, ``groups`` (collectives) and ``symmetric``.
"""
