"""Training a small causal language model from scratch, and distilling a smaller one from it.

One module serves both. Without a teacher the loss is the next token's negative log-likelihood; with
one it is the distance to the teacher's next-token distribution. Nothing here knows text, tokenizers
or speculative decoding: it sees rows of token ids and Llama models.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import Logger
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.lm_settings import LanguageModelConfig
from nde_talf.draft_training.trainer import RowModule, train_rows, warm_up_then_linear


def build_llama(
    config: LanguageModelConfig,
    vocab_size: int,
    end_of_text: int = 0,
    like: LlamaForCausalLM | None = None,
) -> LlamaForCausalLM:
    """A Llama with untied embeddings and fresh fp32 weights, a pure function of the arguments.

    Args:
        end_of_text: the id of the token that begins and ends documents.
        like: a model of the same vocabulary to start near. Where it has the same hidden size,
            copies of its token embeddings, final norm and head replace random ones. A draft learns
            faster that way.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size, hidden_size=config.hidden, intermediate_size=config.intermediate,
                num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.heads,
                max_position_embeddings=config.max_length, tie_word_embeddings=False, bos_token_id=end_of_text,
                eos_token_id=end_of_text,
            )
        )  # fmt: skip
    if like is not None and like.config.hidden_size == config.hidden:
        for part in ("model.embed_tokens", "model.norm", "lm_head"):
            model.get_submodule(part).load_state_dict(like.get_submodule(part).state_dict())
    return model


def distillation_loss(draft: Tensor, target: Tensor, total_variation: float = 0.0) -> Tensor:
    """Mean over positions of (1 - w) KL(p || q) + w TV(p, q), in nats, with w = `total_variation`.

    The overlap, sum_v min(p(v), q(v)), is 1 - TV.

    Args:
        draft: logits of q, [N, V].
        target: logits of p, [N, V], without gradient.
    """
    log_q = F.log_softmax(draft, dim=-1)
    log_p = F.log_softmax(target, dim=-1)
    loss = (1 - total_variation) * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    if total_variation:
        loss = loss + total_variation * 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1).mean()
    return loss


class LanguageModel(RowModule):
    """Trains `model` on rows of tokens, or, where a `teacher` of the same vocabulary is given,
    distils it.

    Muon trains the matrices inside the layers. The teacher is no part of the checkpoint.
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
        self._teacher = (
            [] if teacher is None else [teacher.eval().requires_grad_(False)]
        )  # a list hides it from state_dict
        self.models = [model, *self._teacher]
        self.title = "training the target" if teacher is None else "distilling the draft"

    @property
    def trained(self) -> nn.Module:
        return self.model

    def matrices(self) -> list[nn.Parameter]:
        """See `RowModule`."""
        return [p for p in self.model.model.layers.parameters() if p.ndim == 2]

    def learning_rate_fraction(self, step: int) -> float:
        """See `RowModule`."""
        return warm_up_then_linear(
            step, self.config.steps, self.config.warm_up, self.config.cool_down
        )

    def on_fit_start(self) -> None:
        for teacher in self._teacher:
            teacher.to(self.device)

    def loss(self, batch: Tensor, step: int = 0, part: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss over the positions of rows [B, T], in nats a token."""
        logits = self.model(batch, use_cache=False).logits
        if not self._teacher:
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten()), {}
        with torch.no_grad():
            target = self._teacher[0](batch, use_cache=False).logits
        return (
            distillation_loss(
                logits.flatten(0, 1).float(),
                target.flatten(0, 1).float(),
                self.config.total_variation,
            ),
            {},
        )


def fit(
    module: LanguageModel,
    tokens: Tensor,
    folder: Path,
    logger: Logger | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> LlamaForCausalLM:
    """Train `module` for `config.steps` steps and return its model, in evaluation mode and on the
    CPU.

    A run that was killed continues from `folder/last.ckpt` with the batches it would have seen, and
    ends with the weights it would have had. A finished run trains no further. The precision is
    bfloat16 where the machine has it natively, else float32. It is printed, and stays with the
    model as `config.trained_in`.

    Args:
        tokens: rows of token ids, [rows, length], as `nde_talf.data.text.tokenizer.pack` makes
            them.
        folder: where the checkpoint goes; it is created.
        logger: of the metrics `loss` (nats a token), `lr` and `tokens_per_second`.

    Raises:
        UserError: the loss diverged, or the checkpoint is of a run with other settings.
    """
    train_rows(module, tokens, folder, logger, callbacks)
    module.model.config.trained_in = module.trained_in
    return module.model.eval().cpu()


@torch.inference_mode()
def held_out_report(
    target: CausalModel,
    draft: CausalModel | None,
    tokens: Tensor,
    temperatures: Sequence[float] = (1.0, 0.6),
    batch: int = 8,
) -> dict[str, Any]:
    """How well the pair predicts held-out rows, and how well the draft agrees with the target.

    Without a draft, only what is of the target.

    Args:
        tokens: [rows, length].
        temperatures: at which both distributions are warped for `overlap`.
        batch: rows whose distributions are held in memory at once.

    Returns:
        `positions` (count), `target_nats` and `draft_nats` (nats a token), `greedy_agreement`
        (fraction of positions with the same most likely token) and `overlap`: temperature -> mean
        of sum_v min(p(v), q(v)). Where the models know the precision of their training,
        `trained_in`: role -> precision.
    """
    models = {"target": target} | ({"draft": draft} if draft else {})
    nats = dict.fromkeys(models, 0.0)
    agreement = 0.0
    overlap = dict.fromkeys(temperatures, 0.0)
    positions = tokens[:, 1:].numel()
    for rows in tokens.split(batch):
        following = rows[:, 1:].flatten()
        logits = {role: _logits(model, rows[:, :-1]) for role, model in models.items()}
        for role, each in logits.items():
            nats[role] += F.cross_entropy(each, following, reduction="sum").item()
        if draft:
            agreement += (logits["target"].argmax(-1) == logits["draft"].argmax(-1)).sum().item()
            for temperature in temperatures:
                p, q = (F.softmax(each / temperature, dim=-1) for each in logits.values())
                overlap[temperature] += torch.minimum(p, q).sum().item()
    report: dict[str, Any] = {"positions": positions}
    report |= {f"{role}_nats": total / positions for role, total in nats.items()}
    if draft:
        report["greedy_agreement"] = agreement / positions
        report["overlap"] = {
            temperature: total / positions for temperature, total in overlap.items()
        }
    found = {role: getattr(model.config, "trained_in", None) for role, model in models.items()}
    trained_in = {role: precision for role, precision in found.items() if precision}
    return report | ({"trained_in": trained_in} if trained_in else {})


def _logits(model: CausalModel, rows: Tensor) -> Tensor:
    """Logits [rows * length, V] after every token of rows [rows, length], float32 on the CPU."""
    rows = rows.to(model.device)
    positions = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    return model.logits(model.hidden(rows, positions, None, None)).flatten(0, 1).float().cpu()
