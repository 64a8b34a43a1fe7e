"""What a caller may give as a prompt, as the list of token ids that the loop decodes after."""

from collections.abc import Sequence
from typing import TypeAlias, cast

import numpy as np
from torch import Tensor

from nde_talf.decoding.common.errors import UserError

TokenIds: TypeAlias = Sequence[int] | Tensor | np.ndarray


def token_ids(prompt: TokenIds) -> list[int]:
    """A prompt's token ids as a list.

    Args:
        prompt: integers in a list, a tuple, a tensor or an array, [n], or [1, n] as tokenizers
            return them.

    Raises:
        UserError: it is something else, such as a text or a batch of several prompts.
    """
    if isinstance(prompt, (Tensor, np.ndarray)):
        prompt = cast(
            "Sequence[int]",
            prompt[0].tolist() if prompt.ndim == 2 and len(prompt) == 1 else prompt.tolist(),
        )
    found = prompt if isinstance(prompt, (list, tuple, range)) else None
    if found is None or not all(
        isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in found
    ):
        kind = type(prompt).__name__ if found is None else "list of something else"
        raise UserError(
            "prompt: it has to be integers, the token ids of one text (a list, tensor or array of"
            f" them), and is a {kind}. Encode a text with the target's tokenizer; decode several"
            " prompts one after the other."
        )
    return [int(token) for token in found]
