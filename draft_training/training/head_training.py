"""Training of a draft head beside its frozen target, with the loss of TALF, HASS or EAGLE.

Each step takes rows of tokens and runs the head along them, and then on its own output features, as
decoding does: over trees that the target builds after some tokens (TALF), over the text itself
(HASS), or not at all (EAGLE). Early steps may stop at depth 0, which a head learns most from, and
at the least cost.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor, nn

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.choose_forward import native_forward
from nde_talf.decoding.models.forward.transformers import optional
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.draft_training.model.draft_vocab import (
    COVERED,
    SMALL,
    fraction_inside,
    frequent_tokens,
)
from nde_talf.draft_training.model.eagle3 import Eagle3Head
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.model.tree_attention import tree_features
from nde_talf.draft_training.targets.document_masks import choose_roots, counted_roots
from nde_talf.draft_training.targets.feature_cache import FeatureCache, Features
from nde_talf.draft_training.targets.target_trees import (
    TargetTrees,
    chains,
    target_beam,
    target_features,
)
from nde_talf.draft_training.training.losses import HeadReadout, tree_loss
from nde_talf.draft_training.training.precision import cast_once
from nde_talf.draft_training.training.processes import LocalProcesses
from nde_talf.draft_training.training.readout_timing import readout_gains
from nde_talf.draft_training.training.trainer import RowModule, train_rows, warm_up_then_cosine
from nde_talf.draft_training.training_settings import FAMILY, EagleLoss, HeadConfig


def build_head(
    target: CausalModel, config: HeadConfig, vocabulary: Tensor | None = None
) -> EagleHead:
    """Build the initial head of a training, in float32.

    It is random, a pure function of the arguments, or the head in `config.warm_start` with its own
    draft vocabulary. A head on the target's readout takes `vocabulary` if it has none, or if
    another size is configured.

    Raises UserError as `load_head` does.
    """
    dtype = torch.promote_types(target.dtype, torch.float32)
    if config.warm_start:
        head = load_head(config.warm_start, target, dtype)
        return _warm_start(head, config, vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.features == "three":
            return Eagle3Head(target, config.layer, vocabulary, config.norms, dtype=dtype)
        return EagleHead(target, config.layer, dtype, vocabulary=vocabulary)


def _warm_start(head: EagleHead, config: HeadConfig, vocabulary: Tensor | None) -> EagleHead:
    """Make a loaded head trainable. Raises UserError if it differs from the configuration."""
    three, auto = config.features == "three", config.draft_vocab == "auto"
    drafted = None if head.vocabulary is None else len(head.vocabulary)
    same = isinstance(head, Eagle3Head) == three and {*head.norms} == {*config.norms}
    same &= config.layer in (FAMILY, head.family.name)
    same &= auto or not three or drafted == config.draft_vocab
    if not same:
        raise UserError(
            f"draft.warm_start={config.warm_start}: its head is of kind {head.kind} with"
            f" norms=[{','.join(head.norms)}] and a {head.family.name} layer, and drafts"
            f" {drafted or 'all'} tokens, which is no head of draft.features={config.features}"
            f" with draft.layer={config.layer}, draft.norms=[{','.join(config.norms)}] and"
            f" draft.draft_vocab={config.draft_vocab}."
        )
    if not three and (drafted is None or not auto):
        head.vocabulary = vocabulary
    if head.other_sizes.pop("fc_bias", False):  # of a published head; vLLM would leave it out
        head.fc.register_parameter("bias", None)
    return head.requires_grad_(True).train()


class HeadModule(RowModule):
    """Trains `head` on batches of rows.

    The checkpoint holds the head's weights alone; the target is frozen.
    """

    config: HeadConfig
    title = "training the head"
    in_bar = ("loss", "accepted_length")

    def __init__(self, head: EagleHead, config: HeadConfig):
        super().__init__(config)
        self.head = head
        self.register_buffer("vocabulary", head.vocabulary)  # into the checkpoint
        self.frozen, self.place = [head.target.module], head.target.device
        # The SALF & TALF paper begins with EAGLE's loss.
        fresh = config.features == "final" and not config.warm_start
        self.first = EagleLoss() if fresh and not config.loss.regression else config.loss
        self.along: Features = partial(target_features, head.target, layers=head.feature_layers)

    @property
    def trained(self) -> nn.Module:
        """See `RowModule`."""
        return self.head

    def matrices(self) -> list[nn.Parameter]:
        """See `RowModule`."""
        if self.config.optimizer != "muon":
            return []
        inner = self.head.fc, self.head.layers
        return [weight for part in inner for weight in part.parameters() if weight.ndim == 2]

    def learning_rate_fraction(self, step: int) -> float:
        """See `RowModule`."""
        steps, trees = self.config.steps, step - self.config.chain_fraction * self.config.steps
        warm_up = min(self.config.warm_up, steps // 2)
        fraction = warm_up_then_cosine(step, steps, warm_up)
        if 0 <= trees < min(step, warm_up):  # their loss is another one
            fraction *= (int(trees) + 1) / warm_up
        return fraction

    def on_fit_start(self) -> None:
        """Move the target to this process's device: it is no submodule, so Lightning does not.

        Raises UserError for quantised weights, which cannot be moved.
        """
        target = self.head.target
        if target.device == self.device:
            return
        if optional(target.module, "is_quantized", False):
            raise UserError(
                f"{target.name}: quantised weights cannot be moved to {self.device}; load them"
                " there (model.device)."
            )
        nn.Module.to(target.module, self.device)
        target.device = self.device

    on_validation_start = on_fit_start  # of a process that only validates

    def loss(self, batch: TokenRows, step: int, part: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """See `RowModule`: `tree_loss` of the head on the roots of one pass."""
        config, loss = self.config, self.config.loss
        document = batch.document if batch.packed else None
        chain = step < config.chain_fraction * config.steps
        depth = 1 if chain else loss.depth
        # 1. Roots: all counted ones at depth 0, and some of them with trees.
        counts = counted_roots(batch.loss, batch.document)
        every = counts[:, 1:] / counts.sum().clamp(min=1)
        complete = (
            counts  # roots whose full tree counts; along the text all of its tokens must count
        )
        for ahead in range(1, 1 if loss.target_trees else depth):
            complete = complete & counted_roots(batch.loss, batch.document, ahead)
        generator = torch.Generator().manual_seed((config.seed * 1_000_003 + step) * 1009 + part)
        roots, weights = choose_roots(complete, config.roots if depth > 1 else 1, generator)
        # 2. The target's trees and labels, and the head along them.
        trees = self._trees(batch.tokens, document, roots, depth)
        detach = loss.detach_features
        loss = self.first if chain else loss
        outputs = tree_features(
            self.head, trees.tokens, trees.features, trees.roots, trees.levels, detach, document
        )
        # 3. The loss. At depth 0 every token is a root with a tree of one node.
        outputs = [self.head.read(level) for level in outputs]
        outputs[0] = outputs[0].flatten(0, 1)[:, None]
        labels = [trees.along[:, 1:].flatten(0, 1)[:, None], *trees.labels]
        readout = HeadReadout.of(self.head)
        return tree_loss(outputs, labels, readout, loss, [every] + [weights] * (len(outputs) - 1))

    def counted(self, batch: TokenRows) -> int:
        """See `RowModule`: counts roots."""
        return int(counted_roots(batch.loss, batch.document).sum())

    def _trees(
        self, tokens: Tensor, document: Tensor | None, roots: Tensor, depth: int
    ) -> TargetTrees:
        """Build the trees after `roots` [B, R] of the rows `tokens` [B, L], with their labels."""
        target, loss, layers = self.head.target, self.config.loss, self.head.feature_layers
        if loss.target_trees and depth > 1:
            return target_beam(target, tokens, loss.k, depth, roots, document, layers)
        with torch.no_grad():
            along, features = self.along(tokens, document)
        return replace(chains(tokens, along, roots, depth), features=features)


def fit_head(
    target: CausalModel,
    rows: TokenRows | Tensor,
    config: HeadConfig,
    folder: Path,
    logger: Logger | list[Logger] | None = None,
    callbacks: Sequence[pl.Callback] = (),
    held_out: TokenRows | Tensor | None = None,
) -> EagleHead:
    """Train a head for `target` and return it, in evaluation mode, on the target's device.

    Its weights are float32, whatever the target's dtype.

    A killed run resumes from `folder/last.ckpt` and ends with the same weights. A finished run
    trains no further. The precision, chosen where `draft.precision=auto`, is printed and is the
    head's `trained_in`.

    Args:
        target: frozen.
        rows: with loss masks and documents, or plain token ids [rows, length], of which every token
            counts.
        config: of the training.
        folder: of checkpoints.
        logger: of the metrics `loss`, `loss_depth_d` (nats per node, weighted terms),
            `agreement_depth_d` (top-1, per node), `accepted_length` (tokens per target pass as
            predicted from the agreements, without branches), `lr`, `tokens_per_second` and
            `held_out_loss`.
        callbacks: of Lightning.
        held_out: rows too, for `config.evaluate_every`. The head is then the one with the lowest
            loss on them.

    Raises:
        UserError: the loss diverges, the checkpoint is of other settings or another precision,
            rows and trees do not fit the target, or held-out rows are missing.
    """
    if target.device.type == "cuda" and config.devices > torch.cuda.device_count():
        raise UserError(
            f"draft.devices={config.devices}: this machine has {torch.cuda.device_count()} GPUs."
            " Use no more."
        )
    rows = training_rows(rows, target, config)
    if not config.evaluate_every:
        held_out = None
    elif held_out is None:
        raise UserError(
            f"draft.evaluate_every={config.evaluate_every}: there are no held-out rows to evaluate"
            " on. Give held_out, or leave evaluate_every at 0."
        )
    else:
        held_out = training_rows(held_out, target, config)
    head = build_head(target, config, _vocabulary(rows, target, config))
    if head.vocabulary is not None:
        inside = fraction_inside(rows, head.vocabulary.cpu())
        console.print(
            f"{len(head.vocabulary)} of {target.vocab_size} tokens can be drafted: {inside:.1%} of"
            " the training text"
        )
    module = HeadModule(head, config)
    options: dict[str, Any] = {}
    if config.devices > 1:
        options = {"devices": config.devices, "strategy": LocalProcesses(folder)}
    cache = None  # on a GPU a pass may be faster than a disk
    if target.device.type == "cpu" and config.rows_along() >= 2 * len(rows):
        cache = module.along = FeatureCache(module.along, rows, folder)
    with _through_transformers(target), cast_once(target.module, module.trained_in):
        train_rows(
            module,
            rows,
            folder,
            logger,
            callbacks,
            config.batch * config.accumulate,
            held_out,
            **options,
        )
    if cache:
        cache.close()
    for left in folder.glob(".processes.*"):  # by a process that was killed, or ended early
        left.unlink(missing_ok=True)
    module.head.trained_in = module.trained_in
    return module.head.eval().requires_grad_(False).to(target.device)


def _vocabulary(rows: TokenRows, target: CausalModel, config: HeadConfig) -> Tensor | None:
    """Return the ids that a head can draft; None: all."""
    asked = config.draft_vocab
    if asked is None or (asked == "auto" and target.vocab_size < SMALL):
        return None
    size = COVERED if asked == "auto" else float(asked)
    vocabulary = frequent_tokens(rows, size, target.vocab_size)
    if asked != "auto" or vocabulary is None:
        return vocabulary
    return vocabulary if readout_gains(target.readout.weight.detach(), vocabulary) else None


@contextmanager
def _through_transformers(target: CausalModel) -> Iterator[None]:
    """Run the target's passes by transformers inside the block.

    The native pass would keep copies of weights that are cast.
    """
    native, target.native = target.native, None
    try:
        yield
    finally:
        if native:
            target.native = native_forward(target, native.way)


def training_rows(rows: TokenRows | Tensor, target: CausalModel, config: HeadConfig) -> TokenRows:
    """Select the rows with counted roots.

    Raises UserError if there are none, or if rows do not fit target or trees.
    """
    rows = rows if isinstance(rows, TokenRows) else TokenRows.plain(rows)
    length, depth = rows.tokens.shape[1], config.loss.depth
    if length < depth + 2:
        raise UserError(
            f"rows of {length} tokens are too short for draft.loss.depth={depth}: a root needs a"
            f" token before it and {depth} after it. Use longer rows ({depth + 2} or more) or a"
            " smaller depth."
        )
    useful = counted_roots(rows.loss, rows.document).any(1)
    if not bool(useful.any()):
        raise UserError(
            "none of the rows has a token whose prediction counts (two tokens or more into its"
            " document): is there an assistant's turn in the dialogues, and was the chat template's"
            " mask applied?"
        )
    lowest, highest = map(int, rows.tokens.aminmax())
    if lowest < 0 or highest >= target.vocab_size:
        raise UserError(
            f"tokens: ids up to {highest} for a target of {target.vocab_size}: encode them with its"
            " tokenizer."
        )
    return rows[useful]
