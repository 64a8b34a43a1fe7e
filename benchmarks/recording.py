"""Record the README's picture: `python -m benchmarks.recording [--seed 8] [--tokens 96]`.

A held-out prompt of the shipped pair is continued greedily, without and with a draft, in turn; of
each side the run of median speed is shown, token by token as it came, slowed down. The SVG moves by
SMIL; where nothing moves, its last state is seen.
"""

import argparse
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from nde_talf import Autoregressive, Rng, SamplingSetting, SpeculativeDecoder
from nde_talf.data.text.pair import Pair
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.evaluation.sample_text import pieces
from nde_talf.pipelines.commands.generate import GenerateConfig
from nde_talf.pipelines.runs.decoder import make_decoder
from nde_talf.pipelines.runs.finished import Run

OUT = Path(__file__).parents[1] / "docs/figures/generate.svg"
RUNS, SLOWER, PAUSE = 5, 10, 2.5  # runs of each side, times slower than it was, seconds at the end
COLUMNS, CHAR, LINE, TOP = 48, 8.0, 18, 92
PANEL = COLUMNS * CHAR + 24
GREY, GREEN, YELLOW, WHITE = "#8b949e", "#7ee787", "#e3b341", "#e6edf3"


@dataclass
class Recording:
    """Pieces of text with their colours and the seconds when they came, and the decoding time."""

    pieces: list[tuple[float, str, str]]
    tokens: list[int]
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens/s after the first token."""
        return (len(self.tokens) - 1) / self.seconds


def record(decoder: SpeculativeDecoder, tokenizer: Any, prompt: list[int], tokens: int):
    """Decode once, with the time of every block."""
    shown: list[tuple[float, str, str]] = []
    shown.append((0.0, tokenizer.decode(prompt).rpartition("\n")[2], GREY))
    text, start = prompt, None
    drafts, ends = decoder.drafter is not None, decoder.target.ends
    for block in decoder.blocks(prompt, tokens, SamplingSetting(0.0), Rng.seeded(0), ends):
        now = time.perf_counter()
        start = now if start is None else start
        for i, piece in enumerate(pieces(tokenizer, text, block.tokens)):
            colour = (GREEN if i < block.accepted else YELLOW) if drafts else WHITE
            shown.append((now - start, piece, colour))
        text = [*text, *block.tokens]
    return Recording(shown, text[len(prompt) :], shown[-1][0])


def appearing(at: float, total: float) -> str:
    """Return an animation that shows its element from `at` on."""
    return (
        f'<animate attributeName="opacity" calcMode="discrete" dur="{total:.2f}s" values="0;1"'
        f' keyTimes="0;{at / total:.4g}" repeatCount="indefinite"/>'
    )


def panel(left: float, title: str, one: Recording, total: float) -> list[str]:
    """Draw one terminal: title, counter and text."""
    lines, row, column = [f'<text x="{left}" y="62" fill="{WHITE}">{escape(title)}</text>'], 0, 0
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
        f'<text x="{left + PANEL - 24:g}" y="62" text-anchor="end" fill="{GREY}">'
        f"{len(one.tokens)} tokens, {one.speed:.0f} per second"
        f"{appearing(SLOWER * one.seconds, total)}</text>"
    )
    return lines


def picture(plain: Recording, ours: Recording, command: str) -> str:
    """Draw both terminals side by side."""
    total = SLOWER * max(plain.seconds, ours.seconds) + PAUSE
    columns, rows = 0, 1
    for character in "".join(piece for _, piece, _ in plain.pieces):
        columns = 0 if character == "\n" else columns + 1
        if character == "\n" or columns > COLUMNS:
            rows, columns = rows + 1, min(columns, 1)
    width, height = 2 * PANEL + 24, TOP + LINE * rows + 34
    gain = f"{ours.speed / plain.speed:.1f} times as fast"
    same = "the same text" if plain.tokens == ours.tokens else "ANOTHER TEXT"
    legend = (
        f'<text x="24" y="{height - 14}" fill="{GREY}">{same}, {gain}; '
        f'<tspan fill="{GREEN}">green: accepted drafts</tspan>, <tspan fill="{YELLOW}">yellow:'
        f" the target's own</tspan>; {SLOWER} times slowed</text>"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width='
            f'"{width:g}" role="img" font-family="ui-monospace,Menlo,Consolas,monospace" font-size='
            f'"13" xml:space="preserve"><title>Plain decoding and nde-talf write the same text;'
            f" nde-talf is {gain}</title>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#0d1117"/>',
            f'<text x="24" y="30" fill="{GREY}">$ {escape(command)}</text>',
            f'<path d="M24 40H{width - 24:g}M{PANEL + 12:g} 48V{height - 34:g}" stroke="#30363d"/>',
            *panel(24, "plain decoding", plain, total),
            *panel(PANEL + 24, "nde-talf", ours, total),
            legend,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Record both sides in turn, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    config = GenerateConfig(seed=asked.seed, temperature=0.0)
    run = Run(config.run, config.paths.checkpoints)
    pair = Pair(run.stage("pair"))
    tokenizer = load_tokenizer(pair.where("target"))
    tests = [prompt.tokens for prompt in pair.every_prompt() if prompt.split == "test"]
    prompt = tests[asked.seed % len(tests)]
    ours = make_decoder(config, run, None)
    plain = SpeculativeDecoder(ours.target, None, Autoregressive(), "naive")
    _, *runs = (
        [record(each, tokenizer, prompt, asked.tokens) for each in (plain, ours)]
        for _ in range(RUNS + 1)
    )
    medians = [
        sorted(side, key=lambda one: one.seconds)[RUNS // 2] for side in zip(*runs, strict=True)
    ]
    command = f"nde generate seed={asked.seed} temperature=0 new_tokens={asked.tokens} compare=true"
    asked.out.write_text(picture(*medians, command))
    print(f"{asked.out}: {[round(one.speed) for one in medians]} tokens/s")


if __name__ == "__main__":
    main()
