"""Lossless verification of draft trees: one rule a file, and the walks that rules share."""
