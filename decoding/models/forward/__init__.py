"""Native forward passes of common families, with the weights of a transformers model."""
