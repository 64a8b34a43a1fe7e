"""Labelled roots as tensors: what traces become for training and judging a selector. Prices come with `selector.choices`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from decoding.common.errors import UserError
from decoding.features import SCALARS

# The scalars of a root that do not depend on the machine, in order. Units: nats (entropies, divergences), probability (l1),
# tokens (context).
ROOT_SCALARS = (*SCALARS, "context", "temperature", "top_p")
FEW_ROOTS = 50


@dataclass
class Roots:
    """R roots. h_p_previous [R, H_p]; h_q_previous, h_q_root [R, H_q]; scalars [R, 9] (ROOT_SCALARS, raw); context [R] in
    tokens; setting [R] (index into `settings`); prompt [R] (index); samples [R, s, A] by verifier: estimates of E[tau + 1];
    kind: domain of each root's prompt."""

    h_p_previous: Tensor
    h_q_previous: Tensor
    h_q_root: Tensor
    scalars: Tensor
    context: Tensor
    setting: Tensor
    prompt: Tensor
    samples: dict[str, Tensor]
    settings: list[tuple[float, float]]
    kind: list[str]

    def __len__(self) -> int:
        return len(self.scalars)

    @property
    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        """The network's three hidden states."""
        return self.h_p_previous, self.h_q_previous, self.h_q_root

    def where(self, chosen: Tensor) -> "Roots":
        """The roots with `chosen` [R] True, or at these indices."""
        index = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
        tensors = {f.name: getattr(self, f.name)[index] for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        samples = {name: labels[index] for name, labels in self.samples.items()}
        return replace(self, **tensors, samples=samples, kind=[self.kind[i] for i in index.tolist()])


def setting_title(setting: tuple[float, float]) -> str:
    """A (temperature, top-p) pair in words."""
    return f"temperature {setting[0]:g}, top-p {setting[1]:g}"


def roots_from_traces(traces: dict[str, np.ndarray], verifiers: Sequence[str], say: Callable[[str], object] = print) -> Roots:
    """The roots of a table of traces with the labels of `verifiers`.

    Raises UserError if labels are missing or not finite. `say` is told of sampling settings with few roots.
    """
    samples = {}
    for verifier in verifiers:
        if verifier not in traces:
            raise UserError(
                f"the traces hold no labels for {verifier}: add it to traces.verifiers and run stage=traces force=true."
            )
        samples[verifier] = torch.from_numpy(traces[verifier].copy())
        if not torch.isfinite(samples[verifier]).all():
            raise UserError(f"the labels of {verifier} hold NaN or infinite values; make the traces again (force=true).")
    pairs = list(zip(traces["temperature"].tolist(), traces["top_p"].tolist(), strict=True))
    settings = sorted(set(pairs))
    for pair in settings:
        if (count := pairs.count(pair)) < FEW_ROOTS:
            say(
                f"{setting_title(pair)} has {count} {traces['split'][0]} roots, fewer than {FEW_ROOTS}: "
                "its best static tree and its figures are mostly noise. Raise traces.train_prompts / validation_prompts, or "
                "lower traces.stride."
            )
    ids = {prompt: i for i, prompt in enumerate(dict.fromkeys(traces["prompt_id"].tolist()))}
    columns = [torch.from_numpy(traces[name].copy()).float() for name in ROOT_SCALARS]
    return Roots(
        *(torch.from_numpy(traces[name].copy()) for name in ("h_p_previous", "h_q_previous", "h_q_root")),
        scalars=torch.stack(columns, -1),
        context=torch.from_numpy(traces["context"].copy()),
        setting=torch.tensor([settings.index(pair) for pair in pairs]),
        prompt=torch.tensor([ids[prompt] for prompt in traces["prompt_id"].tolist()]),
        samples=samples,
        settings=settings,
        kind=traces["kind"].tolist(),
    )
