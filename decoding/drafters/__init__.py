"""Drafters: what proposes the tokens of a tree."""
