"""Mixture of experts: their choice, the way of rows to them and back, and their GEMMs."""
