"""Forward passes of our own for the families that matter, with the weights of a transformers model."""
