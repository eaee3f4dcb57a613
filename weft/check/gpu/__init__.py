"""``weft check --gpu``: main on real GPUs under GSan, Triton's sanitizer for races."""
