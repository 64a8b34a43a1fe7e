"""Which threshold of the draft's confidence is best for an engine that ends a path by one.

A rule decides whether to draft token i before it is drawn, by the tokens before it. With reach(i)
the probability that the first i - 1 drawn tokens are all accepted, and overlap(i) = sum over x of
min(p, q) after them, a step under the rule commits

    E[tau + 1] = 1 + E[ sum over i of  1{token i is drafted} reach(i) overlap(i) ],

and 1{...} looks at no token from i on. So paths of full length, drawn once, serve every rule and
threshold. (Traces cannot: they hold no confidences.)
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.super_trees import Draft, Prefix, draft_prefix, sampled_super_trees
from nde_talf.data.traces.trace import root_positions
from nde_talf.decoding.actions import Action, tree_index
from nde_talf.decoding.common.bootstrap import ratio_of_totals, sums_by_prompt
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.delayed import Autoregressive
from nde_talf.decoding.policies.stopping import DRAWN, LARGEST
from nde_talf.decoding.sampling import Rng, SamplingSetting, warp
from nde_talf.decoding.setting import feature_setting
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.evaluation.methods import THRESHOLDS
from nde_talf.selector.latency import LatencyTable, StepCosts

LONGEST, SAMPLES, TOGETHER = 16, 4, 8


class Rule(NamedTuple):
    """`ConfidenceStop(threshold, longest, by)`; with threshold 0 a path of `longest` tokens."""

    by: str
    threshold: float
    longest: int

    def for_transformers(self) -> dict[str, float | str]:
        """What an assistant's generation_config is to hold, for a rule on the probability of the
        token drawn last.
        """
        return {
            "num_assistant_tokens": self.longest,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": self.threshold,
        }


RULES = [Rule(*own) for own in product((LARGEST, DRAWN), THRESHOLDS, (4, 8, LONGEST))]


class Paths(NamedTuple):
    """Paths of 16 tokens after R roots, `SAMPLES` = s each.

    Attributes:
        gain: [R, s, 16], reach(i) overlap(i).
        largest: [R, s, 16], the draft's largest probability before token i.
        drawn: [R, s, 16], its probability of token i.
        context: [R], committed tokens.
        prompt: [R], which prompt a root belongs to.
    """

    gain: Tensor
    largest: Tensor
    drawn: Tensor
    context: Tensor
    prompt: Tensor


@torch.inference_mode()
def draw_paths(
    target: CausalModel,
    draft: CausalModel | Draft,
    prompts: Sequence[Prompt],
    settings: Sequence[SamplingSetting],
    new_tokens: int,
    stride: int,
) -> Paths:
    """Paths after every `stride`-th token of texts that the target writes after the prompts, under
    each setting.

    Raises:
        UserError: there is no such token.
    """
    decoder = SpeculativeDecoder(target, None, Autoregressive(), "naive")
    columns: list[tuple[Tensor, ...]] = []
    for setting, (number, prompt) in product(settings, enumerate(prompts)):
        text = decoder.generate(prompt.tokens, new_tokens, setting, Rng.seeded(number)).tokens
        columns += _after(target, draft, prompt.tokens, text, setting, stride, number)
    if not columns:
        raise UserError(
            f"no text is longer than traces.stride={stride}, so there are no paths to try"
            " thresholds on: lower it."
        )
    return Paths(*(torch.cat(own) for own in zip(*columns, strict=True)))


def _after(
    target: CausalModel,
    draft: CausalModel | Draft,
    prompt: list[int],
    text: list[int],
    setting: SamplingSetting,
    stride: int,
    number: int,
) -> Iterator[tuple[Tensor, ...]]:
    """The columns of the roots of the text after one prompt, by parts."""
    tokens, layout = (
        torch.tensor([*prompt, *text], device=target.device),
        super_tree_layout(1, LONGEST, 0),
    )
    positions = torch.tensor(root_positions(prompt, tokens.tolist(), stride), device=target.device)
    inside = Prefix(target, tokens)
    generator = torch.Generator().manual_seed(number)
    drawn = sampled_super_trees(
        inside,
        draft_prefix(draft, inside),
        tokens,
        positions,
        SAMPLES,
        layout,
        setting,
        generator,
        TOGETHER * SAMPLES,
    )
    for at, trees in enumerate(drawn):
        p, q = (rows.double() for rows in trees.distributions(target, draft, setting, setting))
        seen = warp(draft.logits(trees.h_q), feature_setting(setting)).double()
        chosen = trees.tokens[:, 1:, None]
        accepted = (p.gather(-1, chosen) / q.gather(-1, chosen)).clamp(max=1)[..., 0].cumprod(-1)
        reach = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], -1)
        values = reach * torch.minimum(p, q).sum(-1), seen.amax(-1), seen.gather(-1, chosen)[..., 0]
        roots = positions[at * TOGETHER :][:TOGETHER].cpu() + 1
        yield (
            *(own.view(-1, SAMPLES, LONGEST).cpu() for own in values),
            roots,
            torch.full_like(roots, number),
        )


def seconds_per_token(paths: Paths, rule: Rule, costs: StepCosts) -> Tensor:
    """[R]: mean seconds over mean tokens of a step at every root.

    A rule on the largest probability runs the draft once more than there are tokens, unless the
    path is as long as allowed or empty.
    """
    sure = (paths.largest if rule.by == LARGEST else paths.drawn) >= rule.threshold
    if rule.by == DRAWN:  # the first token is always drafted
        sure = torch.cat([torch.ones_like(sure[..., :1]), sure[..., :-1]], -1)
    drafted = sure.long().cumprod(-1)[..., : rule.longest]
    length = drafted.sum(-1)
    steps = costs.at(paths.context)[0][:, [tree_index(Action(1, 0, n)) for n in range(LONGEST + 1)]]
    seconds = steps.gather(-1, length).double()
    if rule.by == LARGEST:
        again = costs.table.passes((paths.context[:, None] + length).flatten())[:, 0].view(
            length.shape
        )
        seconds += again * ((length > 0) & (length < rule.longest))
    return seconds.mean(-1) / (1 + (drafted * paths.gain[..., : rule.longest]).sum(-1)).mean(-1)


class Stop(NamedTuple):
    """A rule that was chosen on training roots, and its figures on held-out ones, each [value, low,
    high].

    Attributes:
        pays: whether it is faster than plain decoding on training roots.
        speedup: over plain decoding.
        over_path: over a path of fixed length at the same roots; None where there is none that
            pays.
    """

    rule: Rule
    pays: bool
    tokens_per_second: list[float]
    speedup: list[float]
    over_path: list[float] | None


def best_stop(
    training: Paths, held_out: Paths, table: LatencyTable, verifier: str, by: str, length: int
) -> Stop:
    """The rule `by` a kind of confidence with the fewest seconds per token on `training`. length:
    of the path that it is compared with; 0: none.
    """
    costs = StepCosts(table, [verifier], int(torch.cat([training.context, held_out.context]).max()))

    def seconds(rule: Rule, paths: Paths = held_out) -> Tensor:
        return seconds_per_token(paths, rule, costs)

    def faster(own: Tensor, *other: Tensor) -> list[float]:
        columns = [column for each in (own, *other) for column in (torch.ones_like(each), each)]
        return ratio_of_totals(
            sums_by_prompt(torch.stack(columns, -1).numpy(), held_out.prompt.numpy())
        )

    rule = min(
        (own for own in RULES if own.by == by), key=lambda own: float(seconds(own, training).mean())
    )
    own, plain = seconds(rule), table.plain(held_out.context)
    pays = bool(seconds(rule, training).mean() < table.plain(training.context).mean())
    over_path = faster(own, seconds(Rule(by, 0.0, length))) if length else None
    return Stop(rule, pays, faster(own), faster(own, plain), over_path)
