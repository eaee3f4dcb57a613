"""``weft check --gpu``: the same main on real GPUs under GSan, Triton's sanitizer for races, beside the simulator's check."""
