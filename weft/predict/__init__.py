"""Prediction of overlapped ops on more GPUs than were measured: ``weft predict``."""
