"""Labelled roots as tensors: what traces become for training and judging a selector."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.features import SCALARS
from selector.latency import LatencyTable

# The scalar inputs of the selector, in order. Units: nats (entropies, divergences), probability (l1), tokens (context),
# seconds (latency of a one-token pass at this context).
INPUT_SCALARS = (*SCALARS, "context", "temperature", "top_p", "t_draft", "t_target")


@dataclass
class Roots:
    """R roots. h_p_previous [R, H_p]; h_q_previous, h_q_root [R, H_q]; scalars [R, 11] (INPUT_SCALARS, raw);
    samples [R, s, A] estimates of E[tau + 1]; seconds [R, A]; setting [R] (index into `settings`); prompt [R] (index)."""

    h_p_previous: Tensor
    h_q_previous: Tensor
    h_q_root: Tensor
    scalars: Tensor
    samples: Tensor
    seconds: Tensor
    setting: Tensor
    settings: list[tuple[float, float]]
    prompt: Tensor
    kind: list[str]

    def __len__(self) -> int:
        return len(self.scalars)

    @property
    def efficiency(self) -> Tensor:
        """[R, A]: the labels, mean over the super-trees."""
        return self.samples.mean(1)

    def where(self, chosen: Tensor) -> "Roots":
        """The roots with `chosen` [R] True."""
        index = chosen.nonzero()[:, 0]
        rows = {
            name: getattr(self, name)[index]
            for name in (
                "h_p_previous",
                "h_q_previous",
                "h_q_root",
                "scalars",
                "samples",
                "seconds",
                "setting",
                "prompt",
            )
        }
        return Roots(**rows, settings=self.settings, kind=[self.kind[i] for i in index.tolist()])


def roots_from_traces(traces: dict[str, np.ndarray], verifier: str, table: LatencyTable) -> tuple[Roots, Roots]:
    """Training and validation roots of `verifier`'s labels, priced by `table`. Raises UserError if labels are missing."""
    if verifier not in traces:
        raise UserError(
            f"the traces hold no labels for {verifier}: add it to traces.verifiers and run stage=traces force=true."
        )
    samples = torch.from_numpy(traces[verifier].copy())
    if not torch.isfinite(samples).all():
        raise UserError(f"the labels of {verifier} hold NaN or infinite values; make the traces again (force=true).")
    context = torch.from_numpy(traces["context"].copy())
    pairs = list(zip(traces["temperature"].tolist(), traces["top_p"].tolist(), strict=True))
    settings = sorted(set(pairs))
    ids = {prompt: i for i, prompt in enumerate(dict.fromkeys(traces["prompt_id"].tolist()))}
    columns = [torch.from_numpy(traces[name].copy()).float() for name in (*SCALARS, "context", "temperature", "top_p")]
    roots = Roots(
        *(torch.from_numpy(traces[name].copy()) for name in ("h_p_previous", "h_q_previous", "h_q_root")),
        scalars=torch.cat([torch.stack(columns, -1), table.passes(context).float()], -1),
        samples=samples,
        seconds=table.actions(context),
        setting=torch.tensor([settings.index(pair) for pair in pairs]),
        settings=settings,
        prompt=torch.tensor([ids[prompt] for prompt in traces["prompt_id"].tolist()]),
        kind=traces["kind"].tolist(),
    )
    training = torch.from_numpy(traces["split"] == "train")
    for name, chosen in (("training", training), ("validation", ~training)):
        if not chosen.any():
            raise UserError(f"the traces hold no {name} roots: raise traces.train_prompts / validation_prompts.")
    return roots.where(training), roots.where(~training)
