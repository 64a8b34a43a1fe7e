"""Training a small causal language model from scratch, and distilling a smaller one from it.

One Lightning module serves both: without a teacher the loss is the next token's negative log-likelihood, with a
teacher it is the distance to the teacher's whole next-token distribution. This module knows rows of token ids and
Llama models. It does not know text, tokenizers or speculative decoding.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import Logger
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decoding.common.errors import UserError
from draft_training.lm_settings import LanguageModelConfig
from draft_training.muon import Muon
from draft_training.precision import check_resumed, resolved
from draft_training.trainer import CHECKPOINT, train_rows


def build_llama(
    config: LanguageModelConfig, vocab_size: int, end_of_text: int = 0, like: LlamaForCausalLM | None = None
) -> LlamaForCausalLM:
    """A Llama with untied embeddings and fresh fp32 weights, a pure function of the arguments.

    Args:
        end_of_text: the id of the token that begins and ends documents.
        like: a model of the same vocabulary to start near: where it has the same hidden size, copies of its token
            embeddings, final norm and head take the place of random ones. A draft learns faster that way.

    Raises:
        UserError: the heads do not divide the hidden size into even parts.
    """
    if config.hidden % (2 * config.heads):
        raise UserError(
            f"A hidden size of {config.hidden} cannot be divided into {config.heads} heads of an even size; change "
            "`hidden` or `heads`."
        )
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
                tie_word_embeddings=False,
                bos_token_id=end_of_text,
                eos_token_id=end_of_text,
            )
        )
    if like is not None and like.config.hidden_size == config.hidden:
        model.model.embed_tokens.load_state_dict(like.model.embed_tokens.state_dict())
        model.model.norm.load_state_dict(like.model.norm.state_dict())
        model.lm_head.load_state_dict(like.lm_head.state_dict())
    return model


def distillation_loss(draft: torch.Tensor, target: torch.Tensor, total_variation: float = 0.0) -> torch.Tensor:
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


class LanguageModel(pl.LightningModule):
    """Trains `model` on rows of tokens, or, where a `teacher` of the same vocabulary is given, distils it.

    Muon moves the matrices inside the layers, AdamW everything else. Both rates follow one schedule, a function of
    the step alone, and the teacher is no part of the checkpoint.
    """

    def __init__(self, model: LlamaForCausalLM, config: LanguageModelConfig, teacher: PreTrainedModel | None = None) -> None:
        super().__init__()
        # Lightning counts every optimizer step of automatic optimisation; by hand, global_step is the batch number.
        self.automatic_optimization = False
        self.model = model
        self.config = config
        self._teacher = () if teacher is None else (teacher.eval().requires_grad_(False),)  # hides it from state_dict
        self._clock = 0.0
        self.title = "training the target" if teacher is None else "distilling the draft"

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        inside = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in inside]
        return [
            Muon(matrices, lr=self.config.lr_muon),
            torch.optim.AdamW(others, lr=self.config.lr_adam, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def on_fit_start(self) -> None:
        for teacher in self._teacher:
            teacher.to(self.device)

    def on_train_start(self) -> None:
        self._clock = time.perf_counter()

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean loss over the positions of `rows` [B, T], in nats a token."""
        if not self._teacher:
            logits = self.model(rows, use_cache=False).logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        with torch.no_grad():
            target = self._teacher[0](rows, use_cache=False).logits
        logits = self.model(rows, use_cache=False).logits
        return distillation_loss(logits.flatten(0, 1).float(), target.flatten(0, 1).float(), self.config.total_variation)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        value = loss.item()
        if value != value or value in (float("inf"), float("-inf")):
            raise UserError(
                f"The training loss became {value} at step {self.global_step}: the training diverged. Lower lr_muon "
                f"(now {self.config.lr_muon}) and lr_adam (now {self.config.lr_adam}), or raise warm_up, and delete "
                "the unfinished run's checkpoint."
            )
        share = self.learning_rate_share(self.global_step)
        muon, adamw = self.optimizers()
        muon.zero_grad()
        adamw.zero_grad()
        self.manual_backward(loss)
        for optimizer, peak in ((muon, self.config.lr_muon), (adamw, self.config.lr_adam)):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        muon.optimizer.step()  # below Lightning's wrapper, so that only the other one counts as a step
        adamw.step()
        now = time.perf_counter()
        rate, self._clock = batch.numel() / (now - self._clock), now
        self.log("loss", value, prog_bar=True)
        self.log("lr", self.config.lr_muon * share)
        self.log("tokens_per_second", rate, prog_bar=True)

    def learning_rate_share(self, step: int) -> float:
        """The fraction of the peak learning rates at `step` (from 0): warm-up, then constant, then linearly to 0."""
        rising = (step + 1) / max(1, self.config.warm_up)
        falling = (self.config.steps - step) / max(1.0, self.config.cool_down * self.config.steps)
        return min(1.0, rising, falling)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["language_model_config"] = asdict(self.config)
        checkpoint["trained_in"] = resolved()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint.get("language_model_config") != asdict(self.config):
            raise UserError(
                f"The training in {CHECKPOINT} was started with other settings than those of now. Delete that file to "
                "start again, or go back to the settings it was started with."
            )
        check_resumed(checkpoint, resolved(), CHECKPOINT)


def fit(
    module: LanguageModel,
    tokens: torch.Tensor,
    config: LanguageModelConfig,
    folder: Path,
    logger: Logger | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> LlamaForCausalLM:
    """Trains `module` for `config.steps` steps and returns its model, in evaluation mode and on the CPU.

    A run that was killed continues from `folder/last.ckpt` with the batches it would have seen, and ends with the
    weights it would have had. A finished run trains no further. The precision is bfloat16 where the machine has it natively,
    else float32; which it was is printed, and stays with the model as `config.trained_in`.

    Args:
        tokens: rows of token ids, [rows, length], as `data.text.tokenizer.pack` makes them.
        folder: where the checkpoint goes; it is created.
        logger: of the metrics `loss` (nats a token), `lr` and `tokens_per_second`.

    Raises:
        UserError: the loss diverged, or the checkpoint is of a run with other settings.
    """
    trained = [module.model, *module._teacher]
    train_rows(module, tokens, config, folder, trained, logger, callbacks)
    module.model.config.trained_in = resolved()
    return module.model.eval().cpu()


@torch.inference_mode()
def held_out_report(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokens: torch.Tensor,
    temperatures: Sequence[float] = (1.0, 0.6),
    batch: int = 8,
) -> dict[str, Any]:
    """How well the pair predicts held-out rows [rows, length], and how well the draft agrees with the target.

    Returns `positions` (count), `target_nats` and `draft_nats` (nats a token), `greedy_agreement` (fraction of
    positions with the same most likely token) and `overlap`: temperature -> mean of sum_v min(p(v), q(v)), both
    warped with that temperature. Where the models say in which precision they were trained here, `trained_in`: role -> that.

    Args:
        batch: rows whose distributions are held in memory at once.
    """
    nats = torch.zeros(2, dtype=torch.float64)
    agreement = 0.0
    overlap = dict.fromkeys(temperatures, 0.0)
    positions = tokens[:, 1:].numel()
    for rows in tokens.split(batch):
        following = rows[:, 1:].flatten()
        logits = [
            model(rows.to(model.device), use_cache=False).logits[:, :-1].flatten(0, 1).float().cpu()
            for model in (target, draft)
        ]
        nats += torch.tensor([F.cross_entropy(each, following, reduction="sum").item() for each in logits])
        agreement += (logits[0].argmax(-1) == logits[1].argmax(-1)).sum().item()
        for temperature in temperatures:
            p, q = (F.softmax(each / temperature, dim=-1) for each in logits)
            overlap[temperature] += torch.minimum(p, q).sum().item()
    found = {role: getattr(model.config, "trained_in", None) for role, model in (("target", target), ("draft", draft))}
    return {
        "positions": positions,
        "target_nats": nats[0].item() / positions,
        "draft_nats": nats[1].item() / positions,
        "greedy_agreement": agreement / positions,
        "overlap": {temperature: total / positions for temperature, total in overlap.items()},
        **({"trained_in": trained_in} if (trained_in := {k: v for k, v in found.items() if v}) else {}),
    }
