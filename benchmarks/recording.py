"""Record the README's picture: `python -m benchmarks.recording [--prompt "..."]`.

A prompt is continued without and with a draft, in turn; of each side the run of median speed is
shown, token by token as it came, slowed down, with the tree of every step below our text. The SVG
moves by SMIL; where nothing moves, its last state is seen. Columns are few, so that it can be read
on a screen of 400 pixels.
"""

import argparse
import time
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from nde_talf import Autoregressive, DraftTree, Rng, SamplingSetting, SpeculativeDecoder
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.decoding.generation import Block
from nde_talf.evaluation.sample_text import pieces
from nde_talf.pipelines.commands.generate import GenerateConfig
from nde_talf.pipelines.commands.stream import prompt_of
from nde_talf.pipelines.runs.decoder import make_decoder
from nde_talf.pipelines.runs.finished import Run
from nde_talf.pipelines.runs.run_models import pair_of

OUT = Path(__file__).parents[1] / "docs/figures/generate.svg"
RUNS, SLOWER, PAUSE = 5, 10, 2.5  # runs of each side, times slower than it was, seconds at the end
COLUMNS, CHAR, LINE, TOP = 26, 8.0, 18, 108
ACROSS, DOWN, TREE = 22, 11, 64  # between a tree's levels and rows, and the height of its place
PANEL = COLUMNS * CHAR + 24
GREY, GREEN, YELLOW, WHITE = "#8b949e", "#7ee787", "#e3b341", "#e6edf3"


@dataclass
class Recording:
    """Pieces of text with their colours and the seconds when they came, and the decoding time.

    trees: the drafted tree of every step, with the second when it was verified, and its block.
    """

    pieces: list[tuple[float, str, str]]
    tokens: list[int]
    seconds: float
    trees: list[tuple[float, DraftTree, Block]]

    @property
    def speed(self) -> float:
        """Tokens/s after the first token."""
        return (len(self.tokens) - 1) / self.seconds


def record(
    decoder: SpeculativeDecoder,
    tokenizer: Any,
    prompt: tuple[str, list[int]],
    tokens: int,
    setting: SamplingSetting,
    seed: int,
) -> Recording:
    """Decode once, with the time and the tree of every block. prompt: to show, and its tokens."""
    asked = prompt[0]
    last = asked.rstrip("\n").rpartition("\n")[2]
    shown = [(0.0, last + "\n" * asked.endswith("\n"), GREY)]
    text, start, trees, drafted = prompt[1], None, [], []
    drafts, ends, draft = decoder.drafter is not None, decoder.target.ends, decoder.policy.draft

    def watched(*given: Any) -> DraftTree:
        drafted.append(draft(*given))
        return drafted[-1]

    decoder.policy.draft = watched  # type: ignore[method-assign]
    for block in decoder.blocks(prompt[1], tokens, setting, Rng.seeded(seed), ends):
        now = time.perf_counter()
        start = now if start is None else start
        if drafted:
            trees.append((now - start, drafted[-1], block))
        said = [token for token in block.tokens if token not in ends]
        for i, piece in enumerate(pieces(tokenizer, text, said)):
            colour = (GREEN if i < block.accepted else YELLOW) if drafts else WHITE
            shown.append((now - start, piece, colour))
        text = [*text, *block.tokens]
    del decoder.policy.draft  # the class's own is left
    return Recording(shown, text[len(prompt[1]) :], shown[-1][0], trees)


def appearing(at: float, total: float, until: float | None = None) -> str:
    """Return an animation that shows its element from `at` on, to the end or `until`."""
    times = [0.0, at / total] + ([] if until is None else [until / total])
    values = "0;1" if until is None else "0;1;0"
    return (
        f'<animate attributeName="opacity" calcMode="discrete" dur="{total:.2f}s" values="{values}"'
        f' keyTimes="{";".join(f"{t:.4g}" for t in times)}" repeatCount="indefinite"/>'
    )


def accepted_nodes(tree: DraftTree, block: Block) -> set[int]:
    """Return the nodes of a tree that its block accepted, and the root."""
    path = [0]
    for token in block.tokens[: block.accepted]:
        path.append(next(n for n in tree.children[path[-1]] if tree.tokens[n] == token))
    return {*path}


def drawn(tree: DraftTree, block: Block, left: float, top: float) -> list[str]:
    """Draw a tree: levels from left to right, accepted nodes green."""
    rows: dict[int, int] = {}
    places = []
    for node, depth in enumerate(tree.depth):
        wanted = places[tree.parents[node]][1] if node else 0
        rows[depth] = max(rows.get(depth, 0), wanted)
        places.append((depth, rows[depth]))
        rows[depth] += 1
    across = min(ACROSS, (PANEL - 40) / max(1, *tree.depth))
    down = min(DOWN, (TREE - 8) / max(rows.values()))
    points = [(left + across * depth, top + down * row) for depth, row in places]
    good, lines = accepted_nodes(tree, block), []
    for node, (x, y) in enumerate(points):
        colour = GREEN if node in good else GREY
        if node:
            before = points[tree.parents[node]]
            lines.append(f'<path d="M{before[0]:g} {before[1]:g}L{x:g} {y:g}" stroke="{colour}"/>')
        lines.append(f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="{colour}"/>')
    return lines


def trees_of(one: Recording, left: float, top: float, total: float) -> list[str]:
    """Draw the tree of every step while its text is the newest."""
    ends = [at for at, _, _ in one.trees[1:]]
    lines = []
    for (at, tree, block), until in zip(one.trees, [*ends, None], strict=True):
        shown = "" if until is None else ' opacity="0"'
        moving = appearing(SLOWER * at, total, until and SLOWER * until)
        lines += [f"<g{shown}>", *drawn(tree, block, left + 4, top), moving, "</g>"]
    return lines


def panel(left: float, title: str, one: Recording, total: float) -> list[str]:
    """Draw one terminal: title, counter and text."""
    row, column = 0, 0
    lines = [f'<text x="{left}" y="{TOP - 28}" fill="{WHITE}">{escape(title)}</text>']
    for at, piece, colour in one.pieces:
        for number, part in enumerate(piece.split("\n")):
            row, column = (row + 1, 0) if number else (row, column)
            while part:
                fitting, part = part[: COLUMNS - column], part[COLUMNS - column :]
                words = fitting.lstrip(" ")
                x = left + CHAR * (column + len(fitting) - len(words))
                if words.strip():
                    lines.append(
                        f'<text x="{x:g}" y="{TOP + LINE * row}" fill="{colour}" textLength='
                        f'"{CHAR * len(words.rstrip()):g}">{escape(words.rstrip())}'
                        f"{appearing(SLOWER * at, total)}</text>"
                    )
                column += len(fitting)
                if part:
                    row, column = row + 1, 0
    lines.append(
        f'<text x="{left + PANEL - 24:g}" y="{TOP - 28}" text-anchor="end" fill="{GREY}">'
        f"{one.speed:.0f} tokens/s"
        f"{appearing(SLOWER * one.seconds, total)}</text>"
    )
    return lines


def picture(plain: Recording, ours: Recording, command: str, greedy: bool) -> str:
    """Draw both terminals side by side."""
    total = SLOWER * max(plain.seconds, ours.seconds) + PAUSE
    rows = 1
    for side in (plain, ours):
        lines = "".join(piece for _, piece, _ in side.pieces).split("\n")
        rows = max(rows, sum(max(1, -(-len(line) // COLUMNS)) for line in lines))
    low = TOP + LINE * rows  # where the trees begin
    width, height = 2 * PANEL + 24, low + TREE + 52
    gain = f"{ours.speed / plain.speed:.1f} times as fast"
    same = "the same text" if plain.tokens == ours.tokens else "the same law"
    if greedy and plain.tokens != ours.tokens:
        same = "ANOTHER TEXT"
    legend = [
        f'<text x="24" y="{height - 32}" fill="{GREY}">{same}, {gain}; {SLOWER} times slowed'
        "</text>",
        f'<text x="24" y="{height - 14}" fill="{GREEN}">green: accepted drafts <tspan fill='
        f'"{YELLOW}">yellow: the target\'s own</tspan></text>',
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width='
            f'"{width:g}" role="img" font-family="ui-monospace,Menlo,Consolas,monospace" font-size='
            f'"13" xml:space="preserve"><title>Plain decoding beside nde-talf, which is {gain}'
            "</title>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#0d1117"/>',
            *(
                f'<text x="24" y="{26 + LINE * row}" fill="{GREY}">{escape(line)}</text>'
                for row, line in enumerate(wrap(f"$ {command}", 2 * COLUMNS))
            ),
            f'<path d="M24 {TOP - 50}H{width - 24:g}M{PANEL + 12:g} {TOP - 42}V{height - 52:g}"'
            ' stroke="#30363d"/>',
            *panel(24, "plain decoding", plain, total),
            *panel(PANEL + 24, "nde-talf", ours, total),
            *trees_of(ours, PANEL + 24, low, total),
            *legend,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Record both sides in turn, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="smollm2")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="bfloat16 where the CPU multiplies it")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    config = GenerateConfig(
        run=asked.run, prompt=asked.prompt, seed=asked.seed, temperature=asked.temperature
    )
    config = replace(config, model=replace(config.model, dtype=asked.dtype))
    run = Run(config.run, config.paths.checkpoints)
    tokenizer = load_tokenizer(pair_of(run).where("target"))
    prompt = prompt_of(config, run, tokenizer)
    ours = make_decoder(config, run)
    plain = SpeculativeDecoder(ours.target, None, Autoregressive(), "naive")
    how = tokenizer, prompt, asked.tokens, config.setting, asked.seed
    _, *runs = ([record(each, *how) for each in (plain, ours)] for _ in range(RUNS + 1))
    medians = [
        sorted(side, key=lambda one: one.seconds)[RUNS // 2] for side in zip(*runs, strict=True)
    ]
    command = (
        f'nde generate model={asked.run} prompt="{asked.prompt}" temperature={asked.temperature:g}'
        f" seed={asked.seed} model.dtype={asked.dtype}"
    )
    asked.out.write_text(picture(*medians, command, not asked.temperature))
    print(f"{asked.out}: {[round(one.speed) for one in medians]} tokens/s")


if __name__ == "__main__":
    main()
