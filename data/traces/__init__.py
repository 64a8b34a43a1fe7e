"""Stage traces: super-trees along the target's text, their features, their labels, their store."""
