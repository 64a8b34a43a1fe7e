"""The commands beside run: generate, check, recommend, dry runs."""
