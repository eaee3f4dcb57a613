"""Grouped GEMMs, each expert's weight times the rows of its pairs: what their ops share."""
