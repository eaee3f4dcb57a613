"""Speculative decoding: drafters, and the step that verifies what they draft (docs/speculation.md)."""
