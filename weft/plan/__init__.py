"""Plans: the table of measured choices, the memo of plans, and what a plan is made of."""
