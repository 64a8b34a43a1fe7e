"""Stage 1: super-trees at roots along the target's own text, their features and labels, and the store they are written to."""
