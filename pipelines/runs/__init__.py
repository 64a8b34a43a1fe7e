"""Folders of runs: locks, manifests, records, and decoders made from finished runs."""
