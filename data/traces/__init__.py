"""Stage traces: super-trees at roots along the target's own text, their features and labels, and
the store that keeps them.
"""
