"""The policy protocol, and the state of a generation that a policy may look at before it drafts."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from decoding.drafter import Drafter
from decoding.sampling import Coins, SamplingSetting
from decoding.tree import DraftTree
from decoding.unread import UnreadTree


@dataclass
class DecodingState:
    """What is known at a root, before anything is drafted.

    root: its token id. context: committed tokens, root included. room: how deep a tree may be before the context is
    full. p_previous [V] and h_previous [H_p]: the target's distribution and feature at the token before the root (its pass on
    the root has not happened). tau: acceptance length of the last step, None at the first. unread: whether the decoder
    takes an `UnreadTree` too.
    """

    root: int
    context: int
    room: int
    setting: SamplingSetting
    p_previous: Tensor
    h_previous: Tensor
    tau: int | None = None
    unread: bool = False


class TreePolicy(Protocol):
    """Chooses and drafts a tree. `trees` names how its children come about, which decides the verifiers allowed
    (see `decoding.verification`): none, path, delayed, iid, distinct or chosen."""

    trees: str

    def draft(self, state: DecodingState, drafter: Drafter, coins: Coins) -> DraftTree | UnreadTree: ...
