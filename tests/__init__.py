"""The tests, and helpers that several of them share.

A module of tests imports helpers, never another module of tests.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("decoding", "data", "selector", "draft_training", "evaluation", "pipelines", "nde_talf")
