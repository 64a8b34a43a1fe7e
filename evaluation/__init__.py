"""What shows that it works: the benchmark of decoding methods, its table and plots, and the report."""
