"""Quieter output of other libraries. Import it before them: they read their environment once."""

import logging
import os
import warnings
from typing import Any

from nde_talf.decoding.common.errors import Advice
from nde_talf.decoding.common.progress import console

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def quiet() -> None:
    """Silence routine notices; warnings that concern the user's own settings stay."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in ("pytorch_lightning", "lightning.pytorch", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    routine = (
        "treespec, LeafSpec",
        "does not have many workers",
        "number of training batches",
        "You defined a `validation_step`",
        "Checkpoint directory .* exists and is not empty",
    )
    for text in routine:
        warnings.filterwarnings("ignore", message=f".*{text}")
    # Short of memory, torch would take a kernel that rounds otherwise, and the result would
    # be another one.
    warnings.filterwarnings("error", message="mkldnn.* failed, switching to")


def show_warning(
    message: Warning | str, category: type[Warning], *where: Any, **options: Any
) -> None:
    """Print advice as one line, other warnings as Python does."""
    if issubclass(category, Advice):
        console.print(f"! {message}")
    else:
        _standard(message, category, *where, **options)


_standard, warnings.showwarning = warnings.showwarning, show_warning
