"""Measurements: each a command that writes a table of ratios, both sides interleaved."""
