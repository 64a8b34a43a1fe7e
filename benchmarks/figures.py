"""The README's picture of a draft tree, drawn from one step of the real loop.

`docs/figures/draft_tree.svg` shows the tree of one step and which of its tokens were accepted.

    python -m benchmarks.figures --run checkpoints/default
"""

import argparse
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

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

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "draft_tree.svg"
PROMPT = "def read_lines(path):\n    "
ACTION, SETTING, ACCEPTED = Action(3, 1, 3), SamplingSetting(temperature=0.6), 3
BOX, STEP, ROW = 30, 132, 44  # height of a box, distance of two levels and of two rows, in pixels
LONGEST = 10
"""Characters of a token that fit a box."""
STYLE = {  # fill, border, text, and what the legend says
    "committed": ("#eceff1", "#90a4ae", "#37474f", "committed before"),
    "accepted": ("#c8e6c9", "#2e7d32", "#1b5e20", "drafted, accepted"),
    "drafted": ("#ffffff", "#90a4ae", "#37474f", "drafted, dropped"),
    "target": ("#bbdefb", "#1565c0", "#0d47a1", "the target's own"),
}


class RecordedPolicy(Delayed):
    """Drafts as `Delayed` does, and remembers the tree of the step."""

    def draft(self, state, drafter, rng) -> DraftTree:
        self.tree = super().draft(state, drafter, rng)
        return self.tree


@dataclass
class OneStep:
    """A step of the loop: its nodes, the accepted ones, the token after them."""

    tokens: list[str]
    parents: list[int]
    path: list[int]
    after: str


def one_step(run: Path) -> OneStep:
    """Find the first step, over seeds, whose draws all differ and of which three are accepted."""
    target, draft = (CausalModel.load(run / "pair" / role) for role in ("target", "draft"))
    tokenizer = AutoTokenizer.from_pretrained(run / "pair" / "target")
    policy = RecordedPolicy(ACTION)
    decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, "specinfer")
    nodes = 1 + ACTION.l1 + ACTION.k * ACTION.l2
    for seed in range(2000):
        blocks = iter(decoder.blocks(tokenizer(PROMPT)["input_ids"], 24, SETTING, Rng.seeded(seed)))
        next(blocks)  # the token that follows the prompt
        for block in blocks:
            if block.accepted != ACCEPTED or len(policy.tree) != nodes:
                continue
            texts = [tokenizer.decode([token]) for token in policy.tree.tokens]
            path = accepted_path(policy.tree, block.tokens[:-1])
            step = OneStep(
                texts, list(policy.tree.parents), path, tokenizer.decode(block.tokens[-1:])
            )
            if all(0 < len(shown(t)) <= LONGEST and t.isascii() for t in [*texts, step.after]):
                return step
    raise SystemExit("there is no step of that kind: take another run, or another prompt")


def accepted_path(tree: DraftTree, tokens: list[int]) -> list[int]:
    """Return the nodes below the root that hold these tokens."""
    path = [0]
    for token in tokens:
        children = (i for i, parent in enumerate(tree.parents) if parent == path[-1])
        path.append(next(child for child in children if tree.tokens[child] == token))
    return path[1:]


def shown(text: str) -> str:
    """Make line ends and spaces visible; a run of more than two spaces becomes its length."""
    text = re.sub(" {3,}", lambda run: f"␣×{len(run[0])}", text)
    return text.replace("\n", "⏎").replace(" ", "␣")


def positions(parents: list[int]) -> list[tuple[int, float]]:
    """Place nodes at (level, row): leaves have rows of their own, parents stand in the middle."""
    level, rows, leaves = [0] * len(parents), [0.0] * len(parents), 0
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        level[node] = level[parents[node]] + 1
        children[parents[node]].append(node)
    pending = [0]
    order = []
    while pending:  # leaves from top to bottom
        node = pending.pop()
        order.append(node)
        pending += reversed(children[node])
        if not children[node]:
            rows[node], leaves = leaves, leaves + 1
    for node in reversed(order):
        if below := [rows[child] for child in children[node]]:
            rows[node] = sum(below) / len(below)
    return list(zip(level, rows, strict=True))


def box(x: float, y: float, text: str, kind: str) -> str:
    fill, border, colour, _ = STYLE[kind]
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="100" height="{BOX}" rx="6" fill="{fill}"'
        f' stroke="{border}" stroke-width="1.5"/><text x="{x + 50:.0f}" y="{y + 20:.0f}"'
        ' text-anchor="middle" font-family="monospace" font-size="13"'
        f' fill="{colour}">{escape(shown(text))}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return (
        f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="{STYLE[kind][1]}"'
        ' stroke-width="1.5"/>'
    )


def picture(step: OneStep) -> str:
    """Draw the tree with what became of it."""
    places, half = positions(step.parents), BOX / 2
    corners = [(16 + level * STEP, 16 + row * ROW) for level, row in places]
    kinds = ["accepted" if node in step.path else "drafted" for node in range(len(corners))]
    kinds[0] = "committed"
    parts = []
    for node, parent in list(enumerate(step.parents))[1:]:
        (x1, y1), (x2, y2) = corners[parent], corners[node]
        parts.append(line(x1 + 100, y1 + half, x2, y2 + half, kinds[node]))
    x, y = corners[step.path[-1]]
    parts += [line(x + 100, y + half, x + STEP, y + half, "target")]
    parts += [box(x + STEP, y, step.after, "target")]
    parts += [box(*corners[node], text, kinds[node]) for node, text in enumerate(step.tokens)]
    width = max(max(level for level, _ in places) * STEP + 2 * STEP + 16, 660)
    height = max(row for _, row in places) * ROW + 2 * ROW
    for index, (fill, border, colour, words) in enumerate(STYLE.values()):
        x = 16 + index * 158
        parts.append(
            f'<rect x="{x}" y="{height}" width="16" height="16" rx="3" fill="{fill}"'
            f' stroke="{border}"/><text x="{x + 22}" y="{height + 13}" font-family="sans-serif"'
            f' font-size="13" fill="{colour}">{escape(words)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height + 32:.0f}"'
        f' width="{width:.0f}" role="img"><title>A draft tree and the tokens of it that were'
        f' accepted</title><rect width="{width:.0f}" height="{height + 32:.0f}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    FIGURE.write_text(picture(one_step(parser.parse_args().run)), encoding="utf-8")
    print(FIGURE)
