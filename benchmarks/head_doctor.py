"""Head doctor: find why an engine accepts fewer of a head's drafts than our loop does.

`python -m benchmarks.head_doctor --run checkpoints/mine --counters counters.json` decodes
held-out prompts of the run here, greedily, once with the head as it is and once for each fault that
engines are known to have, planted in our drafter. The fault whose acceptance by position is most
like the engine's is the likely cause. For example, an engine accepts 0.71, 0.30, 0.12 of the drafts
at positions 1 to 3 and our loop 0.71, 0.52, 0.41; with features that come one token late our loop
accepts 0.71, 0.31, 0.12.
"""

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nde_talf.data.text.pair import Pair
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console, track
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.model.head import EagleHead

HEALTHY = "no fault"
CLOSE = 3.0
"""Nats by which a fault has to explain an engine's counts better than the healthy head."""

Counts = list[int]
"""Number of verified drafts, then the number accepted at position 1, 2 and so on."""


def read_counters(file: Path) -> Counts:
    """Read `{"drafts": 100, "accepted": [71, 52, 41]}`, or the text of vLLM's `/metrics`.

    Raises:
        UserError: it is neither, or the numbers cannot be.
    """
    try:
        text = file.read_text(encoding="utf-8")
        content: Any = json.loads(text) if text.lstrip().startswith("{") else _metrics(text)
        counts = [int(content["drafts"]), *map(int, content["accepted"])]
        if len(counts) < 2 or any(not 0 <= later <= earlier for earlier, later in pairwise(counts)):
            raise ValueError(f"{counts[1:]} of {counts[0]} drafts were accepted")
        return counts
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file}: it holds no counters ({error}). Give counts by position, each at most the one"
            ' before it, as {"drafts": N, "accepted": [...]}, or the text of vLLM\'s /metrics.'
        ) from error


def _metrics(text: str) -> dict[str, object]:
    """Sum vLLM's counters over its engines."""
    line = r"^vllm:spec_decode_num_{}(?:_total)?{{([^}}]*)}}\s+(\S+)"
    accepted: dict[int, float] = defaultdict(float)
    for labels, value in re.findall(line.format("accepted_tokens_per_pos"), text, re.M):
        accepted[int(re.findall(r'position="(\d+)"', labels)[0])] += float(value)
    drafts = sum(float(value) for _, value in re.findall(line.format("drafts"), text, re.M))
    return {"drafts": drafts, "accepted": [accepted[at] for at in range(len(accepted))]}


class LateFeatures(EagleDrafter):
    """A drafter that gets the feature before the one that goes with a token."""

    def start(
        self, prompt: list[int], token: int, features: Tensor, setting: SamplingSetting
    ) -> None:
        """See `Drafter.start`."""
        self._last = features[:1]
        super().start(prompt, token, self._delayed(features), setting)

    def advance(self, accepted, features: Tensor) -> None:
        """See `Drafter.advance`."""
        super().advance(accepted, self._delayed(features))

    def _delayed(self, features: Tensor) -> Tensor:
        delayed = torch.cat([self._last, features[:-1]])
        self._last = features[-1:]
        return delayed


def _at_layers(head: EagleHead, layers: tuple[int, ...]) -> EagleDrafter:
    head.target.reader(layers)  # raises UserError where the target has no such layers
    drafter = EagleDrafter(head)
    drafter.feature_layers = layers
    return drafter


def without_norm(head: EagleHead) -> EagleDrafter:
    """Leave out the final norm: the target's before EAGLE's features, or an EAGLE-3 head's."""
    if not head.feature_layers:
        return _at_layers(head, (head.target.layers,))
    head.norm = nn.Identity()
    return EagleDrafter(head)


def one_layer_lower(head: EagleHead) -> EagleDrafter:
    """Take the target's features one layer too low."""
    layers = head.feature_layers or (head.target.layers,)
    return _at_layers(head, tuple(layer - 1 for layer in layers))


def plain_rope(head: EagleHead) -> EagleDrafter:
    """Rotate with base 10,000, as readers do that do not find `rope_parameters`."""
    for name, table in head.rotary.named_buffers():
        if name.endswith("inv_freq"):
            table.copy_(10_000.0 ** -(torch.arange(len(table)) / len(table)))
    return EagleDrafter(head)


PROMPTS = "prompts with or without a first token"
FAULTS: dict[str, Callable[[EagleHead], EagleDrafter]] = {
    HEALTHY: EagleDrafter,
    "a norm is missing: compare norms with config.json": without_norm,
    "features of a lower layer: compare eagle_aux_hidden_state_layer_ids": one_layer_lower,
    "rope with base 10,000: compare rope_parameters": plain_rope,
    "features one token late: compare which feature goes with which token": LateFeatures,
    PROMPTS: EagleDrafter,
}
"""Faults that an engine may have -> the drafter that plants each."""


def count(
    drafter: EagleDrafter, prompts: Sequence[list[int]], drafted: int, new_tokens: int
) -> Counts:
    """Count what our loop accepts of paths of `drafted` tokens, in texts after each prompt.

    A text ends by itself, or after `new_tokens`.
    """
    path = Delayed(Action(1, 0, drafted))
    decoder = SpeculativeDecoder(drafter.target, drafter, path, "naive")
    taus: list[int] = []
    for prompt in prompts:
        text = decoder.generate(
            prompt, new_tokens, SamplingSetting(0.0), Rng.seeded(0), decoder.target.ends
        )
        taus += [step.tau for step in text.steps]
    return [sum(tau >= position for tau in taus) for position in range(drafted + 1)]


def suspects(
    target: CausalModel, folder: Path, prompts: Sequence[list[int]], drafted: int, new_tokens: int
) -> dict[str, Counts]:
    """Count what our loop accepts of the head in `folder` with each fault that it can have."""
    first = target.config.bos_token_id
    others = [tokens[1:] if tokens[0] == first else [first, *tokens] for tokens in prompts]
    counts = {}
    for name, plant in track(FAULTS.items(), "faults", len(FAULTS)):
        if name == PROMPTS and first is None:
            continue  # the model's texts begin without a token of their own
        try:
            drafter = plant(load_head(folder, target))
        except UserError:
            continue  # this head cannot have it
        given = [*filter(None, others)] if name == PROMPTS else prompts
        counts[name] = count(drafter, given, drafted, new_tokens)
    return counts


def diagnose(engine: Counts, ours: dict[str, Counts]) -> str:
    """Name the fault in `ours` whose counts explain `engine` best; `HEALTHY` where none does."""
    fits = {name: _log_likelihood(engine, counts) for name, counts in ours.items()}
    best = max(fits, key=fits.__getitem__)
    return HEALTHY if fits[HEALTHY] >= fits[best] - CLOSE else best


def _log_likelihood(engine: Counts, ours: Counts) -> float:
    """Sum over positions: accepted tokens are binomial among the drafts that came so far."""
    total = 0.0
    for (among, accepted), (tried, passed) in zip(pairwise(engine), pairwise(ours), strict=True):
        rate = (passed + 0.5) / (tried + 1)
        total += accepted * math.log(rate) + (among - accepted) * math.log(1 - rate)
    return total


def main(arguments: list[str] | None = None) -> None:
    """Print acceptance by position, here and in the engine, and the cause of a difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the head's run")
    parser.add_argument("--counters", type=Path, required=True, help="JSON, or vLLM's /metrics")
    parser.add_argument("--prompts", type=int, default=24, help="test prompts that it decoded")
    parser.add_argument("--new-tokens", type=int, default=64, help="after each prompt")
    options = parser.parse_args(arguments)
    try:
        engine, pair = read_counters(options.counters), Pair(options.run / "pair")
        prompts = [each.tokens for each in pair.prompts("test", options.prompts, "--prompts")]
        target, folder = pair.target("cpu", "float32"), options.run / "draft" / "export"
        ours = suspects(target, folder, prompts, len(engine) - 1, options.new_tokens)
    except UserError as error:
        console.print(str(error), style="red")
        sys.exit(1)
    for name, counts in {"the engine": engine, **ours}.items():
        rates = " ".join(f"{accepted / max(1, counts[0]):.3f}" for accepted in counts[1:])
        console.print(f"{rates}  {name}", highlight=False)
    console.print(f"Likely cause: {diagnose(engine, ours)}", highlight=False)


if __name__ == "__main__":
    main()
