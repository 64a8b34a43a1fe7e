"""What a selector loses without a part: variants of its inputs, labels, objective and amount of
data.

Pure tensors.

`nde_talf.pipelines.ablations` trains them, `evaluation` shows the results.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nde_talf.selector.roots import Roots
from nde_talf.selector.settings import NDE_PAPER

Change = Callable[[Roots], Roots]
FULL = "full"  # the variant that leaves nothing out
NO_TAIL = "tail_weight=0"


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
        exchanged: trained on the held-out prompts, which may have more super-trees a root, and
            evaluated on the training prompts.
    """

    name: str
    group: str = "without a part"
    config: dict[str, Any] = field(default_factory=dict)
    training: Change = unchanged
    validation: Change = unchanged
    value: float = 0.0
    exchanged: bool = False


def without_states(roots: Roots) -> Roots:
    """Roots whose hidden states are all zero."""
    p, q, root = (torch.zeros(1).expand(h.shape) for h in roots.states)
    return replace(roots, h_p_previous=p, h_q_previous=q, h_q_root=root)


def without_scalars(roots: Roots) -> Roots:
    """Roots whose entropies, divergences, context and sampling setting are all zero."""
    return replace(roots, scalars=torch.zeros_like(roots.scalars))


def fewer_samples(roots: Roots, samples: int) -> Roots:
    """Labels from the first `samples` super-trees of every root."""
    return replace(
        roots, samples={name: labels[:][:, :samples] for name, labels in roots.samples.items()}
    )


def fewer_prompts(roots: Roots, fraction: float) -> Roots:
    """The roots of a fraction of the prompts, one in every so many."""
    prompts = roots.prompt.unique()
    some = prompts[
        (torch.arange(len(prompts)) * fraction).floor().diff(prepend=torch.tensor([-1.0])) > 0
    ]
    return roots.where(torch.isin(roots.prompt, some))


def shrunk_labels(roots: Roots) -> Roots:
    """Labels moved towards their setting's mean by as much as their noise suggests (James-Stein,
    action by action).
    """
    samples = {name: labels[:].clone() for name, labels in roots.samples.items()}
    for labels in samples.values():
        for setting in roots.setting.unique():
            own = roots.setting == setting
            labels[own] = _shrunk(labels[own])
    return replace(roots, samples={**samples})


def _shrunk(labels: Tensor) -> Tensor:
    """[R, s, A] with each root's mean moved towards the mean over the roots."""
    own = labels.mean(1, keepdim=True)
    if labels.shape[1] < 2 or len(labels) < 2:
        return labels
    noise = labels.var(1).mean(0) / labels.shape[1]
    trust = (1 - noise / own[:, 0].var(0).clamp(min=1e-12)).clamp(min=0)
    return labels + (trust - 1) * (own - own.mean(0))


def variants(samples: int, held_out_samples: int, prompts: int, folds: int) -> list[Variant]:
    """All variants, the full selector first.

    A name says what differs: a setting of `selector.*`, or what is done to the roots.

    Args:
        samples: super-trees at a training root.
        held_out_samples: super-trees at a held-out root. How many a root needs is measured on the
            split that has more.
        prompts: training prompts. A fraction of them that leaves fewer than `folds` has no variant.
        folds: parts of the training prompts, see `SelectorConfig.folds`.
    """
    exchanged = held_out_samples > samples
    note = ", splits exchanged" if exchanged else ""
    counts = [s for s in (1, 2, 4, 8, 16) if s <= max(samples, held_out_samples)]
    settings: list[dict[str, Any]] = [
        {"tail_weight": 0.0},
        {"tail_weight": 10.0},
        {"regression_weight": 0.0},
        {"policy_weight": 0.0},
        {"sharpness": 0.0},
        {"pricing": "eq11"},
        {"initialisation": "random"},
        {"weighting": "roots"},
        {"width": 128, "hidden": [512, 32]},
    ]
    fractions = [part for part in (0.125, 0.25, 0.5) if int(prompts * part) >= folds]
    return [
        Variant(FULL),
        Variant("selector=nde, the NDE paper's recipe", config=NDE_PAPER),
        Variant("hidden states zero", training=without_states, validation=without_states),
        Variant("scalars zero", training=without_scalars, validation=without_scalars),
        *(_of(config) for config in settings),
        Variant("labels shrunk by their noise", training=shrunk_labels),
        *(
            Variant(
                f"s = {s}{note}",
                "super-trees",
                {},
                partial(fewer_samples, samples=s),
                value=s,
                exchanged=exchanged,
            )
            for s in counts
        ),
        *(
            Variant(
                f"{part:.0%} of the prompts",
                "prompts",
                {},
                partial(fewer_prompts, fraction=part),
                value=part,
            )
            for part in fractions
        ),
    ]


def _of(config: dict[str, Any]) -> Variant:
    """The variant of other settings, named by them as one would type them."""
    return Variant(
        " ".join(
            f"{key}={value}".replace(".0", "").replace(" ", "") for key, value in config.items()
        ),
        config=config,
    )
