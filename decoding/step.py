"""A step of the decode loop, its clock, and the prompt that it begins with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, cast

import numpy as np
import torch
from pydantic import PlainValidator
from torch import Tensor

from nde_talf.decoding.common.errors import UserError

TREE_SLOTS = 64
"""Slots for a tree in flight, after the tokens asked for."""
MOST_SLOTS = 4096
"""Slots for the tokens asked for, at most, that a cache has from the start; it can grow."""
# Parts of a step: drafting (the drafter catching up included), the target's pass, verification with
# the clean-up of its cache, the policy's own choosing; what is left is "other". On a GPU they are
# the host's, unless the decoder is `timed`.
PHASES = ("draft", "target", "verify", "policy")


class Stopwatch:
    """seconds: by phase, as far as they were charged. clock: returns the time in seconds."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.last = clock, clock()
        self.seconds = dict.fromkeys((*PHASES, "other"), 0.0)

    def charge(self, phase: str, policy: float = 0.0) -> None:
        """Add to `phase` the time since the last charge, less what the `policy` took of it."""
        now = self.clock()
        self.seconds[phase] += now - self.last - policy
        self.seconds["policy"] += policy
        self.last = now


Record = Literal["", "logprobs", "logits"]
"""Notes on the target at every committed token: nothing, the token's log-probability under
the model (neither processed nor warped, as vLLM's raw_logprobs), or the full row of logits [V].
"""


def record_of(logits: Tensor, tokens: list[int], record: Record) -> list[Any]:
    """The entries of `tokens`, whose rows are `logits` [len(tokens), V]."""
    if record == "logprobs":
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return wide.log_softmax(-1)[range(len(tokens)), tokens].tolist()
    return list(logits.clone()) if record else []  # a view would hold the rows of the full tree


@dataclass
class Step:
    """One target pass: committed tokens, nodes of the tree, seconds a phase, records of each token.

    It commits tau accepted tokens and one more, or fewer where a text ends; the nodes include the
    root. The prefill is one too,
    of the root alone, with all its seconds as "other".
    """

    tokens: list[int]
    nodes: int
    seconds: dict[str, float]
    recorded: list[Any] = field(default_factory=list)

    @property
    def tau(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.tokens) - 1


def token_ids(prompt: "TokenIds") -> list[int]:
    """Return a prompt's token ids as a list.

    Args:
        prompt: integers in a list, a tuple, a tensor or an array, [n], or [1, n] as tokenizers
            return them.

    Raises:
        UserError: it is something else, such as a text or a batch of several prompts.
    """
    if isinstance(prompt, (Tensor, np.ndarray)):
        nested = prompt.ndim == 2 and len(prompt) == 1
        prompt = cast("Sequence[int]", (prompt[0] if nested else prompt).tolist())
    is_list = isinstance(prompt, (list, tuple, range))
    if not is_list or not all(
        isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in prompt
    ):
        kind = "list of something else" if is_list else type(prompt).__name__
        raise UserError(
            "prompt: it has to be integers, the token ids of one text (a list, tensor or array of"
            f" them), and is a {kind}. Encode a text with the target's tokenizer; decode several"
            " prompts one after the other."
        )
    return [int(token) for token in prompt]


TokenIds: TypeAlias = Annotated[Sequence[int] | Tensor | np.ndarray, PlainValidator(token_ids)]


def checked_prompt(tokens: Any, vocabulary: int, context: int) -> list[int]:
    """Return a prompt's token ids. Raises UserError if models of these sizes cannot take them."""
    if not tokens:
        raise UserError("prompt: it is empty; give at least one token.")
    if len(tokens) >= context:
        raise UserError(
            f"prompt: it has {len(tokens)} tokens, but the context of the models (or of their"
            f" static shapes) holds {context} with a new one: shorten the prompt or use a longer"
            " context."
        )
    outside = [token for token in tokens if not 0 <= token < vocabulary]
    if outside:
        raise UserError(
            f"prompt: token {outside[0]} lies outside the vocabulary of {vocabulary}: it was"
            " encoded with another tokenizer."
        )
    return list(tokens)
