"""Virtual GPUs in one process: scheduler, memory, launches and accesses."""
