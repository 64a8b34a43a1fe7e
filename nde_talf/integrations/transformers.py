"""Speculative decoding inside transformers' `generate`.

    from nde_talf import speculate

    ours = speculate(draft="draft_or_head", selector="runs/x/selector/export/traversal")
    out = model.generate(**inputs, custom_generate=ours, max_new_tokens=256, do_sample=True,
    temperature=0.6)

`generate` prepares everything and calls a `Speculation` in the place of its own loop. What it
returns has the law, or at greedy search the tokens, of `generate` without it. docs/serving.md
says what is possible.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from nde_talf.data.text.pair import check_tokenizers
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.common.errors import Advice, UserError
from nde_talf.decoding.common.hub import export_folder
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.drafters.lm import LMDrafter
from nde_talf.decoding.drafters.ngram import NgramDrafter
from nde_talf.decoding.generation import Generation
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting, read_draft_temperature
from nde_talf.draft_training.export.head_format import NOTE
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.integrations.generate_arguments import (
    Row,
    RowProcess,
    check,
    ends_of,
    of_generate,
    rows_of,
    split,
)
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy

NGRAM = "ngram"
RULES = {
    "none": "naive",
    "path": "traversal",
    "delayed": "traversal",
    "iid": "traversal",
    "without_replacement": "without_replacement",
}
"""Verifiers by kind of tree, for a policy where none is named; else nss, which takes any."""
DEFAULT = Action(1, 0, 4)
"""The tree of a draft without a selector: a path."""


class Loaded(NamedTuple):
    """Decoders cached for one target model.

    plain: decodes without a draft, once a draft's context is full. state: of the model when they
    were made (`_state`).
    """

    decoder: SpeculativeDecoder
    plain: SpeculativeDecoder
    state: tuple[Any, ...]


@dataclass
class Text:
    """One row of a batch as it is written, a token at a time.

    Attributes:
        decoders: one with the draft, and one without it for what does not fit the draft's context.
        limit: the most tokens.
        ends: tokens that end the text.
        padding: token after the end; None: there is none.
        padded: `generate` pads a text that ended; otherwise it continues.
        generations: gets how the text came about.
        tokens: so far.
        ended: by a criterion or a full context.
    """

    row: Row
    decoders: list[SpeculativeDecoder]
    limit: int
    setting: SamplingSetting
    ends: list[int]
    padding: int | None
    padded: bool
    generations: list[Generation]
    tokens: list[Any] = field(default_factory=list)
    ended: bool = False

    def write(self) -> Iterator[int | None]:
        """Write a token at each step, `limit` in all."""
        yield from self._decoded()
        if not self.ended:
            warnings.warn(
                f"speculate: the model's context of {self.decoders[-1].max_context} tokens is full,"
                " so the text ends.",
                Advice,
                stacklevel=2,
            )
            self.ended = True
        for _ in range(self.limit - len(self.tokens)):
            yield self.padding

    def _decoded(self) -> Iterator[int]:
        """Decode until the end."""
        rng = Rng.seeded(int(torch.randint(1 << 62, ())) if self.setting.temperature else 0)
        for decoder in self.decoders:
            text, left = self.row.prompt + self.tokens, self.limit - len(self.tokens)
            last = decoder is self.decoders[-1]
            if (len(text) >= decoder.max_context and (not last or self.tokens)) or not left:
                continue
            stream = decoder.blocks(text, left, self.setting, rng, self.ends)
            self.generations.append(stream.generation)
            for block in stream:
                for token in block.tokens:
                    self.tokens.append(token)
                    yield token
                    if self.ended and self.padded:
                        return


@checked
@dataclass(eq=False)
class Speculation:
    """A callable for `generate(custom_generate=...)`, made by `speculate`.

    It serves any number of calls, and keeps its decoders until it is called with another model.

    Attributes:
        generations: of the last call, how each row came about
            (`nde_talf.decoding.generation.Generation`); what was decoded without the draft, because
            its context was full, comes after them.
    """

    draft: Any
    selector: "str | Path | TreePolicy | None" = None
    verifier: str | None = None
    draft_temperature: str | float = "auto"
    stateless: Sequence[type] = ()
    generations: list[Generation] = field(default_factory=list, init=False)
    _loaded: Loaded | None = field(default=None, init=False, repr=False)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **given: Any,
    ) -> Any:
        """See `GenerationMixin._sample`, whose arguments and results these are."""
        config = generation_config
        check(model, config, given)
        rows = rows_of(input_ids, given)
        asked, setting = split(logits_processor, bool(config.do_sample), tuple(self.stateless))
        loaded, limit = self._load(model), max(stopping_criteria.max_length - input_ids.shape[1], 1)
        padded, ends = ends_of(stopping_criteria)
        pad = None if config._pad_token_tensor is None else int(config._pad_token_tensor)
        self.generations, texts = [], list[Text]()
        for row in rows:
            process = RowProcess(asked, row, limit) if asked else None
            decoders = [_of_row(decoder, process) for decoder in loaded[:2]]
            texts.append(Text(row, decoders, limit, setting, ends, pad, padded, self.generations))
        made: Any = _decode(texts, input_ids, stopping_criteria)
        return GenerateDecoderOnlyOutput(made) if config.return_dict_in_generate else made

    def _load(self, model: PreTrainedModel) -> Loaded:
        loaded, state = self._loaded, _state(model)
        if loaded and loaded.plain.target.module is model and loaded.state == state:
            return loaded
        target = wrapped(model, "the model")
        drafter, (policy, rule) = self._drafter(target), self._policy()
        decoder = SpeculativeDecoder(target, drafter, policy, rule, self.draft_temperature)
        plain = SpeculativeDecoder(target, None, Autoregressive(), "naive")
        self._loaded = loaded = Loaded(decoder, plain, state)
        return loaded

    def _drafter(self, target: CausalModel) -> Drafter:
        draft: Any = self.draft
        given, rows = draft, target.vocab_size
        if draft == NGRAM:
            return NgramDrafter(rows)
        if isinstance(draft, PreTrainedModel):
            given, model = type(draft).__name__, wrapped(draft, "the draft")
        elif not isinstance(draft, (str, Path)):
            raise UserError(
                f"speculate(draft={draft!r}): give a model, its folder, the folder of a draft head,"
                f" or {NGRAM!r}."
            )
        elif is_head(draft):
            return EagleDrafter.from_pretrained(draft, target)
        else:
            device, dtype = str(target.device), str(target.dtype).removeprefix("torch.")
            model = CausalModel.load(draft, device, dtype, "speculate: draft")
        name = target.module.name_or_path
        return drafter_of(model, f"speculate(draft=) {given}", name, rows)

    def _policy(self) -> tuple[TreePolicy, Any]:
        if isinstance(self.selector, (str, Path)):
            learned = NeuralPolicy(Selector.from_pretrained(self.selector))
            return learned, self.verifier or learned.verifier
        policy: Any = self.selector
        if policy is None:
            policy = NgramTree() if self.draft == NGRAM else Delayed(DEFAULT)
        return policy, self.verifier or RULES.get(policy.trees, "nss")


def speculate(
    draft: Any,
    selector: "str | Path | TreePolicy | None" = None,
    verifier: str | None = None,
    draft_temperature: str | float = "auto",
    stateless: Sequence[type] = (),
    **uncalled: Any,
) -> Speculation:
    """Make a callable for `model.generate(custom_generate=...)` that decodes losslessly in trees.

    Example: `model.generate(**inputs, custom_generate=speculate(draft="ngram"),
    max_new_tokens=64)`.

    Args:
        draft: a transformers model, its folder or hub name, the folder of an exported draft head,
            or "ngram", which drafts what followed the same words before.
        selector: the folder of an exported selector, or a policy such as `Delayed(Action(2, 1,
            3))`; None: a path of four drafted tokens, or trees of n-grams.
        verifier: the rule; None: the selector's, or the one that goes with the policy's trees.
        draft_temperature: auto, match, raw or a number, see docs/decoding.md. The law of the text
            is the same with any.
        stateless: classes of logits processors, beside transformers' own, whose result depends on
            the text before and the logits alone.
        **uncalled: what `generate` gives to a function that was not called here.

    Raises:
        UserError: it is `generate(custom_generate=speculate)` itself, or is given a name
            that it does not have.
    """
    if uncalled:
        raise UserError(
            f"speculate: it takes no {next(iter(uncalled))}. Write"
            ' custom_generate=speculate("FOLDER_OF_DRAFT_OR_HEAD"), or speculate("ngram") without'
            " a draft."
        )
    read_draft_temperature(draft_temperature)
    return Speculation(draft, selector, verifier, draft_temperature, stateless)


def is_head(where: str | Path) -> bool:
    """Tell the place of a draft head, ours or a published one of speculators or EAGLE."""
    try:
        folder = export_folder(where, ["config.json"])
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, UserError):
        return False
    eagle = "eagle" in str(config.get("architectures")).lower()
    return NOTE in config or "speculators_model_type" in config or eagle


def wrapped(model: PreTrainedModel, name: str) -> CausalModel:
    """A model of somebody else as decoding sees it: nothing of it is copied or changed.

    A native pass would not call hooks of its modules, so a model with hooks is run by its own.

    Raises:
        UserError: it is spread over several devices, or cannot run a tree.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise UserError(
            f"speculate: {name} lies on {', '.join(sorted(map(str, devices)))}, and decoding in"
            " trees needs it on one device. Load it with device_map={'': device}."
        )
    way = "transformers" if _hooked(model) else "auto"
    return CausalModel(model, name, way, owned=False)


def _hooked(model: PreTrainedModel) -> bool:
    """Return True if somebody's hooks are on the model.

    Those that transformers leaves there after `output_hidden_states` do nothing, and do not count.
    """
    return any(
        "_hf_hook" in vars(part)
        or part._forward_pre_hooks
        or any(
            hook.__module__ != "transformers.utils.output_capturing"
            for hook in part._forward_hooks.values()
        )
        for part in model.modules()
    )


def _state(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return what shows that a model was changed since: equal if it was not.

    These are: whether it has hooks, its modules, functions put in place of their `forward`, and the
    weights' addresses.
    """
    parts = [(part, vars(part).get("forward")) for part in model.modules()]
    return _hooked(model), parts, [parameter.data_ptr() for parameter in model.parameters()]


def _of_row(decoder: SpeculativeDecoder, process: RowProcess | None) -> SpeculativeDecoder:
    """The decoder with what is different for a row."""
    own = copy(decoder)
    own.process = process
    return own


def drafter_of(draft: CausalModel, name: str, target: str | None, rows: int) -> LMDrafter:
    """Make the drafter of a model beside a target with `rows` rows of logits.

    Args:
        draft: the model.
        name: of the draft in the message, after what the user gave it as.
        target: the target's folder or hub name.
        rows: of the target's logits.

    Raises:
        UserError: the two have other tokenizers or, where none are found, other numbers of rows.
    """
    ours, theirs = map(_vocabulary, (target, draft.module.name_or_path))
    if ours and theirs:
        check_tokenizers(ours, theirs, name)
    elif draft.vocab_size != rows:
        raise UserError(
            f"{name} has another number of tokens than the model, and no tokenizers were"
            " found to compare. Load both from folders that hold their tokenizers, or take a draft"
            " with the model's vocabulary."
        )
    draft.match(rows)
    return LMDrafter(draft)


def _vocabulary(where: str | None) -> dict[str, int] | None:
    """Tokens of the tokenizer in a folder, or of a hub name that was downloaded.

    None where there is none.
    """
    if not where:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            where, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tokenizer.get_vocab()


def _decode(texts: list[Text], ids: Tensor, criteria: StoppingCriteriaList) -> Tensor:
    """Write a token of every row at each step, and ask the criteria once, as `generate` does."""
    streamer = of_generate("streamer")
    for tokens in zip(*(text.write() for text in texts), strict=True):
        if _over(texts):  # all contexts are full
            break
        ids = torch.cat([ids, _column(tokens, ids)], 1)
        for text, end in zip(texts, criteria(ids, None).tolist(), strict=True):
            text.ended |= end
        if streamer:
            streamer.put(ids[:, -1].cpu())
        if _over(texts):
            break
    if streamer:
        streamer.end()
    return ids


def _over(texts: list[Text]) -> bool:
    return all(text.ended for text in texts)


def _column(tokens: tuple[int | None, ...], ids: Tensor) -> Tensor:
    """The tokens as a column for `ids` [B, m]."""
    if None in tokens:
        raise UserError(
            "speculate: a row ended before others, and there is no padding token. Give generate()"
            " pad_token_id."
        )
    return ids.new_tensor(tokens)[:, None]
