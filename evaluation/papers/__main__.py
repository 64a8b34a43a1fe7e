"""`python -m evaluation.papers nde --table 2`: a table or figure of a paper, measured on a run's
pair.

Without --table, --figure or --all it lists what there is, and about how long it takes. What is
measured is kept in <run>/papers, and a later command goes on from there. `page` writes the page of
all papers from their results.
"""

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_json
from nde_talf.decoding.common.progress import console

PAPERS = {"nde": "Nde", "gbv": "Gbv", "dynatree": "DynaTree", "talf": "Talf", "dyspec": "DySpec"}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.papers", description=__doc__)
    parser.add_argument("paper", choices=[*PAPERS, "page"])
    parser.add_argument("--table", nargs="+", default=[], help="numbers of tables")
    parser.add_argument("--figure", nargs="+", default=[], help="numbers of figures")
    parser.add_argument("--all", action="store_true", help="all tables, figures and verdicts")
    parser.add_argument(
        "--run",
        type=Path,
        default=Path("checkpoints/paper"),
        help="folder with a pair and a latency table",
    )
    parser.add_argument(
        "--prompts", type=int, default=10, help="prompts of each set of the test split"
    )
    parser.add_argument(
        "--new-tokens", type=int, help="after each prompt; each paper has its own default"
    )
    parser.add_argument(
        "--samples", type=int, default=2, help="super-trees at each root of the labels"
    )
    parser.add_argument(
        "--head-steps",
        type=int,
        nargs=2,
        default=(250, 120),
        help="talf: of an EAGLE head, then of each loss",
    )
    parser.add_argument(
        "--heads",
        type=Path,
        help="talf: folder of benchmarks.heads; its heads at equal steps are taken",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=90,
        help="of measuring; the rest is left for another command; 0: none",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--out", type=Path, help="folder of the results; default <run>/papers/results"
    )
    parser.add_argument(
        "--page",
        type=Path,
        default=Path("docs/reproduction.md"),
        help="the file that `page` writes",
    )
    options = parser.parse_args(arguments)
    out = options.out or options.run / "papers" / "results"
    try:
        if options.paper == "page":
            from nde_talf.evaluation.papers.page import write_page

            write_page(out, options.page, list(PAPERS))
        else:
            reproduce(options, out)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def reproduce(options: argparse.Namespace, out: Path) -> None:
    """Measure what is asked for, and write it."""
    import torch

    from nde_talf.evaluation.papers.bench import Bench, carry_out
    from nde_talf.evaluation.papers.frame import (
        as_markdown,
        measured,
        picture,
        printed,
        verdict_table,
    )

    if options.device == "cpu":
        torch.set_num_threads(1)
    sizes = options.prompts, options.new_tokens, options.samples
    bench = Bench(
        options.run, *sizes, options.device, options.dtype, tuple(options.head_steps), options.heads
    )
    paper = getattr(
        import_module(f"nde_talf.evaluation.papers.{options.paper}"), PAPERS[options.paper]
    )(bench)
    tables = paper.tables()
    asked = [f"Table {n}" for n in options.table] + [f"Figure {n}" for n in options.figure]
    chosen = [
        own
        for own in tables
        if options.all or any(f"{own.name} ".startswith(f"{name} ") for name in asked)
    ]
    if unknown := [name for name in asked if not any(own.name.startswith(name) for own in tables)]:
        names = ", ".join(own.name for own in tables)
        raise UserError(
            f"{', '.join(unknown)}: {paper.title} has no such table or figure here; it has {names}."
        )
    needed = {name for own in chosen or tables for name in own.works}
    works = [work for work in paper.works() if work.name in needed]
    estimates = {work.name: work.seconds() / 60 for work in works}
    left = ", ".join(f"{name} {minutes:.0f} min" for name, minutes in estimates.items() if minutes)
    console.print(
        f"{paper.title}: about {sum(estimates.values()):.0f} minutes of measuring are left"
        f" ({left or 'none'})."
    )
    if not chosen:
        console.print(
            "Give --table, --figure or --all: " + ", ".join(own.name for own in tables) + "."
        )
        return
    carry_out(works, options.minutes, console.print)
    paper = type(paper)(bench)  # afresh, with what was measured
    counts = {work.name: str(work.prompts()) for work in paper.works() if work.prompts}
    names, paper_prints = {own.name for own in chosen}, printed(options.paper)
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{options.paper}.json"
    found = json.loads(file.read_text()) if file.exists() else {"tables": {}, "verdicts": []}
    for table in paper.tables():
        if table.name in names:
            own = found["tables"][table.name] = measured(table, counts)
            console.print(
                as_markdown(table.name, own, paper_prints),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            if table.plot and any(cell for row in own["cells"] for cell in row):
                name = table.name.lower().replace(" ", "_")
                picture(table.plot, own).savefig(out / f"{options.paper}_{name}.png")
                own["picture"] = f"{options.paper}_{name}.png"
    if options.all:
        found["verdicts"] = [{"paper": paper.title, **claim.verdict()} for claim in paper.claims()]
        console.print(
            verdict_table(found["verdicts"]), markup=False, highlight=False, soft_wrap=True
        )
    found["conditions"] = conditions(paper.title, bench, options.paper)
    write_json(file, found)
    order = [own.name for own in tables]
    parts = [f"# {paper.title}", found["conditions"]]
    for name in sorted(found["tables"], key=order.index):
        own = found["tables"][name]
        parts.append(as_markdown(name, own, paper_prints))
        parts += [f"![{name}]({own['picture']})"] if "picture" in own else []
    for name in paper_prints:
        if name not in found["tables"]:
            parts.append(f"## {name}\n\nNot measured yet.")
    (out / f"{options.paper}.md").write_text("\n\n".join(part.strip() for part in parts) + "\n")


def conditions(title: str, bench, name: str) -> str:
    """A paragraph: on what it was measured."""
    import torch

    return (
        f"Measured by `python -m evaluation.papers {name}` on the pair of run `{bench.run.name}`:"
        f" prompts of its test split ({', '.join(bench.sets)}), as many as each table says;"
        f" {bench.device}, {bench.dtype}, torch {torch.__version__}. Brackets are 95 % bootstrap"
        " intervals over prompts. A printed figure stands after a slash or in a column “paper”; an"
        " empty cell was not measured."
    )


if __name__ == "__main__":
    main()
