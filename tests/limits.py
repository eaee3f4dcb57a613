"""Limits in seconds of what tests wait for. They are for hangs, not for slow machines.

Each is ten times the slowest honest run on two cores with other work beside: about 50 s for a process that runs pytest (the op
of docs/adding-an-op.md), 12 s for a thread or process at work, 5 minutes for the GPU suite. pytest's own limit of a test, in
pyproject.toml, is larger than the first two, so that a test says what it waited for.
"""

PROCESS = 500
ANSWER = 120
SUITE = 3000
