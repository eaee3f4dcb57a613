"""Plans: the table of measured designs, the memo of plans, and their types."""
