"""GEMMs overlapped with communication."""
