"""What transformers' `generate` prepares before it calls a `custom_generate`, as the decode loop
needs it.

It reads prompts, sampling setting, processors and end tokens, and refuses by name what cannot be
decoded in trees without a change of the law. Nothing is ignored in silence.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import (
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.processing import LogitsProcess
from nde_talf.decoding.setting import SamplingSetting

FIRST, BEFORE = (5, 13), (6, 0)
"""Versions of transformers whose preparations these are: from the first, before the second."""
TEXTLESS: tuple[str, ...] = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TopHLogitsWarper",
)
TEXTLESS += (
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
)
TEXTLESS += ("SuppressTokensLogitsProcessor", "LogitNormalization")
"""Processors of transformers that look at logits alone."""
PURE: tuple[str, ...] = (
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
)
PURE += (
    "NoBadWordsLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
)
PURE += (
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
)
PURE += ("SuppressTokensAtBeginLogitsProcessor",)
"""Those whose result depends on the text before and the logits alone, so that every node of a tree
can be asked.
"""
NUMBERED = ("PrefixConstrainedLogitsProcessor",)
"""Those that also depend on the number of a row."""
_TEXT_INPUTS = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
)
"""Arguments of a forward pass that say nothing but which text it is."""


class Row(NamedTuple):
    """One sequence of a batch.

    Attributes:
        ids: as generate() has it, padding included. Processors and criteria see that.
        prompt: without the padding.
    """

    ids: list[int]
    prompt: list[int]


class RowProcess(LogitsProcess):
    """transformers' processors on the nodes of trees of one row, a
    `nde_talf.decoding.processing.LogitsProcess`.

    What comes after an end token or after the last token that is asked for is never written. There
    processors are not asked, since a grammar may have no answer.
    """

    def __init__(self, processors: Sequence[Any], row: Row, ends: frozenset[int], limit: int):
        self.processors, self.padding = processors, row.ids[: len(row.ids) - len(row.prompt)]
        self.start, self.limit, self.ends = len(row.prompt), len(row.prompt) + limit, ends
        self.textless = all(_named(processor, TEXTLESS) for processor in processors)

    def __call__(self, texts: list[list[int]], logits: Tensor) -> Tensor:
        rows = logits.float()
        if self.textless:
            return apply(
                self.processors,
                torch.empty(len(rows), 0, dtype=torch.long, device=rows.device),
                rows,
            )
        at = [
            i
            for i, text in enumerate(texts)
            if len(text) < self.limit and self.ends.isdisjoint(text[self.start :])
        ]
        if at:
            ids = torch.tensor([[*self.padding, *texts[i]] for i in at], device=rows.device)
            rows = rows.clone()
            rows[at] = apply(self.processors, ids, rows[at])
        return rows


def apply(processors: Sequence[Any], ids: Tensor, scores: Tensor) -> Tensor:
    """`scores` [n, V] after the texts `ids` [n, m], processed.

    Processors of others see one text at a time, as they may take a row's number for that of a
    sequence.
    """
    for processor in processors:
        if _named(processor, TEXTLESS + PURE):
            scores = processor(ids, scores)
        else:
            scores = torch.cat(
                [processor(ids[i : i + 1], scores[i : i + 1]) for i in range(len(ids))]
            )
    return scores


def _named(processor: Any, names: Sequence[str]) -> bool:
    """Whether a processor is one of transformers' own of these names: a subclass may do something
    else.
    """
    return type(processor).__name__ in names and type(processor).__module__.startswith(
        "transformers."
    )


def check(model: Any, config: Any, given: dict[str, Any], synced_gpus: bool) -> None:
    """Raise UserError for what a tree cannot decode. config: the prepared GenerationConfig; given:
    generate()'s arguments for the model's forward pass.
    """
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not FIRST <= version < BEFORE:
        raise UserError(
            f"speculate: transformers {transformers.__version__} is not supported: it takes"
            f" versions from {'.'.join(map(str, FIRST))} and before {'.'.join(map(str, BEFORE))}."
        )
    assistant = of_generate("assistant_model")
    mode = str(getattr(config.get_generation_mode(assistant), "value", ""))
    if mode not in ("greedy_search", "sample"):
        raise UserError(
            f"speculate: these arguments ask for {mode.replace('_', ' ')}, and speculation takes"
            " the place of sampling and greedy search alone. Leave out num_beams, penalty_alpha,"
            " assistant_model, prompt_lookup_num_tokens and their like."
        )
    if model.config.is_encoder_decoder:
        raise UserError(
            "speculate: the model is an encoder with a decoder; give a causal language model."
        )
    if model.training:
        raise UserError(
            "speculate: the model is in training mode, where dropout changes every pass. Call"
            " model.eval() first."
        )
    if (
        synced_gpus
        or of_generate("synced_gpus")
        or is_fsdp_managed_module(model)
        or is_deepspeed_zero3_enabled()
    ):
        raise UserError(
            "speculate: synced_gpus=True (FSDP, ZeRO 3) is not possible, since processes would take"
            " other passes."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False) and config.return_dict_in_generate:
            raise UserError(
                f"speculate: {name}=True is not possible, since a pass holds a tree. Run the model"
                " on the result."
            )
    cache = given.get("past_key_values")
    if config.cache_implementation not in (None, "dynamic") or getattr(
        cache, "_is_user_defined", False
    ):
        what = config.cache_implementation or f"past_key_values={type(cache).__name__}"
        raise UserError(
            f"speculate: the cache {what} is not possible: its shape has no room for a tree."
            " Speculation keeps its own cache; leave cache_implementation and past_key_values out."
        )
    foreign = [
        name for name, value in given.items() if name not in _TEXT_INPUTS and value is not None
    ]
    foreign = [
        name for name in foreign if name != "mm_encoder_outputs" or given[name]
    ]  # {}: a text without images
    foreign = [
        name for name in foreign if not name.endswith("token_type_ids") or given[name].any()
    ]  # 0 is text
    if foreign:
        raise UserError(
            f"speculate: the model's input {', '.join(sorted(foreign))} is not possible; it decodes"
            " text alone."
        )


def rows_of(ids: Tensor, given: dict[str, Any]) -> list[Row]:
    """The rows of `ids` [B, m], each without the padding that the attention mask says it has on the
    left.
    """
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    ones = torch.ones_like(ids) if mask is None else mask.to(ids.device)
    if ones.shape != ids.shape or (ones[:, 1:] < ones[:, :-1]).any() or not ones[:, -1].all():
        raise UserError(
            "speculate: attention_mask has zeros after a one. Pad on the left"
            " (tokenizer.padding_side='left')."
        )
    expected = (ones.cumsum(-1) - 1).clamp(min=0)
    if positions is not None and not ((positions.to(ids.device) == expected) | (ones == 0)).all():
        raise UserError("speculate: position_ids are not those of the text; leave them out.")
    counts = ones.sum(-1).tolist()
    return [
        Row(row, row[len(row) - int(count) :])
        for row, count in zip(ids.tolist(), counts, strict=True)
    ]


def split(
    processors: LogitsProcessorList, sampled: bool, stateless: tuple[type, ...]
) -> tuple[list[Any], SamplingSetting]:
    """The prepared processors as those that are asked at every node, and a setting for what comes
    after them.

    The tail temperature, top-k, top-p, min-p becomes the setting, as far as it is in this order,
    but for top-k: transformers leaves all tokens that are as probable as the k-th,
    `SamplingSetting` exactly k. Without temperature the order of the two does not matter.
    stateless: classes of others whose result depends on the text before and the logits alone.

    Raises:
        UserError: a processor keeps a state from call to call, or may do so.
    """
    asked, top_k = list(processors), []
    for processor in asked:
        if not _named(processor, TEXTLESS + PURE + NUMBERED) and not isinstance(
            processor, stateless
        ):
            raise UserError(
                f"speculate: the logits processor {type(processor).__name__} is not possible: it"
                " may remember what it was asked before, and in a tree it is asked about several"
                " continuations. If its result depends on the text before and the logits alone,"
                " name its class: speculate(stateless=[...])."
            )

    def ends_with(kind: type) -> bool:
        return (
            bool(asked)
            and type(asked[-1]) is kind
            and getattr(asked[-1], "min_tokens_to_keep", 1) == 1
        )

    if not sampled:
        return asked, SamplingSetting(0.0)
    if ends_with(LogitNormalization):  # the softmax after it gives the same
        asked.pop()
    min_p = asked.pop().min_p if ends_with(MinPLogitsWarper) else 0.0
    top_p = asked.pop().top_p if ends_with(TopPLogitsWarper) else 1.0
    if ends_with(TopKLogitsWarper):
        top_k = [asked.pop()]
    temperature = asked.pop().temperature if ends_with(TemperatureLogitsWarper) else 1.0
    return [*asked, *top_k], SamplingSetting(
        float(temperature), top_p=float(top_p), min_p=float(min_p)
    )


def check_rows(processors: Sequence[Any], rows: int) -> None:
    """Raise UserError for a processor that tells the rows of a batch apart, where there are
    several.
    """
    for processor in processors:
        if rows > 1 and _named(processor, NUMBERED):
            raise UserError(
                "speculate: prefix_allowed_tokens_fn with several rows is not possible, since it is"
                " asked by the number of a row and rows are decoded one after the other. Call"
                " generate() once a row."
            )


def of_generate(name: str) -> Any:
    """A variable of the `generate` that called us. transformers gives a callable neither `streamer`
    nor `assistant_model`, nor does it tell the code of a folder which folder it came from.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if (
            frame.f_code.co_name == "generate"
            and frame.f_globals.get("__name__") == "transformers.generation.utils"
        ):
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None
