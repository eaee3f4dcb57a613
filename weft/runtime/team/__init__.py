"""A rank's end of a team: symmetric heap, workspaces, channels, rendezvous of hosts."""
