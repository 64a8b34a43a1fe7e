"""Draft heads: their layers by family, their passes in decoding and in training."""
