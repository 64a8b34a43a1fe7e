"""Targets of a head's training: trees of the target with its features, and documents in rows."""
