"""The head doctor: why does an engine accept fewer of a head's drafts than our loop does?

`python -m draft_training.doctor --run checkpoints/mine --counters counters.json` reads what an
engine counted on held-out prompts of the run, and decodes the same prompts here: once with the head
as it is, and once for each of the faults that engines are known to have, planted in our drafter on
purpose. The fault whose acceptance by position, domain and context length is most like the engine's
is the likely cause.

For example, an engine accepts 0.71, 0.30, 0.12 of the drafts at positions 1 to 3, and our loop
0.71, 0.52, 0.41. With all drafted tokens at one position our loop accepts 0.71, 0.31, 0.12:
"position offset". At temperature 0 the text does not depend on the head, so that an engine with the
very fault counts exactly what we count.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console, track
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.rules import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.draft_training.engine_counters import (
    EVERYTHING,
    ByGroup,
    Counters,
    Group,
    counted,
    group_of,
    read_counters,
)
from nde_talf.draft_training.export import load_head
from nde_talf.draft_training.families import rotary_of
from nde_talf.draft_training.head import EagleHead
from nde_talf.draft_training.head_drafter import EagleDrafter

HEALTHY = "no fault"
CHANCE = 0.01
"""A difference that is at least so probable by chance is none."""
CLOSE = 2.0
"""Causes whose log-likelihoods are within so many nats of the best are told together."""


# The faults. Each takes a copy of the head and gives a drafter with the fault, or None where the
# head cannot have it.


class _Drafter(EagleDrafter):
    """A drafter that can be given faults.

    Args:
        layers: of the target, whose features it gets.
        move: of positions of drafted tokens [B, n] and the first of them: other ones.
        late: it gets the feature before the one that goes with a token.
    """

    def __init__(
        self,
        head: EagleHead,
        layers: tuple[int, ...] | None = None,
        move: Callable[[Tensor, int], Tensor] | None = None,
        late: bool = False,
    ):
        self.late, self.drafting = late, [False]
        if move is not None:
            forward = head.forward

            def moved(
                tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, features: Tensor
            ) -> Tensor:
                if self.drafting[0]:
                    positions = move(positions, self.drafting[0])
                return forward(tokens, positions, mask, cache, features)

            head.forward = moved
        super().__init__(head)
        self.feature_layers = head.feature_layers if layers is None else layers

    def start(
        self, prompt: list[int], token: int, features: Tensor, setting: SamplingSetting
    ) -> None:
        self.last = features[-1:]
        super().start(
            prompt,
            token,
            torch.cat([features[:1], features[:-1]]) if self.late else features,
            setting,
        )

    def advance(self, accepted: Any, features: Tensor) -> None:
        given = torch.cat([self.last, features[:-1]]) if self.late else features
        self.last = features[-1:]
        super().advance(accepted, given)

    def expand(self, tree: Any, nodes: list[int]) -> None:
        self.drafting[0] = self.session.length
        super().expand(tree, nodes)
        self.drafting[0] = 0


def _norm_too_much(head: EagleHead) -> EagleDrafter:
    """EAGLE: the layer's input is normalised, as in other layers of the family.

    EAGLE-3: so is what attention is added to.
    """
    given, epsilon = head.entries, getattr(head.config, "rms_norm_eps", 1e-6)

    def entries(tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        inputs, residual = given(tokens, features)
        if head.feature_layers:
            return inputs, head.layers[0].hidden_norm(residual)
        return F.rms_norm(inputs, inputs.shape[-1:], eps=epsilon), residual

    head.entries = entries
    return _Drafter(head)


def _norm_missing(head: EagleHead) -> EagleDrafter | None:
    """EAGLE: the target's features are those before its final norm.

    EAGLE-3: the output is read out without the head's norm.
    """
    if head.feature_layers:
        head.read = lambda outputs: outputs
        return _Drafter(head)
    return _of_layers(head, (head.target.layers,))


def _of_layers(head: EagleHead, layers: tuple[int, ...]) -> EagleDrafter | None:
    try:
        head.target.reader(layers)
    except UserError:
        return None  # its layers are not where Llama has them, or there are too few
    return _Drafter(head, layers)


def _other_layer(head: EagleHead, by: int) -> EagleDrafter | None:
    """Features of layers further up or down; of EAGLE, of one before the last."""
    if head.feature_layers:
        return _of_layers(head, tuple(layer + by for layer in head.feature_layers))
    return _of_layers(head, (head.target.layers - 1,)) if by < 0 else None


def _plain_rope(head: EagleHead) -> EagleDrafter | None:
    """Angles of base 10,000 without scaling: what readers take that do not find `rope_parameters`."""
    rope = getattr(head.config, "rope_parameters", None) or {}
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    if head.family.name == "gemma3_text" or all(
        rope.get(key, value) == value for key, value in plain.items()
    ):
        return None
    config = deepcopy(head.config)
    config.rope_parameters = plain
    head.rotary, head.angles = rotary_of(head.family, config)
    head.rotary.to(head.device)
    return _Drafter(head)


def _paired_rope(head: EagleHead) -> EagleDrafter | None:
    """Rotation of neighbouring numbers (x_0, x_1), as GPT-J has it, in place of halves (x_0,
    x_{D/2}).
    """
    attention = head.layers[0].self_attn
    if head.family.norms_heads:
        return None
    for projection in (attention.q_proj, attention.k_proj):
        for name, tensor in projection.named_parameters():
            by_head = tensor.data.unflatten(0, (-1, attention.head_dim))
            projection.get_parameter(name).data = torch.cat(
                [by_head[:, ::2], by_head[:, 1::2]], 1
            ).flatten(0, 1)
    return _Drafter(head)


def _other_ids(head: EagleHead) -> EagleDrafter | None:
    """Ids of the draft vocabulary are taken for the target's: d2t is not applied."""
    if head.vocabulary is None:
        return None
    own = head.lm_head

    def logits(outputs: Tensor) -> Tensor:
        found = own(head.read(outputs))
        return F.pad(found, (0, head.target.vocab_size - found.shape[-1]), value=-torch.inf)

    head.logits = logits
    return _Drafter(head)


def _in_half(head: EagleHead, tables: bool) -> EagleDrafter | None:
    """Weights in bfloat16, or the rotary tables."""
    if head.target.dtype == torch.bfloat16 and not tables:
        return None
    if tables:
        for name, table in head.rotary.named_buffers():
            setattr(head.rotary, name, table.to(torch.bfloat16).to(table.dtype))
        return _Drafter(head)
    if (
        head.feature_layers
    ):  # whose embedding is the target's: the weights are rounded, and the passes as before
        for weight in head.parameters():
            weight.data = weight.data.to(torch.bfloat16).to(weight.dtype)
        return _Drafter(head)
    return _Drafter(head.to(torch.bfloat16))


FAULTS: dict[str, tuple[str, Callable[[EagleHead], EagleDrafter | None]]] = {
    "a norm too much": ("norm", _norm_too_much),
    "a norm is missing": ("norm", _norm_missing),
    "features of a lower layer": ("layer", partial(_other_layer, by=-1)),
    "features of a higher layer": ("layer", partial(_other_layer, by=1)),
    "rope with base 10,000, unscaled": ("rope", _plain_rope),
    "rope turns neighbouring pairs": ("rope", _paired_rope),
    "d2t not applied": ("vocabulary map", _other_ids),
    "drafted tokens are one position late": (
        "position offset",
        lambda head: _Drafter(head, move=lambda at, _: at + 1),
    ),
    "all drafted tokens have one position": (
        "position offset",
        lambda head: _Drafter(head, move=lambda at, first: at * 0 + first),
    ),
    "features are one token late": ("position offset", lambda head: _Drafter(head, late=True)),
    "the head is in bfloat16": ("dtype", partial(_in_half, tables=False)),
    "rotary tables are in bfloat16": ("dtype", partial(_in_half, tables=True)),
}
"""By what the engine does wrong: the cause, and what plants it."""
TEMPLATE = "template"
ADVICE = {
    "norm": (
        "compare which norms the engine's layer has with config.json (norm_before_residual) and"
        " with docs/draft.md."
    ),
    "layer": (
        "compare the layers that the engine takes features of with"
        " eagle_aux_hidden_state_layer_ids."
    ),
    "rope": (
        "check rope_theta and rope_parameters in the head's config.json against the engine's log."
    ),
    TEMPLATE: "compare the token ids that the engine gets with those of the run's prompts.",
    "vocabulary map": "check that the engine reads d2t, and as offsets.",
    "position offset": (
        "compare the positions of drafted tokens, and which feature goes with which token."
    ),
    "dtype": "check the dtype that the engine loads the head in.",
}


def other_prompts(prompts: Sequence[Prompt], tokenizer: Any) -> dict[str, list[list[int]]]:
    """Token ids that an engine may get in place of the prompts', by how: with or without special
    tokens, or a template.

    Only those that differ.
    """
    found = {
        "prompts without special tokens": [
            tokenizer(p.text, add_special_tokens=False)["input_ids"] for p in prompts
        ],
        "prompts with special tokens added": [
            tokenizer(p.text, add_special_tokens=True)["input_ids"] for p in prompts
        ],
    }
    if tokenizer.bos_token_id is not None:
        found["prompts after a first token"] = [
            [tokenizer.bos_token_id, *p.tokens] for p in prompts
        ]
    special = set(tokenizer.all_special_ids)
    found["prompts stripped of special tokens"] = [
        [t for t in p.tokens if t not in special] for p in prompts
    ]
    if getattr(tokenizer, "chat_template", None):
        chats = ([{"role": "user", "content": p.text}] for p in prompts)
        found["prompts in the chat template"] = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            for chat in chats
        ]
    known: list[list[list[int]]] = [[p.tokens for p in prompts]]
    different = {}
    for name, tokens in found.items():
        if tokens not in known and all(tokens):
            known.append(tokens)
            different[name] = tokens
    return different


def expected(
    target: CausalModel,
    drafter: EagleDrafter,
    prompts: Sequence[Prompt],
    tokens: Sequence[list[int]],
    drafted: int,
    new_tokens: int,
    setting: SamplingSetting = SamplingSetting(0.0),
    by_group: bool = True,
) -> ByGroup:
    """What our loop counts with `drafter`, one path of `drafted` tokens at a time: `new_tokens`
    after each of `tokens`, which are those of `prompts` or others in their place.
    """
    decoder, found = (
        SpeculativeDecoder(target, drafter, Delayed(Action(1, 0, drafted)), VERIFIERS["naive"]),
        dict[Group, Counters](),
    )
    for index, (prompt, given) in enumerate(zip(prompts, tokens, strict=True)):
        steps = decoder.generate(given, new_tokens, setting, Rng.seeded(index)).steps
        own = Counters(len(steps), [sum(step.tau > at for step in steps) for at in range(drafted)])
        group = group_of(prompt) if by_group else EVERYTHING
        found[group] = found.get(group, Counters()) + own
    return found


@dataclass
class Diagnosis:
    """What an engine's counters say.

    Attributes:
        causes: keys of `ADVICE`, the likely ones; empty where nothing is wrong, or nothing known
            fits.
        faults: what the engine does wrong, in words: keys of `FAULTS`, or of `other_prompts`; the
            most likely first.
        probability: that chance alone makes a difference as large as that from the head as it is.
        fits: the same for the first of `faults`.
        likelihood: by fault and for `HEALTHY`, its log-likelihood less that of the best.
    """

    causes: list[str]
    faults: list[str]
    probability: float
    fits: float
    likelihood: dict[str, float]


def diagnose(engine: ByGroup, ours: dict[str, ByGroup]) -> Diagnosis:
    """The likely causes of `engine`'s counters. ours: what our loop counts with each fault, and as
    `HEALTHY`.

    At each position the tokens that were accepted are binomial among those that came so far. A
    fault that counts exactly what the engine counts is the cause, unless the head as it is does
    too.
    """
    scores = {
        name: sum(_log_likelihood(own, counted[group]) for group, own in engine.items())
        for name, counted in ours.items()
    }
    best = max(scores.values())
    exact = [name for name, counted in ours.items() if counted == engine]
    probability = _by_chance(engine, ours[HEALTHY])
    if HEALTHY in exact or (not exact and probability >= CHANCE):
        names = []
    else:
        names = exact or [
            name
            for name in sorted(scores, key=lambda name: -scores[name])
            if scores[name] >= best - CLOSE
        ]
        names = [] if HEALTHY in names else names
    causes = list(dict.fromkeys(FAULTS[name][0] if name in FAULTS else TEMPLATE for name in names))
    fits = _by_chance(engine, ours[names[0]]) if names else probability
    return Diagnosis(
        causes, names, probability, fits, {name: score - best for name, score in scores.items()}
    )


def _cells(counters: Counters) -> list[tuple[int, int]]:
    """(accepted, of how many) at each position."""
    return list(zip(counters.accepted, [counters.drafts, *counters.accepted], strict=False))


def _log_likelihood(engine: Counters, ours: Counters) -> float:
    total = 0.0
    for (accepted, of), (expected, among) in zip(_cells(engine), _cells(ours), strict=True):
        rate = torch.tensor((expected + 0.5) / (among + 1), dtype=torch.float64)
        total += float(accepted * rate.log() + (of - accepted) * (1 - rate).log())
    return total


def _by_chance(one: ByGroup, other: ByGroup) -> float:
    """The probability of counters as different as these two where the rates are equal: G tests of
    all cells together.
    """
    statistic, cells = 0.0, 0
    for group in one:
        for (a, n), (b, m) in zip(_cells(one[group]), _cells(other[group]), strict=True):
            if 0 < a + b < n + m and n and m:
                rate, cells = (a + b) / (n + m), cells + 1
                table = [
                    (a, n * rate),
                    (n - a, n * (1 - rate)),
                    (b, m * rate),
                    (m - b, m * (1 - rate)),
                ]
                statistic += 2 * sum(
                    seen * float(torch.tensor(seen / mean).log()) for seen, mean in table if seen
                )
    if not cells:
        return 1.0
    return float(
        torch.special.gammaincc(
            torch.tensor(cells / 2).double(), torch.tensor(max(0.0, statistic) / 2).double()
        )
    )


def suspects(
    target: CausalModel,
    folder: str | Path,
    prompts: Sequence[Prompt],
    drafted: int,
    new_tokens: int,
    tokenizer: Any = None,
    setting: SamplingSetting = SamplingSetting(0.0),
    by_group: bool = True,
) -> dict[str, ByGroup]:
    """What our loop counts on `prompts` with the head in `folder` as it is (`HEALTHY`), and with
    each fault that it can have.

    Args:
        drafted: tokens at a time.
        new_tokens: after each prompt.
        tokenizer: the target's, for prompts rendered in another way; None: these are not looked at.
    """
    head, plain = load_head(folder, target), [prompt.tokens for prompt in prompts]
    count = partial(
        expected, target, drafted=drafted, new_tokens=new_tokens, setting=setting, by_group=by_group
    )
    found = {HEALTHY: count(EagleDrafter(deepcopy(head)), prompts, plain)}
    for name, (_, plant) in track(FAULTS.items(), "faults", len(FAULTS)):
        if (drafter := plant(deepcopy(head))) is not None:
            found[name] = count(drafter, prompts, plain)
    for name, tokens in (
        other_prompts(prompts, tokenizer) if tokenizer is not None else {}
    ).items():
        found[name] = count(EagleDrafter(deepcopy(head)), prompts, tokens)
    return found


def report(found: Diagnosis, engine: ByGroup, ours: dict[str, ByGroup]) -> list[str]:
    """Lines for a person."""

    def rates(counters: Counters) -> str:
        return ", ".join(f"{rate:.3f}" for rate in counters.rates)

    lines = []
    for group in sorted(engine):
        lines.append(
            f"{', '.join(group)}: engine {rates(engine[group])}; expected"
            f" {rates(ours[HEALTHY][group])}"
        )
    if found.causes:
        lines += [f"Likely cause: {cause} - {ADVICE[cause]}" for cause in found.causes]
        lines.append("Fits: " + "; ".join(found.faults) + ".")
        if found.fits < CHANCE:
            lines.append(
                "It does not explain the full difference: there may be a second cause, or other"
                " text."
            )
    elif found.probability < CHANCE:
        lines.append("The engine differs, and by none of the known causes.")
    else:
        lines.append(f"No difference beyond chance (probability {found.probability:.2f}).")
    return lines


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m draft_training.doctor", description="Why an engine accepts less of a head."
    )
    parser.add_argument(
        "--run", type=Path, required=True, help="folder of the run that trained the head"
    )
    parser.add_argument(
        "--counters",
        type=Path,
        required=True,
        help="of the engine: JSON, or the text of vLLM's /metrics",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=24,
        help="the first so many test prompts, which the engine decoded",
    )
    parser.add_argument(
        "--new-tokens", type=int, default=64, help="after each prompt, as in the engine"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        given, pair = read_counters(options.counters), Pair(options.run / "pair")
        from transformers import AutoTokenizer

        prompts, where = pair.prompts("test", options.prompts, "--prompts"), pair.where("target")
        target, setting = (
            pair.target(options.device, "float32"),
            SamplingSetting(options.temperature),
        )
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        prompts, engine = counted(given, prompts)
        drafted, export = (
            len(next(iter(engine.values())).accepted),
            options.run / "draft" / "export",
        )
        ours = suspects(
            target,
            export,
            prompts,
            drafted,
            options.new_tokens,
            tokenizer,
            setting,
            "" not in given,
        )
    except UserError as error:
        console.print(str(error), style="red")
        sys.exit(1)
    for line in report(diagnose(engine, ours), engine, ours):
        console.print(line, highlight=False)


if __name__ == "__main__":
    main()
