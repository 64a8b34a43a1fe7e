"""The two pictures of a draft tree in the documentation, drawn from one step of the real loop.

`draft_tree.svg` (README) shows the tree of one step and which of its tokens were accepted.
`verification.svg` (concepts page) shows the same step decision by decision: which child was tried,
with which probability it was to be accepted, and what came. SpecInfer verifies, because it tries
one child after another, which a picture can show.

    python -m benchmarks.figures --run checkpoints/default
"""

import argparse
import re
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from nde_talf import (
    Action,
    CausalModel,
    Delayed,
    DraftTree,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
)
from nde_talf.decoding.policies.base import TreePolicy

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
PROMPT = "def read_lines(path):\n    "
ACTION = Action(3, 1, 3)
SETTING = SamplingSetting(temperature=0.6)
BOX, STEP, ROW = 30, 132, 44  # height of a box, distance of two levels and of two rows, in pixels
STYLE = {  # fill, border, text
    "committed": ("#eceff1", "#90a4ae", "#37474f"),
    "drafted": ("#ffffff", "#90a4ae", "#37474f"),
    "accepted": ("#c8e6c9", "#2e7d32", "#1b5e20"),
    "rejected": ("#ffebee", "#c62828", "#b71c1c"),
    "tried": ("#fff9c4", "#f9a825", "#795548"),
    "target": ("#bbdefb", "#1565c0", "#0d47a1"),
}


class RecordedRng(Rng):
    """An `Rng` that notes every Bernoulli decision: (probability, outcome)."""

    def bernoulli(self, probability: Any) -> Any:
        outcome = super().bernoulli(probability)
        self.decisions.append((float(probability), outcome))
        return outcome


class RecordedPolicy(TreePolicy):
    """Drafts as `Delayed` does, and remembers the tree of the step."""

    def __init__(self):
        self.policy = Delayed(ACTION)
        self.trees = self.policy.trees

    def draft(self, state, drafter, rng) -> DraftTree:
        self.tree = self.policy.draft(state, drafter, rng)
        rng.decisions = []
        return self.tree


@dataclass
class OneStep:
    """A step of the loop. decisions: (child tried, probability of its acceptance, outcome), in
    order.
    """

    tokens: list[str]
    parents: list[int]
    path: list[int]
    after: str
    decisions: list[tuple[int, float, bool]]


def one_step(run: Path, wanted: int) -> OneStep:
    """The first step, over seeds, in which every draw is a node of its own, `wanted` tokens are
    accepted and one is rejected before a sibling of it is accepted: it shows everything that can
    happen.
    """
    target, draft = (CausalModel.load(run / "pair" / role) for role in ("target", "draft"))
    tokenizer = AutoTokenizer.from_pretrained(run / "pair" / "target")
    prompt = tokenizer(PROMPT)["input_ids"]
    policy = RecordedPolicy()
    decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, "specinfer")
    for seed in range(2000):
        rng = RecordedRng.seeded(seed)
        rng.decisions = []
        blocks = iter(decoder.blocks(prompt, 24, SETTING, rng))
        next(blocks)  # the token that follows the prompt
        for block in blocks:
            tree = policy.tree
            if (block.accepted, len(block.tokens)) != (wanted, wanted + 1) or len(
                tree
            ) != 1 + ACTION.l1 + ACTION.k * ACTION.l2:
                continue
            step = replayed(
                list(tree.tokens), list(tree.parents), block.tokens, rng.decisions, tokenizer
            )
            outcomes = [outcome for _, _, outcome in step.decisions]
            if any(not a and b for a, b in pairwise(outcomes)) and printable(step):
                return step
    raise SystemExit("no step of that kind was found: take another run, or another prompt")


def replayed(
    tokens: list[int], parents: list[int], committed: list[int], draws: list, tokenizer
) -> OneStep:
    """The step as nodes: SpecInfer tries the children of a node in the order in which they were
    drawn.
    """
    node, path, decisions, pending = 0, [], [], list(draws)
    while children := [child for child, parent in enumerate(parents) if parent == node]:
        for child in children:
            probability, outcome = pending.pop(0)
            decisions.append((child, probability, outcome))
            if outcome:
                break
        if not decisions[-1][2]:
            break
        node = decisions[-1][0]
        path.append(node)
    assert [tokens[node] for node in path] == committed[:-1] and not pending
    return OneStep(
        [tokenizer.decode([t]) for t in tokens],
        parents,
        path,
        tokenizer.decode(committed[-1:]),
        decisions,
    )


def printable(step: OneStep) -> bool:
    """Whether every token is short and can be shown in a box."""
    return all(0 < len(shown(text)) <= 10 and text.isascii() for text in [*step.tokens, step.after])


def shown(text: str) -> str:
    """The text with line ends and spaces made visible; a run of more than two spaces as its length."""
    text = re.sub(" {3,}", lambda run: f"␣×{len(run[0])}", text)
    return text.replace("\n", "⏎").replace(" ", "␣")


def positions(parents: list[int]) -> list[tuple[int, float]]:
    """(level, row) of every node: a leaf has a row of its own, a parent stands between its
    children.
    """
    level = [0] * len(parents)
    for node in range(1, len(parents)):
        level[node] = level[parents[node]] + 1
    rows: dict[int, float] = {}

    def place(node: int) -> float:
        children = [child for child, parent in enumerate(parents) if parent == node]
        below = [place(child) for child in children]
        rows[node] = sum(below) / len(below) if below else place.next
        place.next += not below
        return rows[node]

    place.next = 0
    place(0)
    return [(level[node], rows[node]) for node in range(len(parents))]


def box(x: float, y: float, text: str, kind: str) -> str:
    fill, border, colour = STYLE[kind]
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="100" height="{BOX}" rx="6" fill="{fill}"'
        f' stroke="{border}" stroke-width="1.5"/><text x="{x + 50:.0f}" y="{y + 20:.0f}"'
        ' text-anchor="middle" font-family="monospace" font-size="13"'
        f' fill="{colour}">{escape(shown(text))}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return (
        f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="{colour}"'
        ' stroke-width="1.5"/>'
    )


def words(x: float, y: float, text: str, size: int = 13, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-family="sans-serif" font-size="{size}"'
        f' font-weight="{weight}" fill="#37474f">{escape(text)}</text>'
    )


def drawn(
    step: OneStep, kinds: dict[int, str], left: float, top: float, after: int | None
) -> list[str]:
    """The tree with its nodes in the colours of `kinds`; after: the node after which the target's
    own token is shown.
    """
    at = positions(step.parents)
    corner = [(left + level * STEP, top + row * ROW) for level, row in at]
    parts = []
    for node, parent in enumerate(step.parents):
        if parent >= 0:
            (x1, y1), (x2, y2) = corner[parent], corner[node]
            colour = STYLE[kinds.get(node, "drafted")][1]
            parts.append(line(x1 + 100, y1 + BOX / 2, x2, y2 + BOX / 2, colour))
    if after is not None:
        x, y = corner[after]
        taken = [row for level, row in at if level == at[after][0] + 1 and step.parents]
        free = y if not any(top + row * ROW == y for row in taken) else top + (max(taken) + 1) * ROW
        parts += [
            line(x + 100, y + BOX / 2, x + STEP, free + BOX / 2, STYLE["target"][1]),
            box(x + STEP, free, step.after, "target"),
        ]
    return parts + [
        box(*corner[node], text, kinds.get(node, "drafted"))
        for node, text in enumerate(step.tokens)
    ]


def svg(parts: list[str], width: float, height: float, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" role="img"><title>{escape(title)}</title><rect width="{width:.0f}"'
        f' height="{height:.0f}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def size(step: OneStep) -> tuple[float, float]:
    at = positions(step.parents)
    return (max(level for level, _ in at) + 2) * STEP, (max(row for _, row in at) + 1) * ROW


def overview(step: OneStep) -> str:
    """One tree with what became of it."""
    width, height = size(step)
    kinds = dict.fromkeys(step.path, "accepted") | {0: "committed"}
    legend = [("committed", "committed before"), ("accepted", "drafted, accepted"), ("drafted", "drafted, dropped"),
              ("target", "the target's own")]  # fmt: skip
    parts = drawn(step, kinds, 16, 16, step.path[-1])
    for index, (kind, text) in enumerate(legend):
        fill, border, _ = STYLE[kind]
        x, y = 16 + index * 158, height + ROW + 30
        parts += [f'<rect x="{x}" y="{y:.0f}" width="16" height="16" rx="3" fill="{fill}" stroke="{border}"/>',
                  words(x + 22, y + 13, text)]  # fmt: skip
    return svg(
        parts,
        max(width + 16, 660),
        height + ROW + 62,
        "A draft tree and the tokens of it that were accepted",
    )


def step_by_step(step: OneStep) -> str:
    """A panel for every decision."""
    width, height = size(step)
    parts, kinds, y = [], {0: "committed"}, 16.0
    heading = "The tree as drafted. The target has scored every node in one pass."
    for number, decision in enumerate([None, *step.decisions, None]):
        panel = dict(kinds)
        if decision:
            child, probability, outcome = decision
            panel[child] = kinds[child] = "accepted" if outcome else "rejected"
            youngest = max(
                node for node, parent in enumerate(step.parents) if parent == step.parents[child]
            )
            result = (
                "Rejected: no child is left."
                if child == youngest
                else "Rejected: try the next child."
            )
            heading = (
                f"{number}. Try {shown(step.tokens[child])!r}: accept with probability"
                f" {probability:.2f}. "
            )
            heading += "Accepted: go on below it." if outcome else result
        last = decision is None and number > 0
        if last:
            source = "its distribution" if step.decisions[-1][2] else "the residual distribution"
            heading = (
                f"{number}. The target's own token {shown(step.after)!r}, drawn from {source}, ends"
                " the step."
            )
        parts += [
            words(16, y + 14, heading, weight="bold"),
            *drawn(step, panel, 16, y + 28, step.path[-1] if last else None),
        ]
        y += height + 52
    return svg(
        parts,
        max(width + 16, 660),
        y + ROW / 2,
        "A draft tree verified by SpecInfer, decision by decision",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--run", type=Path, default=Path("checkpoints/default"), help="a finished run's folder"
    )
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    step = one_step(arguments.run, 3)
    for name, picture in (("draft_tree", overview(step)), ("verification", step_by_step(step))):
        (FOLDER / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(FOLDER / f"{name}.svg")
