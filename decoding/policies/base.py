"""The base class of policies, and the state of a generation that a policy may look at."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting
from nde_talf.decoding.tree import DraftTree


@dataclass
class DecodingState:
    """State at a root, before anything is drafted.

    Attributes:
        root: its token id.
        context: committed tokens, root included.
        room: how deep a tree may be before the context is full.
        p_previous: [V]. The target's distribution at the token before the root (its pass on the
            root has not happened), for selector features: unwarped at temperature 0
            (`nde_talf.decoding.sampling.sampling_setting.feature_setting`).
        h_previous: [H_p]. The target's feature there.
        tau: acceptance length of the last step, None at the first.
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
    memory: dict[Any, Any] = field(default_factory=dict)
    processed: Any = None

    def after(self, tokens: list[int], p_previous: Tensor, h_previous: Tensor) -> "DecodingState":
        """Return the state once `tokens` are committed, the last of which is the new root."""
        return replace(
            self,
            root=tokens[-1],
            context=self.context + len(tokens),
            room=self.room - len(tokens),
            p_previous=p_previous,
            h_previous=h_previous,
            tau=len(tokens) - 1,
        )


class TreePolicy:
    """Chooses and drafts a tree: `trees` and `draft` have to be written.

    Sequences that are read in turn, or by several threads, share the policy: see
    `DecodingState.memory`.

    Attributes:
        trees: how a tree's children come about, which decides the verifiers allowed: none, path,
            delayed, iid, without_replacement or top_k (`nde_talf.decoding.registry`).
        seconds: how long its last choice took, for the record.
        choice: function of a state and a drafter that returns the index in TREES of the delayed
            tree to draft, [1]; None for other policies. A CUDA graph holds it: it reads no number
            on the host, and the state's context may be a tensor [1].
    """

    trees: str = ""
    seconds: float = 0.0
    choice: Any = None

    def check_decoder(self, target: Any, drafter: Any, draft_setting: Any) -> None:
        """Raise UserError, or warn, where a decoder's models do not fit the policy.

        draft_setting: a setting of the draft's own; None: the decoder has none.
        """

    def delayed_tree(self, state: Any) -> Action | None:
        """Return the delayed tree of this step if it does not depend on the draft, otherwise None.

        Policies of other trees return None too.
        """
        return None

    def chosen(self, index: int) -> Action:
        """Return the tree of `choice`."""
        return TREES[index]

    def draft(self, state: DecodingState, drafter: Any, rng: Rng) -> DraftTree:
        """Build the tree of one step, with the root as its node 0."""
        raise NotImplementedError
