"""Integrations of weft in torch, transformers and vLLM: one file each, imported by its name."""
