"""Measurements, each a command that prints a table and writes it to benchmarks/results/: ratios
from one run, both sides interleaved, medians.
"""
