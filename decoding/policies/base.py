"""The policy protocol, and the state of a generation that a policy may look at before it drafts."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from decoding.drafter import Drafter
from decoding.ranked import RankedTree
from decoding.sampling import Rng, SamplingSetting
from decoding.tree import DraftTree
from decoding.unread import UnreadTree


@dataclass
class DecodingState:
    """What is known at a root, before anything is drafted.

    root: its token id. context: committed tokens, root included. room: how deep a tree may be before the context is
    full. p_previous [V] and h_previous [H_p]: the target's distribution and feature at the token before the root (its pass on
    the root has not happened). tau: acceptance length of the last step, None at the first. unread: whether the decoder
    takes an `UnreadTree` or a `RankedTree` too. choice: what `Chooser.choice` said here, where it was asked. memory: what a
    policy keeps of this sequence from step to step, by policy; empty at the first. A policy serves several sequences in turn,
    so what it learns of one belongs here and not on itself.
    """

    root: int
    context: int
    room: int
    setting: SamplingSetting
    p_previous: Tensor
    h_previous: Tensor
    tau: int | None = None
    unread: bool = False
    choice: int | None = None
    memory: dict[Any, Any] = field(default_factory=dict)


class Outlook(NamedTuple):
    """What the device knows of the next root, where the drafter stands already, before the host does. context [1]: committed
    tokens, root included; the others as in `DecodingState`."""

    context: Tensor
    setting: SamplingSetting
    p_previous: Tensor
    h_previous: Tensor


class TreePolicy(Protocol):
    """Chooses and drafts a tree. `trees` names how its children come about, which decides the verifiers allowed
    (see `decoding.verification`): none, path, delayed, iid, distinct or chosen. Sequences that are read in turn, or by several
    threads, share the policy: see `DecodingState.memory`."""

    trees: str

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree | UnreadTree | RankedTree: ...


@runtime_checkable
class Chooser(TreePolicy, Protocol):
    """A policy whose next tree depends on what the device knows at the end of a step: it is asked there, so that its choice
    comes to the host with the step's tokens, as `DecodingState.choice`."""

    def choice(self, outlook: Outlook, drafter: Drafter) -> Tensor | None:
        """[1], an integer of the policy's own; None where there is nothing to choose."""
        ...
