"""Folders of draft heads: our export, and heads that others published."""
