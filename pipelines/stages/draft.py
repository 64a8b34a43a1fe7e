"""Stage draft: train a draft head, evaluate it on held-out text, export it.

It learns from the pair's text, or from dialogues (`nde_talf.pipelines.stages.dialogues`).
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nde_talf.data.dialogues.settings import DialogueConfig
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.data.text.corpus import source_digest
from nde_talf.data.text.pair import Pair, spread
from nde_talf.data.text.settings import ANSWERS, SELF, DataConfig
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.decoding.common.checksums import file_digest
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_json
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.device import free_memory
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.draft_training.export.head_format import load_head, save_head, write_head_card
from nde_talf.draft_training.export.published_heads import FILES
from nde_talf.draft_training.model.families import NoHeadError, not_for_vllm
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.training.head_evaluation import SAMPLED, held_out_report
from nde_talf.draft_training.training.head_training import build_head, fit_head
from nde_talf.draft_training.training_settings import OPERATIONAL, HeadConfig
from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.runs.tracking import Tracker
from nde_talf.pipelines.stages.dialogues import asked_dialogues, dialogue_rows
from nde_talf.pipelines.stages.stage import Stage

REPORTED = 50  # trained rows to one that the figures are computed on: a tenth of the time
HELD_OUT_DEPTH = 3  # of the trees that they are computed on, where the loss has none


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    start = config.draft.warm_start
    weights = [path for name in FILES if start and (path := Path(start) / name).exists()]
    return {
        "draft": {k: v for k, v in asdict(config.draft).items() if k not in OPERATIONAL},
        "dialogues": asdict(config.dialogues) if config.chats else None,
        "warm_start": file_digest(weights[0]) if weights else None,
        "file": source_digest(config.dialogues.source or ""),
    }


def work(config: Config, folders: dict[str, Path], tracker: Tracker) -> dict[str, Any]:
    """Train the draft head and export it; return the figures for the manifest."""
    if config.model.device_map:
        raise NoHeadError(
            "model.device_map lays the target over several devices, and a head is trained beside a"
            " target on one. Leave device_map out, or evaluate without the head"
            " (evaluation.methods=[selector,assisted])."
        )
    folder, pair, draft = folders["draft"], Pair(folders["pair"]), config.draft
    tokenizer = load_tokenizer(pair.where("target"))
    own = asked_dialogues(config.dialogues, config.data.source, tokenizer)
    loss = draft.loss
    load = partial(pair.target, config.model.device, config.model.dtype)
    target = load()
    # A tree at a row's last token fits the target's context too.
    room = target.max_context - max(loss.depth, SAMPLED)
    tell_engines(build_head(target, draft))  # raises before any text is read or written
    if own.regenerate:
        del target  # an engine writes the answers, and the device's memory is its own until then
        free_memory()
    if own.source:
        rows, held_out = dialogue_rows(config, own, folders, tokenizer, room)
    else:
        rows, held_out = _rows_of_text(pair)
    if own.regenerate:
        free_memory()
        target = load()
    rows, held_out = rows.cut(room), held_out.cut(room)
    rows_of_steps = draft.steps * draft.batch * draft.accumulate * draft.devices
    console.print(f"{len(rows):,} rows, each {rows_of_steps / len(rows):.1f} times")
    most = draft.held_out_rows or min(12, max(1, rows_of_steps // REPORTED))
    some, curves = spread(held_out, 2 * most), tracker.loggers("head")
    head = fit_head(target, rows, draft, folder / "training", curves, held_out=some[::2])
    facts, others = _facts(config.data, own), some[1::2] or some
    report = export_head(head, target, draft, rows, others, folder / "export", facts)
    write_json(folder / "held_out.json", report)
    agreement = ", ".join(f"{value:.3f}" for value in report["agreement"])
    console.print(f"held-out top-1 agreement with the target by depth: {agreement}")
    tell_engines(head)
    return report


def tell_engines(head: EagleHead) -> None:
    """Print why vLLM cannot serve a head, if it cannot."""
    if reason := not_for_vllm(head.family):
        console.print(f"! {reason}")


def _rows_of_text(pair: Pair) -> tuple[TokenRows, TokenRows]:
    """Return the pair's text to learn from, and its held-out text. Raises UserError without any."""
    rows, held_out = (TokenRows.plain(pair.rows(part)) for part in ("train", "held_out"))
    if not len(rows):
        raise UserError(
            f"{pair.folder}: this pair was made for a head that learns from dialogues, and"
            " holds no text to learn from. Give the dialogues (dialogues=...), or make it"
            " again without them: stage=pair force=true."
        )
    return rows, held_out


def export_head(
    head: EagleHead,
    target: CausalModel,
    config: HeadConfig,
    rows: TokenRows,
    held_out: TokenRows,
    folder: Path,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Export a trained head with its card, and return its figures on held-out rows.

    Args:
        head: read again in the target's dtype, as it is served.
        target: of the head.
        config: how it was trained.
        rows: what it was trained on.
        held_out: rows that neither trained it nor chose its weights.
        folder: where it goes.
        facts: what the card says of the text.
    """
    loss, head = config.loss, load_head(save_head(head, folder), target)
    depth = loss.depth if loss.depth > 1 else HELD_OUT_DEPTH
    report = held_out_report(head, target, held_out, loss.k, depth)
    facts |= {
        "rows": f"{len(rows)} of {rows.tokens.shape[1]} tokens",
        "loss": asdict(loss),
        "steps": f"{config.steps} of {config.batch * config.accumulate * config.devices} rows",
        "seed": config.seed,
    }
    write_head_card(folder, head, facts, report)
    return report


def _facts(data: DataConfig, dialogues: DialogueConfig) -> dict[str, Any]:
    """Describe the text for the head's card, without paths of this machine."""
    texts = [dialogues.source] if dialogues.source else data.mix or [data.source]
    own = not dialogues.source and data.source in (ANSWERS, SELF)
    if data.sets and own:
        texts = [str(one.source) for one in data.sets.values()]
    return {
        "text": ", ".join(Path(each).name if Path(each).exists() else each for each in texts),
        "answers": "written by the target" if own or dialogues.regenerate else "as in the text",
    }


STAGE = Stage("draft", "draft", lambda config: ("pair",), settings, work)
