"""What a selector can see, and what it is worth: cross-validated on texts of the shipped pair.

`python -m benchmarks.selector_ablation [--prompts 192] [--out FOLDER]` writes selector_ablation.md.
Labels come from the texts (`nde_talf.data.traces.text_labels`), prices from the shipped latency
table. Every row is trained on three quarters of the prompts and scored on the others, four times.
Widths, dropout and weights of the roots are compared by `nde run +sweep=selector`, numbers of
prompts by the stage itself.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.timing import RESULTS
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.text.shipped_text import shipped_pair
from nde_talf.data.traces.text_labels import DEPTH, STRIDE
from nde_talf.data.traces.trace import Positions
from nde_talf.decoding.sampling import SamplingSetting, warp
from nde_talf.evaluation.table import markdown
from nde_talf.selector.latency import LatencyTable, StepCosts
from nde_talf.selector.network import SelectorNetwork
from nde_talf.selector.objective import best_static, deviance, selector_loss, taken, visits
from nde_talf.selector.roots import ROOT_SCALARS
from nde_talf.selector.train import cosine, shuffled

SETTINGS = SamplingSetting(0.6), SamplingSetting(1.0)
RULES = "specinfer", "traversal"
FOLDS, NEW_TOKENS, BATCH, EPOCHS, LR, SHARPNESS, DROPOUT = 4, 80, 256, 12, 2e-3, 20.0, 0.1
LOOKBACK = 32
"""Positions before a root that its history is a mean over; prompts are as long at least."""
STATES = "h_p_previous", "h_q_previous", "h_q_root"
Choice = Callable[[Tensor], Tensor]
"""From the roots to train on [R] to an action for every root [R]."""
PAGE = """# Selector: what it sees, and what that is worth

`python -m benchmarks.selector_ablation`: {prompts} prompts of the shipped pair, {roots} roots (one
in {stride} tokens), T = 0.6 and 1. Tokens/s by the latency table over those of the best static tree
of the training folds, held out: mean over both settings and {folds} folds of the prompts ± its
standard error. Labels are the texts' own (docs/traces.md); for Traversal on several paths they are
an approximation. "States" are the three hidden states of Eq. 10, "scalars" the eleven numbers of
docs/selector.md, "recent" means over the last 8 and 32 tokens: overlap, entropies, the draft's
confidence, its surprise and its hits.
"""


class Roots(NamedTuple):
    """Roots of all texts. Labels by rule, and `recent` [R, 32, 6], are beside the usual columns."""

    columns: dict[str, Tensor]
    recent: Tensor
    prompt: Tensor
    kind: Tensor


def collect(prompts: list[Prompt]) -> Roots:
    """Sample texts, and take features and labels along them."""
    target, draft = shipped_pair().models("cpu", "float32", None, "auto")
    kinds, engine = sorted({prompt.kind for prompt in prompts}), TransformersEngine(target)
    parts: list[Any] = []
    for setting in SETTINGS:
        texts = engine.sample([prompt.tokens for prompt in prompts], setting, NEW_TOKENS, 0)
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            cut = len(text) == len(prompt.tokens) + NEW_TOKENS
            at = [*range(len(prompt.tokens), len(text) - cut * DEPTH, STRIDE)]
            if at:
                made, pairs = Positions(target, draft, text, at), [(setting, setting)]
                (columns,) = made.tables(pairs, made.from_text(pairs))
                count = torch.full((len(at),), 1)
                here = number * count, kinds.index(prompt.kind) * count
                parts.append((columns, _recent(made, setting), *here))
    columns = {name: torch.cat([part[0][name] for part in parts]) for name in parts[0][0]}
    return Roots(columns, *(torch.cat(each) for each in list(zip(*parts, strict=True))[1:]))


@torch.inference_mode()
def _recent(made: Positions, setting: SamplingSetting) -> Tensor:
    """[R, 32, 6] of the positions before each root, the last one first."""
    p = warp(made.target.logits(made.p_prefix.hidden).float(), setting)
    q = warp(made.draft.logits(made.q_prefix.hidden).float(), setting)
    following = made.tokens.roll(-1)[:, None]
    entropies = [-torch.xlogy(rows, rows).sum(-1) for rows in (p, q)]
    stats = [
        torch.minimum(p, q).sum(-1),
        *entropies,
        q.amax(-1),
        q.gather(1, following)[:, 0].clamp(min=1e-10).log(),
        (q.argmax(-1) == following[:, 0]).float(),
    ]
    return torch.stack(stats, -1)[made.positions[:, None] - 1 - torch.arange(LOOKBACK)]


class Lab:
    """Labels, prices and folds of one rule."""

    def __init__(self, roots: Roots, rule: str):
        self.roots, table = roots, LatencyTable.load("checkpoints/small/latency/table.json")
        self.labels, context = roots.columns[rule][:, 0], roots.columns["context"]
        self.seconds, self.passes = StepCosts(table, rule, int(context.max())).at(context)
        self.setting = (roots.columns["temperature"] > 0.8).long()
        self.fold = shuffled(roots.prompt) % FOLDS

    def static(self, chosen: Tensor, group: Tensor | None = None) -> Tensor:
        """[R]: the best tree over the `chosen` roots of each setting, and of each group [R]."""
        group = self.setting if group is None else self.setting + 2 * group
        action = torch.zeros_like(group)
        for value in group.unique():
            here = chosen & (group == value)
            here = here if here.any() else chosen
            action[group == value] = best_static(self.labels[here], self.seconds[here])
        return action

    def gain(self, choose: Choice) -> list[float]:
        """Mean log ratio of tokens/s over the best static tree of every fold."""
        gains = []
        for fold in range(FOLDS):
            train = self.fold != fold
            actions, logs = (choose(train), self.static(train)), []
            for setting in (0, 1):
                here = ~train & (self.setting == setting)
                ours, theirs = (
                    (taken(self.seconds, a) / taken(self.labels, a))[here].mean() for a in actions
                )
                logs.append(float((theirs / ours).log()))
            gains.append(sum(logs) / 2)
        return gains

    def bins(self, values: Tensor, count: int = 6) -> Choice:
        """Choose by where a number [R] lies among those of the training roots."""

        def choose(train: Tensor) -> Tensor:
            edges = values[train].quantile(torch.arange(1, count) / count)
            return self.static(train, torch.bucketize(values.contiguous(), edges))

        return choose

    def network(self, *seen: str) -> Choice:
        """Train a network of Eq. 10 on what it sees: states, scalars, recent, position."""
        columns, recent = self.roots.columns, self.roots.recent
        blocks = {
            "scalars": torch.cat(
                [torch.stack([columns[name] for name in ROOT_SCALARS], -1), self.passes], -1
            ),
            "recent": torch.cat([recent[:, :8].mean(1), recent.mean(1)], -1),
            "position": columns["context"][:, None].log(),
        }
        numbers = torch.cat([blocks[name] for name in seen if name in blocks], -1).float()
        states = [columns[name].float() for name in STATES if "states" in seen]

        def choose(train: Tensor) -> Tensor:
            base, index = self.static(train), train.nonzero()[:, 0]
            weights = torch.ones(len(base))
            weights[index] = visits(taken(self.labels, base)[index])
            mean, spread = numbers[index].mean(0), numbers[index].std(0)
            inputs = (numbers - mean) / spread.where(spread > 1e-6, torch.tensor(torch.inf))
            torch.manual_seed(0)
            sizes = [h.shape[1] for h in states], inputs.shape[1], 32, (64, 32)
            net = SelectorNetwork(*sizes, DROPOUT, self.labels.shape[1])
            with torch.no_grad():
                net.mlp[-1].weight.mul_(0.1)
                net.mlp[-1].bias.copy_(-(1 / self.labels[index].double()).mean(0).log())
            steps = EPOCHS * -(-len(index) // BATCH)
            optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.1)
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = LR * cosine(step, steps)
                some = index[torch.randint(len(index), (BATCH,))]
                tokens, seconds = self.labels[some], self.seconds[some]
                u = net([h[some] for h in states], inputs[some])
                logits = SHARPNESS * (u - seconds.log())
                loss = selector_loss(
                    logits, tokens, seconds, base[some], 1.0, 0.05, 0.003, weights[some]
                )
                optimizer.zero_grad()
                (loss + 4 * deviance(u, tokens, weights[some])).backward()
                optimizer.step()
            with torch.no_grad():
                return (net.eval()(states, inputs) - self.seconds.log()).argmax(-1)

        return choose


def rows(lab: Lab) -> dict[str, Choice]:
    """The rows of the page."""
    roots, every = lab.roots, torch.ones_like(lab.setting, dtype=torch.bool)
    by_domain = lab.static(every, roots.kind)
    return {
        "best tree by domain, in hindsight": lambda train: by_domain,
        "best tree by the draft's entropy at the root": lab.bins(roots.columns["entropy_q_root"]),
        "best tree by the mean overlap of the last 8": lab.bins(roots.recent[:, :8, 0].mean(1)),
        "best tree by the mean overlap of the last 32": lab.bins(roots.recent[..., 0].mean(1)),
        "scalars": lab.network("scalars"),
        "scalars, recent": lab.network("scalars", "recent"),
        "**states, scalars: the default**": lab.network("states", "scalars"),
        "states, scalars, recent": lab.network("states", "scalars", "recent"),
        "states, scalars, recent, position": lab.network("states", "scalars", "recent", "position"),
        "best tree root by root, told the text to come": lambda train: (
            lab.labels / lab.seconds
        ).argmax(-1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the page")
    options = parser.parse_args()
    roots = collect(shipped_pair().prompts("trace", options.prompts, "--prompts"))
    labs = {rule: Lab(roots, rule) for rule in RULES}
    lines = []
    methods = {rule: rows(lab) for rule, lab in labs.items()}
    for name in methods[RULES[0]]:
        gains = [torch.tensor(lab.gain(methods[rule][name])) for rule, lab in labs.items()]
        lines.append(
            [name, *(f"{g.mean().exp():.3f} ± {g.std() / len(g) ** 0.5:.3f}" for g in gains)]
        )
        print(*lines[-1], flush=True)
    about = {"prompts": options.prompts, "roots": len(roots.kind), "stride": STRIDE}
    page = PAGE.format(**about, folds=FOLDS) + "\n" + markdown(["", *RULES], lines) + "\n"
    (options.out / "selector_ablation.md").write_text(page)


if __name__ == "__main__":
    main()
