"""Training a small causal language model from scratch, and distilling a smaller one from it.

One module serves both. Without a teacher the loss is the next token's negative log-likelihood; with
one it is the KL divergence from the teacher's next-token distribution.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import Logger
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.draft_training.training.trainer import RowModule, train_rows, warm_up_then_linear
from nde_talf.draft_training.training_settings import LanguageModelConfig

COOL_DOWN = 0.6
"""Fraction of the steps, at the end, over which the learning rates fall to 0."""
TEMPERATURES = (1.0, 0.6)
"""Temperatures at which `held_out_report` compares target and draft."""
AT_ONCE, NUMBERS = 8, 1 << 26
"""Rows per pass of `held_out_report`, and most probabilities in its memory."""
LOGITS = 1 << 27
"""Most logits of a training's pass, unless one row has more; seven such tensors are held."""


def build_llama(
    config: LanguageModelConfig,
    vocab_size: int,
    end_of_text: int = 0,
    like: PreTrainedModel | None = None,
) -> LlamaForCausalLM:
    """Build a Llama with fresh fp32 weights, a pure function of the arguments.

    Args:
        config: its sizes.
        vocab_size: of its tokenizer.
        end_of_text: id of the token that begins and ends documents.
        like: a model of the same vocabulary. If it is a Llama of the same hidden size, its token
            embeddings, final norm and lm_head are copied: a draft learns faster from these.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=config.hidden,
                intermediate_size=config.intermediate,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.heads,
                max_position_embeddings=config.max_length,
                tie_word_embeddings=config.tied,
                bos_token_id=end_of_text,
                eos_token_id=end_of_text,
            )
        )
    if isinstance(like, LlamaForCausalLM) and like.config.hidden_size == config.hidden:
        for part in ("model.embed_tokens", "model.norm", "lm_head"):
            model.get_submodule(part).load_state_dict(like.get_submodule(part).state_dict())
    return model


class LanguageModel(RowModule):
    """Trains `model` on rows of tokens, or distils it from a `teacher` of the same vocabulary.

    Muon trains the matrices of the layers. The teacher is no part of the checkpoint.
    """

    config: LanguageModelConfig

    def __init__(
        self,
        model: LlamaForCausalLM,
        config: LanguageModelConfig,
        teacher: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(config)
        self.model = model
        if teacher is not None:  # a list hides it from state_dict
            self.frozen = [teacher.eval().requires_grad_(False)]
        self.title = "training the target" if teacher is None else "distilling the draft"

    @property
    def trained(self) -> nn.Module:
        """See `RowModule`."""
        return self.model

    def matrices(self) -> list[nn.Parameter]:
        """See `RowModule`."""
        return [p for p in self.model.model.layers.parameters() if p.ndim == 2]

    def learning_rate_fraction(self, step: int) -> float:
        """See `RowModule`."""
        steps = self.config.steps
        return warm_up_then_linear(step, steps, self.config.warm_up, COOL_DOWN * steps)

    def in_pass(self, batch: Tensor) -> int:
        """See `RowModule`."""
        row = batch.shape[1] * self.model.config.vocab_size
        return min(self.config.batch, max(1, LOGITS // row))

    def on_fit_start(self) -> None:
        """Move the teacher, which is no submodule, to this process's device."""
        for teacher in self.frozen:
            if teacher.device != self.device:  # a teacher on several devices stays
                teacher.to(self.device)

    def loss(self, batch: Tensor, step: int = 0, part: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss over the positions of rows [B, T], in nats per token."""
        logits = self.model(batch, use_cache=False).logits
        if not self.frozen:
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten()), {}
        with torch.no_grad():
            target = self.frozen[0](batch, use_cache=False).logits
        log_q, log_p = (z.flatten(0, 1).float().log_softmax(-1) for z in (logits, target))
        return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True), {}


def fit(
    module: LanguageModel,
    tokens: Tensor,
    folder: Path,
    logger: Logger | list[Logger] | None = None,
) -> LlamaForCausalLM:
    """Train `module` for `config.steps` steps and return its model, evaluating, on the CPU.

    A killed run resumes from `folder/last.ckpt` and ends with the same weights. A finished run
    trains no further. The precision is printed, and stored in the model as `config.trained_in`.

    Args:
        module: to train.
        tokens: rows of token ids, [rows, length], as `nde_talf.data.text.tokenizer.pack` makes
            them.
        folder: of the checkpoint; it is created.
        logger: of the metrics `loss` (nats per token), `lr` and `tokens_per_second`.

    Raises:
        UserError: the loss diverged, or the checkpoint is of a run with other settings.
    """
    train_rows(module, tokens, folder, logger)
    module.model.config.trained_in = module.trained_in
    return module.model.eval().cpu()


@torch.inference_mode()
def held_out_report(
    target: CausalModel,
    draft: CausalModel | None,
    tokens: Tensor,
) -> dict[str, Any]:
    """Measure how well the pair predicts held-out rows, and how well the draft agrees.

    Args:
        target: the model to predict.
        draft: the model that predicts; None: only the target's figures.
        tokens: [rows, length].

    Returns:
        `positions` (count), `target_nats` and `draft_nats` (nats per token; 0 for a token outside
        the draft's vocabulary), `greedy_agreement` (fraction of positions with the same most likely
        token) and `overlap`: temperature -> mean of sum_v min(p(v), q(v)).
    """
    totals: dict[Any, float] = defaultdict(float)
    models = [target, draft] if draft else [target]
    for rows in tokens.split(AT_ONCE):
        states = [_states(model, rows[:, :-1]) for model in models]
        following = rows[:, 1:].flatten().to(target.device)
        parts = [x.split(max(1, NUMBERS // target.vocab_size)) for x in (following, *states)]
        for following, *some in zip(*parts, strict=True):
            p, *others = (
                model.logits(x).to(target.device, torch.float32)
                for model, x in zip(models, some, strict=True)
            )
            totals["target_nats"] += F.cross_entropy(p, following, reduction="sum").item()
            for q in others:
                _add(totals, p, q, following)
    positions = tokens[:, 1:].numel()
    report: dict[Any, Any] = {name: total / positions for name, total in totals.items()}
    report["positions"] = positions
    if draft:
        report["overlap"] = {at: report.pop(at) for at in TEMPERATURES}
    return report


def _add(totals: dict[Any, float], p: Tensor, q: Tensor, following: Tensor) -> None:
    """Add the draft's figures over n positions.

    p, q: logits [n, V] of target and draft; following: the tokens there, [n].
    """
    nats = F.cross_entropy(q, following, reduction="none")
    totals["draft_nats"] += nats[nats != math.inf].sum().item()
    totals["greedy_agreement"] += (p.argmax(-1) == q.argmax(-1)).sum().item()
    for at in TEMPERATURES:
        overlap = torch.minimum(F.softmax(p / at, dim=-1), F.softmax(q / at, dim=-1))
        totals[at] += overlap.sum().item()


def _states(model: CausalModel, rows: Tensor) -> Tensor:
    """Compute hidden states [rows * length, H] after every token of rows [rows, length]."""
    rows = rows.to(model.device)
    positions = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    return model.hidden(rows, positions, None, None).flatten(0, 1)
