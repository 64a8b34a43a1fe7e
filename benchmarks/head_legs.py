"""Train a draft head on a folder of dialogues, in legs that go on from each other.

    python -m benchmarks.head_legs TARGET DIALOGUES STATE --hours 2.5

DIALOGUES is a folder of .jsonl files. A row has `tokens` (ids) and `loss` (1 in an answer), or
`messages`, which go through the chat template. STATE, outside the checkout, holds the checkpoint,
the export of the last leg, and `figures.json` after the last step. Steps are chains with EAGLE's
loss first, then trees with TALF's. While a file STATE/pause is there, the training waits.
"""

import json
from argparse import ArgumentParser
from pathlib import Path

from nde_talf.data.dialogues.chat_mask import ChatEncoder, encode_dialogues
from nde_talf.data.dialogues.read import read_dialogues
from nde_talf.data.dialogues.settings import DialogueConfig
from nde_talf.data.dialogues.token_rows import Document, pack_documents
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.decoding.common.files import write_json
from nde_talf.decoding.common.progress import console, reporting
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.draft_training.export.head_format import save_head
from nde_talf.draft_training.training.head_evaluation import held_out_report
from nde_talf.draft_training.training.head_training import fit_head
from nde_talf.draft_training.training_settings import HeadConfig
from recipes.small.training import PAUSE, Leg

HELD_OUT = 50
"""Documents to one that is held out."""


def documents_in(folder: Path, target: Path) -> list[Document]:
    """Read the documents of a folder, file by file in the order of their names."""
    documents, encoder = list[Document](), None
    for file in sorted(folder.glob("*.jsonl")):
        lines = file.read_text(encoding="utf-8").splitlines()
        if "tokens" in json.loads(lines[0]):
            rows = map(json.loads, lines)
            documents += [Document(row["tokens"], row["loss"]) for row in rows]
            continue
        encoder = encoder or ChatEncoder(load_tokenizer(target))
        dialogues, skipped = read_dialogues(DialogueConfig(source=str(file)), 0)
        encoded, more = encode_dialogues(encoder, dialogues)
        documents += encoded
        console.print(f"{file}: {len(encoded)} documents, skipped: {dict(skipped + more)}")
    return documents


def main() -> None:
    """Run one leg."""
    parser = ArgumentParser(description=__doc__)
    for name in ("target", "dialogues", "state"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--hours", type=float, default=2.5)
    parser.add_argument("--tokens", type=float, default=5e6, help="of the whole training")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--start", help="exported head to begin with, where STATE was lost")
    asked = parser.parse_args()
    documents = documents_in(asked.dialogues, asked.target)
    held_out = pack_documents(documents[::HELD_OUT], asked.length)
    del documents[::HELD_OUT]
    rows = pack_documents(documents, asked.length)
    steps = max(1, int(asked.tokens / (HeadConfig.batch * asked.length)))
    config = HeadConfig(checkpoint_seconds=600.0, warm_start=asked.start, steps=steps)
    console.print(
        f"{len(rows)} rows, {int(rows.loss.sum()):,} answered tokens; {config.steps} steps"
    )
    target = CausalModel.load(asked.target, dtype=asked.dtype)
    asked.state.mkdir(parents=True, exist_ok=True)
    leg = Leg(asked.state, asked.state / PAUSE, asked.hours)
    with reporting("head"):
        head = fit_head(target, rows, config, asked.state, callbacks=[leg])
    export = save_head(head, asked.state / "export")
    console.print(f"{export}: after {leg.seconds / 3600:.2f} hours of training")
    if not leg.ended:
        write_json(asked.state / "figures.json", held_out_report(head, target, held_out[:12]))


if __name__ == "__main__":
    main()
