"""Target and draft as decoding runs them: loading, forward passes, caches, sessions."""
