"""The card of the shipped pair: `python -m benchmarks.small_card [--folder checkpoints/small]`.

Of the first 100 held-out prompts of code, how many continuations of 100 tokens (T = 0.6) tokenise
as Python without an error of brackets or indentation, and the share of repeated lines; loss and
bits a byte by domain; ten continuations, of the first ten held-out prompts; sources and licences.
"""

import io
import math
import tokenize
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.timing import parser_of
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.text.pair import shipped_prompts, shipped_rows
from nde_talf.data.text.shipped import DRAFT, SHIPPED, TARGET, shipped
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.sampling.rng import SamplingSetting
from recipes.small.sources import CODE, read_frozen
from recipes.small.text import bytes_a_token

PROMPTS, NEW_TOKENS, TEMPERATURE, SHOWN = 100, 100, 0.6, 10
PAIRS = {")": "(", "]": "[", "}": "{"}
SHORTEST = 10
"""Characters of a line that counts as repeated; shorter ones repeat in any code."""


def tokenises(text: str) -> bool:
    r"""Tell whether Python's tokenizer finds no fault in code that may begin and end anywhere.

    An end inside a bracket, a string or a block is no fault.

    >>> tokenises("    return f(a)\n\ndef g("), tokenises("f(a]"), tokenises("if a:\n    b\n  c")
    (True, False, False)
    """
    lines = text.split("\n")
    indent = next((len(line) - len(line.lstrip()) for line in lines if line.strip()), 0)
    levels = "".join(" " * level + "if 1:\n" for level in range(0, indent, 4))
    opened: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(levels + text + "\n").readline):
            bracket = token.string if token.type == tokenize.OP else ""
            if bracket and bracket in "([{":
                opened.append(bracket)
            elif bracket in PAIRS and (not opened or opened.pop() != PAIRS[bracket]):
                return False
    except tokenize.TokenError as error:  # EOF in a bracket or a string of several lines
        return "EOF" in str(error)
    except IndentationError:
        return False
    return True


def repeated(texts: list[str]) -> float:
    """Return the share of the lines of each text that stand in it before."""
    counts = [Counter(x for x in t.split("\n") if len(x.strip()) >= SHORTEST) for t in texts]
    lines = sum(sum(count.values()) for count in counts)
    return sum(sum(count.values()) - len(count) for count in counts) / max(1, lines)


@torch.inference_mode()
def losses(folder: Path, tokenizer) -> list[str]:
    """Return rows by domain: nats a token, bits a byte, and the overlap with the draft."""
    models = [
        AutoModelForCausalLM.from_pretrained(
            shipped(r, folder), dtype=torch.float32, trust_remote_code=False
        )
        for r in (TARGET, DRAFT)
    ]
    lines = []
    for domain, rows in shipped_rows(folder)[1].items():
        total, overlap = 0.0, 0.0
        for part in rows.split(8):
            logits = [model(part, use_cache=False).logits for model in models]
            following = logits[0][:, :-1].flatten(0, 1), part[:, 1:].flatten()
            total += F.cross_entropy(*following, reduction="sum").item() / rows[:, 1:].numel()
            both = torch.stack([x.softmax(-1) for x in logits])
            overlap += both.amin(0).sum().item() / rows.numel()
        bits = total / bytes_a_token(tokenizer, rows) / math.log(2)
        lines.append(f"| {domain} | {total:.3f} | {bits:.3f} | {overlap:.3f} |")
    return lines


def card(folder: Path, note: str) -> str:
    """Return the card of the pair in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(shipped(TARGET, folder), trust_remote_code=False)
    prompts = [p.text for p in shipped_prompts(folder=folder) if p.kind == CODE][:PROMPTS]
    engine = TransformersEngine(CausalModel.load(shipped(TARGET, folder)))
    ids, setting = tokenizer(prompts)["input_ids"], SamplingSetting(TEMPERATURE)
    texts = [
        tokenizer.decode(text[len(ids[start + number]) :])
        for start in range(0, len(ids), 25)
        for number, text in enumerate(
            engine.sample(ids[start : start + 25], setting, NEW_TOKENS, seed=start)
        )
    ]
    good = sum(tokenises(prompt + text) for prompt, text in zip(prompts, texts, strict=True))
    alone = sum(map(tokenises, prompts))
    packages = [f"{p.name} {p.version} ({p.licence})" for p in read_frozen()]
    parameters = sum(weight.numel() for weight in engine.model.module.parameters()) / 1e6
    lines = [
        "# The shipped pair",
        "",
        f"A Llama of {engine.model.layers} layers x {engine.model.hidden_size} ({parameters:.1f}M"
        " parameters, byte-level BPE of 4,096, context 512), trained from random weights by"
        " `python -m recipes.small` on the sources named below. It writes text that"
        f" looks like Python; it knows little. {note}",
        "",
        f"- {good} of {len(prompts)} continuations of held-out code ({NEW_TOKENS} tokens, T ="
        f" {TEMPERATURE}) tokenise as Python without an error of brackets or indentation"
        f" ({alone} of the prompts do).",
        f"- {repeated(texts):.1%} of their lines are repeated.",
        "",
        "| held-out text | nats a token | bits a byte | overlap with the draft |",
        "|---|---|---|---|",
        *losses(folder, tokenizer),
        "",
        "## The first ten held-out prompts of code, continued",
    ]
    for prompt, text in zip(prompts[:SHOWN], texts, strict=False):
        lines += ["", "```python", prompt + "  # <- here it begins to write", text, "```"]
    lines += [
        "",
        "## Sources",
        "",
        "Every file with its checksum: `recipes/small/sources.tsv.gz`. Beside them worked"
        " arithmetic and tables that the project makes. The weights are under the project's"
        " licence, Apache-2.0; the prompts and rows are parts of files of these packages, under"
        f" theirs: {'; '.join(packages)}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the card and print it."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=SHIPPED)
    parser.add_argument("--note", default="", help="a sentence on how long it was trained")
    options = parser.parse_args()
    text = card(options.folder, options.note)
    (options.folder / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
