"""The base class of policies, and the state of a generation that a policy may look at before it drafts."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.device_tree import DeviceAccepted, DeviceTree
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.processing import Processed
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.setting import AUTO
from nde_talf.decoding.tree import DraftTree


class Recording(Protocol):
    """What `nde_talf.decoding.captured.Captures` is for those that it is given to."""

    def tree(self, root: int, hidden: Tensor) -> DeviceTree: ...
    def verified(self, tree: Any, logits: Tensor, rule: Any, rng: Any) -> DeviceAccepted | None: ...


@dataclass
class DecodingState:
    """What is known at a root, before anything is drafted.

    Attributes:
        root: its token id.
        context: committed tokens, root included.
        room: how deep a tree may be before the context is full.
        p_previous: [V]. The target's distribution at the token before the root (its pass on the
            root has not happened), as features look at it: unwarped at temperature 0
            (`nde_talf.decoding.setting.feature_setting`).
        h_previous: [H_p]. The target's feature there.
        tau: acceptance length of the last step, None at the first.
        device: whether the decoder takes a `DeviceTree` too.
        choice: what `Chooser.choice` returned for this root, if the policy is a `Chooser`.
        captures: `nde_talf.decoding.captured.Captures`, whose recorded levels a `DeviceTree` grows
            by; None: it grows one operation at a time.
        memory: what a policy remembers of this sequence from step to step, by policy; empty at the
            first. A policy serves several sequences in turn, so what it learns of one belongs here
            and not on itself.
        processed: the text, and what changes logits by it; None where nothing does.
    """

    root: int
    context: int
    room: int
    setting: SamplingSetting
    p_previous: Tensor
    h_previous: Tensor
    tau: int | None = None
    device: bool = False
    choice: int | None = None
    captures: "Recording | None" = None
    memory: dict[Any, Any] = field(default_factory=dict)
    processed: Processed | None = None

    def rooted(self, drafter: Drafter) -> DraftTree | DeviceTree:
        """The tree of the root alone, on the device where the decoder takes that."""
        if self.captures:
            return self.captures.tree(self.root, drafter.root.hidden)
        q = drafter.root.q
        return DeviceTree(self.root, q) if self.device else DraftTree.rooted(self.root, q)


class Outlook(NamedTuple):
    """What the device knows of the next root before the host does.

    The drafter is at that root already. context: number of committed tokens, root included, [1], or
    an int where the host knows it. The others are as in `DecodingState`.
    """

    context: Tensor | int
    setting: SamplingSetting
    p_previous: Tensor
    h_previous: Tensor


class TreePolicy:
    """Chooses and drafts a tree: `trees` and `draft` have to be written.

    Sequences that are read in turn, or by several threads, share the policy: see
    `DecodingState.memory`.

    Attributes:
        trees: how a tree's children come about, which decides the verifiers allowed: none, path,
            delayed, iid, without_replacement or top_k (`nde_talf.decoding.registry`).
        draft_setting: what the draft's distributions are warped with where the decoder says "auto";
            None: what the target's are.
        seconds: how long its last choice took, for the record.
        shapes: all trees that a policy of delayed trees may draft.
    """

    trees: str
    draft_setting: SamplingSetting | str | None = AUTO
    seconds: float = 0.0
    shapes: tuple[Any, ...] = ()

    def check_decoder(self, target: Any, drafter: Drafter | None, draft_setting: Any) -> None:
        """Raise UserError, or warn, where a decoder's models do not fit the policy."""

    def draft(self, state: DecodingState, drafter: Any, rng: Rng) -> DraftTree | DeviceTree:
        """Build the tree of one step, with the root as its node 0."""
        raise NotImplementedError


class Chooser(TreePolicy):
    """A policy whose next tree depends on what the device knows at the end of a step: it is asked
    there, so that its choice comes to the host with the step's tokens, as `DecodingState.choice`.
    """

    def choice(self, outlook: Outlook, drafter: Drafter) -> Tensor | None:
        """[1], an integer that the policy understands; None where there is nothing to choose."""
        raise NotImplementedError


def require_positive(**settings: int) -> None:
    """Raise UserError, naming it, for a setting below 1."""
    require_at_least(1, **settings)


def require_at_least(minimum: int, **settings: int) -> None:
    """Raise UserError, naming it, for a setting below `minimum`."""
    for name, value in settings.items():
        if value < minimum:
            raise UserError(f"{name}={value}: it must be at least {minimum}.")


def require_fractions(**settings: float) -> None:
    """Raise UserError for a setting outside [0, 1)."""
    for name, value in settings.items():
        if not 0 <= value < 1:
            raise UserError(f"{name}={value}: it must lie in [0, 1).")


def require_rising(**settings: float) -> None:
    """Raise UserError unless the settings rise in the order given."""
    for (low, a), (high, b) in pairwise(settings.items()):
        if not a < b:
            raise UserError(f"{low}={a} and {high}={b}: {low} must be smaller than {high}.")
