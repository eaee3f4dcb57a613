"""Whole steps of a model, whole models and single layers: weft beside plain torch with NCCL."""
