"""Benchmark of decoding methods, report, recommendations, and the test of losslessness."""
