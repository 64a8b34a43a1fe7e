"""What a selector loses without a part: variants of its inputs, labels, objective and amount of data. Pure tensors.

`pipelines.ablations` trains them, `evaluation` shows the results.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from selector.roots import Roots

Change = Callable[[Roots], Roots]


def unchanged(roots: Roots) -> Roots:
    return roots


@dataclass(frozen=True)
class Variant:
    """A training that differs from the full one.

    Attributes:
        name: in tables.
        group: the table or curve that it belongs to.
        config: settings that differ.
        training: what is done to the training roots.
        validation: what is done to the held-out roots.
        value: position on a curve.
        exchanged: trained on the held-out prompts, which may have more super-trees a root, and evaluated on the training
            prompts.
    """

    name: str
    group: str = "without a part"
    config: dict[str, float | str | list[int]] = field(default_factory=dict)
    training: Change = unchanged
    validation: Change = unchanged
    value: float = 0.0
    exchanged: bool = False


def without_states(roots: Roots) -> Roots:
    """Roots whose hidden states are all zero."""
    p, q, root = (torch.zeros_like(h) for h in roots.states)
    return replace(roots, h_p_previous=p, h_q_previous=q, h_q_root=root)


def without_scalars(roots: Roots) -> Roots:
    """Roots whose entropies, divergences, context and sampling setting are all zero."""
    return replace(roots, scalars=torch.zeros_like(roots.scalars))


def fewer_samples(roots: Roots, samples: int) -> Roots:
    """Labels from the first `samples` super-trees of every root."""
    return replace(roots, samples={name: labels[:, :samples] for name, labels in roots.samples.items()})


def fewer_prompts(roots: Roots, fraction: float) -> Roots:
    """The roots of a fraction of the prompts, one in every so many."""
    prompts = roots.prompt.unique()
    some = prompts[(torch.arange(len(prompts)) * fraction).floor().diff(prepend=torch.tensor([-1.0])) > 0]
    return roots.where(torch.isin(roots.prompt, some))


def shrunk_labels(roots: Roots) -> Roots:
    """Labels moved towards their setting's mean by as much as their noise suggests (James-Stein, action by action)."""
    samples = {name: labels.clone() for name, labels in roots.samples.items()}
    for labels in samples.values():
        for setting in roots.setting.unique():
            own = roots.setting == setting
            labels[own] = _shrunk(labels[own])
    return replace(roots, samples=samples)


def _shrunk(labels: Tensor) -> Tensor:
    """[R, s, A] with each root's mean moved towards the mean over the roots."""
    own = labels.mean(1, keepdim=True)
    if labels.shape[1] < 2 or len(labels) < 2:
        return labels
    noise = labels.var(1).mean(0) / labels.shape[1]
    trust = (1 - noise / own[:, 0].var(0).clamp(min=1e-12)).clamp(min=0)
    return labels + (trust - 1) * (own - own.mean(0))


def variants(samples: int, held_out_samples: int) -> list[Variant]:
    """All variants for labels of so many super-trees in training and held out; the full selector first. How many of them a root
    needs is measured on the split that has more."""
    exchanged = held_out_samples > samples
    note = ", splits exchanged" if exchanged else ""
    counts = [s for s in (1, 2, 4, 8, 16) if s <= max(samples, held_out_samples)]
    return [
        Variant("full"),
        Variant("no hidden states", training=without_states, validation=without_states),
        Variant("no scalars", training=without_scalars, validation=without_scalars),
        Variant("no tail term", config={"tail_weight": 0.0}),
        Variant("tail term ten times as heavy", config={"tail_weight": 10.0}),
        Variant("Eq. 12 alone", config={"regression_weight": 0.0}),
        Variant("regression alone", config={"policy_weight": 0.0}),
        Variant("logits without prices (NDE paper)", config={"sharpness": 0.0}),
        Variant("chooses by Eq. 11's prices", config={"pricing": "eq11"}),
        Variant("widths of the NDE paper (128, 512, 32)", config={"width": 128, "hidden": [512, 32]}),
        Variant("labels shrunk by their noise", training=shrunk_labels),
        *(
            Variant(f"s = {s}{note}", "super-trees", {}, partial(fewer_samples, samples=s), value=s, exchanged=exchanged)
            for s in counts
        ),
        *(
            Variant(f"{part:.0%} of the prompts", "prompts", {}, partial(fewer_prompts, fraction=part), value=part)
            for part in (0.125, 0.25, 0.5)
        ),
    ]
