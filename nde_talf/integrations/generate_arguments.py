"""The arguments that transformers' `generate` prepares, as the decode loop needs them.

It reads prompts, sampling setting, processors and end tokens, and refuses by name what cannot be
decoded in trees without a change of the law. Nothing is ignored in silence.
"""

import inspect
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
import transformers
from packaging.specifiers import SpecifierSet
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import (
    EosTokenCriteria,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.models.forward.transformers import MEMORY
from nde_talf.decoding.sampling.logits_processing import LogitsProcess
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting

VERSIONS = SpecifierSet(">=5.15,<6", prereleases=True)
"""Versions of transformers whose preparations these are."""
TEXTLESS = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TopHLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "LogitNormalization",
)
"""Processors of transformers that look at logits alone."""
PURE = (
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
)
"""Processors whose result depends on the text before and the logits alone.

Every node of a tree can be asked.
"""
NUMBERED = ("PrefixConstrainedLogitsProcessor",)
"""Processors that also depend on the number of a row."""
_TEXT_INPUTS = (
    *MEMORY,
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "cache_position",
)
"""Arguments of a forward pass that say nothing but which text it is."""


class Row(NamedTuple):
    """One sequence of a batch.

    Attributes:
        number: in the batch.
        padding: on the left of the prompt. Processors and criteria see that.
        prompt: without it.
    """

    number: int
    padding: list[int]
    prompt: list[int]


class RowProcess(LogitsProcess):
    """transformers' processors on the nodes of one row's trees.

    It is a `LogitsProcess`. Text after the last token that is asked for is never written. There
    processors are not asked, since a grammar may have no answer.
    """

    def __init__(self, processors: Sequence[Any], row: Row, limit: int):
        self.processors = [_of_row(processor, row.number) for processor in processors]
        self.padding, self.limit = row.padding, len(row.prompt) + limit
        self.textless = all(_named(processor, TEXTLESS) for processor in processors)

    def __call__(self, texts: list[list[int]], logits: Tensor) -> Tensor:
        """Process the logits [n, V] after `texts`."""
        rows = logits.float()
        if self.textless:
            none = torch.empty(len(rows), 0, dtype=torch.long, device=rows.device)
            return apply(self.processors, none, rows)
        if at := [i for i, text in enumerate(texts) if len(text) < self.limit]:
            ids = torch.tensor([[*self.padding, *texts[i]] for i in at], device=rows.device)
            rows = rows.clone()
            rows[at] = apply(self.processors, ids, rows[at])
        return rows


def apply(processors: Sequence[Any], ids: Tensor, scores: Tensor) -> Tensor:
    """Process `scores` [n, V] after the texts `ids` [n, m].

    Processors of others see one text at a time, as they may take a row's number for a
    text's.
    """
    for processor in processors:
        if _named(processor, TEXTLESS + PURE):
            scores = processor(ids, scores)
        else:
            rows = zip(ids.split(1), scores.split(1), strict=True)
            scores = torch.cat([processor(text, row) for text, row in rows])
    return scores


def _of_row(processor: Any, number: int) -> Any:
    """Return the processor as it is for one row of the batch.

    From transformers 5.24 on, a repetition penalty may hold a number for each row: how many tokens
    of its prompt to ignore.
    """
    if _named(processor, NUMBERED):  # it is asked about one text, as about row 0
        allowed = processor._prefix_allowed_tokens_fn
        return type(processor)(lambda _, ids: allowed(number, ids), 1)
    ignored = vars(processor).get("prompt_ignore_length")
    if isinstance(ignored, Tensor):
        processor = copy(processor)
        processor.prompt_ignore_length = int(ignored[number])
    return processor


def _named(processor: Any, names: Sequence[str]) -> bool:
    """Tell transformers' own processors of these names; a subclass may do something else."""
    kind = type(processor)
    return kind.__name__ in names and kind.__module__.startswith("transformers.")


def check(model: Any, config: Any, given: dict[str, Any]) -> None:
    """Raise UserError for the first thing that a tree cannot decode.

    Args:
        model: of transformers.
        config: the prepared GenerationConfig.
        given: generate()'s arguments for the model's forward pass.
    """
    for fault in _faults(model, config, given):
        raise UserError(f"speculate: {fault}")


def _faults(model: Any, config: Any, given: dict[str, Any]) -> Iterator[str]:
    if (version := transformers.__version__) not in VERSIONS:
        yield f"transformers {version} is not supported: take a version {VERSIONS}."
    mode = config.get_generation_mode(of_generate("assistant_model")).value
    if mode not in ("greedy_search", "sample"):
        yield (
            f"these arguments ask for {mode.replace('_', ' ')}, and speculation takes the place of"
            " sampling and greedy search alone. Leave out num_beams, penalty_alpha,"
            " assistant_model, prompt_lookup_num_tokens and their like."
        )
    if model.config.is_encoder_decoder:
        yield "the model is an encoder with a decoder; give a causal language model."
    if model.training:
        yield (
            "the model is in training mode, where dropout changes every pass. Call model.eval()"
            " first."
        )
    spread = is_fsdp_managed_module(model) or is_deepspeed_zero3_enabled()
    if of_generate("synced_gpus") or spread:
        yield (
            "synced_gpus=True (FSDP, ZeRO 3) is not possible, since processes would take other"
            " passes."
        )
    yield from _unusual_inputs(config, given)


def _unusual_inputs(config: Any, given: dict[str, Any]) -> Iterator[str]:
    asked = config.to_dict() if config.return_dict_in_generate else {}
    for name in ("output_attentions", "output_hidden_states", "output_scores", "output_logits"):
        if asked.get(name):
            yield f"{name}=True is not possible: a pass holds a tree. Run the model over the text."
    passed = of_generate("kwargs")  # `given` may hold a cache that `generate` made
    kinds = {type(passed.get(name)).__name__ for name in MEMORY}
    for kind in {config.cache_implementation, *kinds} - {None, "dynamic", "NoneType"}:
        yield (
            f"the cache {kind} is not possible: its shape has no room for a tree. Speculation keeps"
            " its own cache; give generate() none."
        )
    for name, value in given.items():
        if value is not None and name not in _TEXT_INPUTS and not _says_text(name, value):
            yield f"the model's input {name} is not possible; it decodes text alone."


def _says_text(name: str, value: Any) -> bool:
    """Tell an empty dictionary of images, and token types of 0, which say nothing but text."""
    if name == "mm_encoder_outputs":
        return not value
    return name.endswith("token_type_ids") and not value.any()


def rows_of(ids: Tensor, given: dict[str, Any]) -> list[Row]:
    """The rows of `ids` [B, m], without the padding that the attention mask has on the left."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    ones = torch.ones_like(ids) if mask is None else mask.to(ids.device)
    if ones.shape != ids.shape or (ones[:, 1:] < ones[:, :-1]).any() or not ones[:, -1:].all():
        raise UserError(
            "speculate: attention_mask is not that of the text or has zeros after a one. Pad on the"
            " left (tokenizer.padding_side='left')."
        )
    expected, padding = (ones.cumsum(-1) - 1).clamp(min=0), ones == 0
    if positions is not None and (
        positions.shape[-1] != ids.shape[1]  # transformers drops a mask of ones, however long
        or not ((positions.to(ids.device) == expected) | padding).all()
    ):
        raise UserError(
            "speculate: position_ids or attention_mask are not those of the text; leave them out."
        )
    starts = padding.sum(-1).tolist()
    return [Row(n, row[: starts[n]], row[starts[n] :]) for n, row in enumerate(ids.tolist())]


def split(
    processors: LogitsProcessorList, sampled: bool, stateless: tuple[type, ...]
) -> tuple[list[Any], SamplingSetting]:
    """Split the prepared processors into those asked at every node and the setting after them.

    The tail temperature, top-k, top-p, min-p becomes the setting, as far as it is in this order,
    but for top-k: transformers leaves all tokens that are as probable as the k-th,
    `SamplingSetting` exactly k. Without temperature the order of the two does not matter.

    Args:
        processors: prepared.
        sampled: False: greedy search.
        stateless: classes of others whose result depends on the text before and the logits alone.

    Raises:
        UserError: a processor keeps a state from call to call, or may do so.
    """
    asked = list(processors)
    for processor in asked:
        known = _named(processor, TEXTLESS + PURE + NUMBERED)
        if not known and not isinstance(processor, stateless):
            raise UserError(
                f"speculate: the logits processor {type(processor).__name__} is not possible: it"
                " may remember what it was asked before, and in a tree it is asked about several"
                " continuations. If its result depends on the text before and the logits alone,"
                " name its class: speculate(stateless=[...])."
            )
    if not sampled:
        return asked, SamplingSetting(0.0)

    def ends_with(kind: type) -> bool:
        # A warper that keeps at least so many tokens is no plain top-k, top-p or min-p.
        kinds = [type(each) for each in asked]
        return kinds[-1:] == [kind] and vars(asked[-1]).get("min_tokens_to_keep", 1) == 1

    if ends_with(LogitNormalization):  # the softmax after it gives the same
        asked.pop()
    min_p = asked.pop().min_p if ends_with(MinPLogitsWarper) else 0.0
    top_p = asked.pop().top_p if ends_with(TopPLogitsWarper) else 1.0
    top_k = [asked.pop()] if ends_with(TopKLogitsWarper) else []
    temperature = asked.pop().temperature if ends_with(TemperatureLogitsWarper) else 1.0
    setting = SamplingSetting(float(temperature), top_p=float(top_p), min_p=float(min_p))
    return [*asked, *top_k], setting


def ends_of(criteria: Any) -> tuple[bool, list[int]]:
    """True if `generate` pads a text that ended before others, and the tokens that end it."""
    given = [each.eos_token_id for each in criteria if type(each) is EosTokenCriteria]
    ends = [token for each in given for token in each.flatten().tolist() if token >= 0]
    return any(hasattr(each, "eos_token_id") for each in criteria), ends


def of_generate(name: str) -> Any:
    """Read a variable of the `generate` that called us.

    transformers gives a callable neither `streamer` nor `assistant_model` nor `synced_gpus`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "generate" and module == "transformers.generation.utils":
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None
