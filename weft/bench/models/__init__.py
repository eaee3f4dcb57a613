"""Benchmarks of model steps, whole models and single layers: weft against plain torch with NCCL."""
