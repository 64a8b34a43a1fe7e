"""Tables of the five papers, measured on a run's pair: one module a paper."""
