"""NDE: a small network that picks the delayed tree (K, L1, L2) to draft at every decoding step."""
