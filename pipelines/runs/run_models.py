"""Target of a run and its drafter.

The drafter is the draft model, or the run's draft head: see `Config.drafter`.
"""

from pathlib import Path
from typing import Any

from nde_talf.data.text.pair import LoneTarget, Pair
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.precision import type_of_draft
from nde_talf.decoding.threads import threads
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.draft_training.head_draft import HeadDraft
from nde_talf.pipelines.config.schema import PASSES, Config, ModelConfig
from nde_talf.pipelines.runs.finished import Run


def needs(config: Config) -> tuple[str, ...]:
    """Return the stages whose files hold the target and its drafter."""
    return ("pair", "draft") if config.drafter == "head" else ("pair",)


def timed_on(model: ModelConfig, drafter: str) -> dict[str, Any]:
    """Return the settings that decide how long a pass takes, and which two models are timed."""
    timed = {"drafter": drafter, **{key: getattr(model, key) for key in (*PASSES, "dtype")}}
    draft = type_of_draft(model.draft_dtype, model.dtype, model.device)
    other = draft != model.dtype and drafter == "lm"
    return {**timed, "draft_dtype": draft} if other else timed


def pair_of(run: Run) -> Pair:
    """Return the run's models, prompts and text; without a run a target alone."""
    return LoneTarget(run.target) if run.target else Pair(run.stage("pair"))


def load_drafted(config: Config, folders: dict[str, Path]) -> tuple[CausalModel, Any]:
    """Load the target, and the draft or the head; None where there is neither.

    Products of matrices are chosen under as many threads as decode.
    """
    pair, placed = Pair(folders["pair"]), config.model.placed
    with threads(config.evaluation.threads):
        if config.drafter == "lm":
            return pair.models(*placed)
        target = pair.target(*placed)
        if config.drafter == "nobody":
            return target, None
        return target, load_head_draft(folders["draft"] / "export", target)


def load_head_draft(folder: Path, target: CausalModel, any_weights: bool = False) -> HeadDraft:
    """Load the head in `folder` as a draft for `target`. any_weights: see `load_head`."""
    return HeadDraft(load_head(folder, target, any_weights=any_weights))
