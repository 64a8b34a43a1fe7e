"""Every table and figure of the five papers, measured on a run's pair: `python -m
evaluation.papers`.

- `frame`: what a table and a claim are, and how they are written.
- `resampled`: figures that carry their bootstrap samples.
- `bench`: a run's pair, its prompts, and the folder in which everything measured is kept.
- `labelled`: cells from labels of super-trees; `decoded`: cells from the decode loop.
- `nde`, `gbv`, `dynatree`, `talf`, `dyspec`: one paper each. `printed` holds what the papers print.
"""
