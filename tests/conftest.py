"""Threads that hardly spin while they wait, set before torch is imported: test machines are shared."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models under test are too small for two
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
