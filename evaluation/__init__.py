"""The benchmark of decoding methods, its report, recommendations and the losslessness check."""
