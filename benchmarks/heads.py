"""Draft heads trained with the losses of EAGLE, HASS and TALF from one warm start, on the same
text: mean generation length on held-out prompts by loss and tree (Tables 2 and 3 of the SALF & TALF
paper), and accuracy by the rank conditioned on (Figure 2b).

`python -m benchmarks.heads [--run checkpoints/default]`, after `python -m pipelines.run
stage=pair`. Once for equal optimiser steps, once for equal time. An interrupted run goes on where
it stopped; its files are in `<run>/heads`.

`--as-printed` makes the paper's own comparison: equal time from random heads (no warm start), with
the target's trees and features precomputed (their cost is stated apart), HASS with gradients
through its features, the paper's calibration measure; and beside it some heads at equal steps. At
temperatures above 0 it decodes with i.i.d. trees, verified by SpecInfer and Traversal. The plan,
with its cost, is printed before anything is trained; `--plan` stops there. `--own-text` trains all
heads on text that the target continued itself.

Time is CPU time of one thread, so that other work on the machine does not change who is given how
many steps.
"""

import argparse
import shutil
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch
from safetensors.torch import load_file, save_file

from benchmarks.head_comparison import comparison_table, generation_length, rank_figure, rank_table
from benchmarks.papers.talf import after_ranks, calibration_error
from benchmarks.timing import RESULTS
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.data.text.pair import Pair, check_prompts, spread
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.files import read_json, write_json
from nde_talf.decoding.common.progress import console, track
from nde_talf.decoding.drafter import Drafter, LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.policies.salf import Optimal, Salf
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.decoding.setting import read_draft_temperature
from nde_talf.draft_training.export import load_head, save_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.precision import cast_once, resolved
from nde_talf.draft_training.settings import EagleLoss, HassLoss, HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import (
    HeadBatch,
    HeadModule,
    build_head,
    fit_head,
    prepared_labels,
)
from nde_talf.draft_training.trainer import eager_attention
from nde_talf.evaluation.benchmark import Record, read_records, run_benchmark, together
from nde_talf.evaluation.loops import Speculative

WARM, CEILING = "warm start", "the target itself"
TALF = {f"TALF, k = {k}": TalfLoss(k=k) for k in (1, 2, 4)}
LOSSES = {"EAGLE": EagleLoss(), "HASS": HassLoss(), **TALF}
AS_PRINTED = {"EAGLE": EagleLoss(), "HASS": HassLoss(detach_features=False), **TALF}
LK = {
    "TALF + LK, k = 4": TalfLoss(k=4, objective="lk"),
    "HASS + LK": HassLoss(objective="lk", distillation=0.0, detach_features=False),
}
SLOWEST = "TALF, k = 4"
SAME_STEPS = ("EAGLE", "HASS", SLOWEST)  # of --as-printed, the heads trained for equal steps too
TREES = {
    "beam": (Beam, "nss"),
    "optimal": (Optimal, "nss"),
    "SALF": (Salf, "nss"),
    "SALF, filled": (partial(Salf, fill=True), "nss"),
}  # their defaults are the paper's: N = 60, k = B = 10, depth 7, th = 0.6
SHAPES = (Action(1, 0, 5), Action(3, 0, 4))
IID = {
    f"{tuple(shape)}, {title}": (partial(Delayed, shape), title.lower())
    for shape in SHAPES
    for title in ("SpecInfer", "Traversal")
}
ALL_IID = "all of these together"
TIMED = 9  # steps of each loss, interleaved, whose median says what one costs
TIMED_ROWS = 8
IID_NOTE = """(K, L1, L2) are i.i.d. trees: a trunk of L1 draws from the drafter's distribution at the target's temperature,
then K paths of L2 draws; under a greedy target a single path holds its most likely tokens, and several paths are drawn at 0.6.
A drafter equal to the target would reach L1 + L2 + 1 tokens a pass with them.
"""
OWN_ROWS, OWN_PROMPT = (
    2048,
    32,
)  # of --own-text: how many rows, and how many tokens of each are the corpus's
RANK_ROWS = 32  # held-out rows for Figure 2b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--folder", type=Path, help="default: <run>/heads")
    parser.add_argument("--warm-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--roots", type=int, default=32, help="roots of a row that get a tree in a step"
    )
    parser.add_argument(
        "--rows", type=int, help="rows of the training text to use, evenly over it; default: all"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=20,
        help="held-out prompts; first the test split's, then the traces'",
    )
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="of the target"
    )
    parser.add_argument(
        "--draft-temperatures", nargs="+", default=["auto"],
        help="what the drafter ranks trees at: auto, match, raw or a temperature, for each of --temperatures or one for all",
    )  # fmt: skip
    parser.add_argument(
        "--trees", nargs="+", choices=[*TREES, *IID], default=[*TREES, *IID], help="to decode with"
    )
    parser.add_argument(
        "--as-printed",
        action="store_true",
        help="the SALF & TALF paper's own comparison; see above",
    )
    parser.add_argument(
        "--l1", action="store_true", help="regression by the L1 norm, as papers print it"
    )
    parser.add_argument("--lk", action="store_true", help="heads trained with the LK hybrid too")
    parser.add_argument(
        "--own-text", action="store_true", help="train on continuations that the target samples"
    )
    parser.add_argument(
        "--plan", action="store_true", help="print the cost of the trainings, and stop"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="heads", help="of the files in benchmarks/results")
    options = parser.parse_args()
    drawn = [
        read_draft_temperature(each, "--draft-temperatures") for each in options.draft_temperatures
    ]
    drawn *= len(options.temperatures) if len(drawn) == 1 else 1
    if len(drawn) != len(options.temperatures):
        parser.error("--draft-temperatures: give one for each of --temperatures, or one for all.")
    quiet()
    torch.set_num_threads(1)
    folder = options.folder or options.run / "heads"
    pair = Pair(options.run / "pair")
    target = pair.target("cpu", "float32")
    train = pair.rows("train")
    rows = TokenRows.plain(spread(train, options.rows) if options.rows else train)
    if options.own_text:
        rows = own_text(target, rows, folder / "own_text.safetensors", options.seed)

    # 1. The plan: which losses, how many steps each, and what they cost.
    printed, losses = options.as_printed, AS_PRINTED if options.as_printed else LOSSES
    losses = losses | (LK if options.lk else {})
    if options.l1:
        losses = {
            name: replace(x, regression_norm="l1") if x.regresses else x
            for name, x in losses.items()
        }
    base = HeadConfig(chain_fraction=0.0, roots=options.roots, seed=options.seed)
    warm = None
    if not printed:
        warm = trained(
            target, rows, replace(base, loss=EagleLoss(), steps=options.warm_steps), folder / "warm"
        )
    configs = {
        name: replace(
            base,
            loss=loss,
            steps=options.steps,
            warm_start=warm and str(warm),
            seed=options.seed + 1,
        )
        for name, loss in losses.items()
    }
    costs = step_seconds(target, rows, configs, folder / "step_seconds.json", printed)
    seconds = costs["step"]
    longer = {name: round(options.steps * seconds[SLOWEST] / seconds[name]) for name in configs}
    same_steps = [name for name in configs if name in SAME_STEPS or not printed]
    plan = [
        "A step's CPU seconds, interleaved medians: "
        + ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
        + ".",
        f"Trainings for equal time: {len(configs) * options.steps * seconds[SLOWEST]:.0f} CPU"
        " seconds together, steps: "
        + ", ".join(f"{name} {steps}" for name, steps in longer.items())
        + f". For equal steps ({options.steps}):"
        f" {options.steps * sum(seconds[n] for n in same_steps if n != SLOWEST):.0f} CPU "
        + "seconds more.",
    ]
    console.print("\n\n".join(plan))
    if options.plan:
        return

    # 2. Training.
    heads = {} if printed else {WARM: warm}
    for name in same_steps:
        heads[name] = trained(target, rows, configs[name], folder / "steps" / slug(name))
    for name, config in configs.items():
        if name != SLOWEST:
            heads[f"{name}, as long"] = trained(
                target, rows, replace(config, steps=longer[name]), folder / "time" / slug(name)
            )

    # 3. Decoding.
    records = folder / "records.jsonl"
    prompts = pair.prompts(
        "test",
        min(options.prompts, sum(p.split == "test" for p in pair.every_prompt())),
        "--prompts",
    )
    prompts += pair.prompts("trace", options.prompts - len(prompts), "--prompts")
    check_prompts(prompts, target, options.new_tokens + 17, target.max_context)
    entries = [(p.id, p.kind, p.tokens) for p in prompts]
    settings = [SamplingSetting(temperature) for temperature in options.temperatures]
    trees_at = {
        str(setting): [
            tree for tree in options.trees if decoded(tree, setting.temperature, printed)
        ]
        for setting in settings
    }
    for setting, ranking in zip(settings, drawn, strict=True):
        drafters: dict[str, Drafter] = {
            name: EagleDrafter.from_pretrained(where, target) for name, where in heads.items()
        }
        drafters[CEILING] = LMDrafter(target)
        methods = {}
        for name, drafter in drafters.items():
            for tree in trees_at[str(setting)]:
                if name == CEILING and tree in IID:
                    continue  # every draw is accepted
                policy, rule = (TREES | IID)[tree]
                decoder = SpeculativeDecoder(target, drafter, policy(), VERIFIERS[rule], ranking)
                methods[f"{name} / {tree}"] = Speculative(
                    f"{name} / {tree}", decoder, setting, options.new_tokens
                )
        run_benchmark(methods, entries, setting, records, options.seed)

    # 4. The page.
    named = ({} if printed else {WARM: warm}) | {
        name: heads.get(f"{name}, as long") or heads[name] for name in configs
    }
    if not printed:
        named |= {name: heads[name] for name in configs}
    ranks = by_rank(target, named, pair, folder / "ranks.json", printed)
    found = list(read_records(records))
    begun = {} if printed else {WARM: WARM}
    by_steps = {**begun, **{name: name for name in same_steps}, CEILING: CEILING}
    by_time = {
        **begun,
        **{
            (name if name == SLOWEST else f"{name}, as long"): f"{name} ({steps} steps)"
            for name, steps in longer.items()
        },
        CEILING: CEILING,
    }

    def tables(heading: str, titles: dict[str, str], references: list[str]) -> list[str]:
        """One table of all temperatures where the trees are the same ones at each, else one for
        each.
        """
        if len({tuple(trees) for trees in trees_at.values()}) == 1:
            every = {str(setting): f"temperature {setting.temperature:g}" for setting in settings}
            return [
                f"## {heading}",
                comparison_table(found, titles, trees_at[str(settings[0])], references, every),
            ]
        parts = []
        for setting, trees in trees_at.items():
            more = [ALL_IID] if (mixed := pooled(found, setting, trees)) else []
            shown = {setting: f"temperature {setting.removeprefix('T=')}"}
            table = comparison_table([*found, *mixed], titles, trees + more, references, shown)
            parts += [f"## {heading}: temperature {setting.removeprefix('T=')}", table]
        return parts

    command = (
        f"python -m benchmarks.heads --run {options.run} --warm-steps {options.warm_steps} --steps"
        f" {options.steps}"
    )
    command += f" --temperatures {' '.join(map(str, options.temperatures))}"
    command += f" --draft-temperatures {' '.join(options.draft_temperatures)}"
    command += "".join(
        f" --{flag}"
        for flag in ("as-printed", "l1", "lk", "own-text")
        if getattr(options, flag.replace("-", "_"))
    )
    command += f" --rows {options.rows}" if options.rows else ""
    if options.trees != [*TREES, *IID]:
        command += " --trees " + " ".join(f"'{tree}'" for tree in options.trees)
    command += (
        f" --roots {options.roots} --prompts {options.prompts} --new-tokens {options.new_tokens}"
        f" --seed {options.seed}"
    )
    prepared = [
        "The target's trees and features are not counted as training time: a step is timed with"
        " labels on disk, which give the same weights as those computed in the step. For all roots"
        " of a row they cost, in CPU seconds: "
        + ", ".join(f"{name} {value:.2f}" for name, value in costs["labels"].items())
        + f". Rows: {4 * longer['EAGLE']} of {len(rows)} for EAGLE, {4 * options.steps} for"
        f" {SLOWEST}."
    ] * printed
    begins = (
        f"Every head continues one EAGLE-loss warm start ({options.warm_steps} steps), whose own"
        " row is that head as it was."
    )
    begins = "Every head begins at random." if printed else begins
    parts = [
        f"`{command}` (torch {torch.__version__})",
        (
            "Mean generation length τ: tokens a target pass, the bonus token included; 95 %"
            f" bootstrap over {options.prompts} held-out prompts, {options.new_tokens} new tokens"
            f" each. {begins} The last row drafts with the target itself: what a head equal to it"
            " would reach. Trees are chosen by the drafter's probabilities, warped as"
            f" {', '.join(options.draft_temperatures)}: N = 60 tokens, k = B = 10, depth 7, th ="
            " 0.6; the verifier is NSS."
        ),
        *([IID_NOTE] if printed else []),
        *plan,
        *prepared,
        *tables(f"Same optimiser steps ({options.steps})", by_steps, ["EAGLE", "HASS"]),
        *tables(
            f"Same time (that of {options.steps} steps of {SLOWEST})",
            by_time,
            ["EAGLE, as long", "HASS, as long"],
        ),
        (
            "## After a token that is n-th in the head's own distribution"
            f" ({'same time' if printed else 'same steps'})"
        ),
        "Accuracy: the head's most likely token is the target's. "
        + (
            "ECE as in the paper's Appendix A: binned by the head's probability of the target's"
            " most likely token."
            if printed
            else "ECE: of that token's probability, against the target's."
        ),
        rank_table(ranks),
        f"![top-1 accuracy and calibration error by rank]({options.name}_by_rank.png)",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{options.name}.md").write_text("\n\n".join(part.strip() for part in parts) + "\n")
    everything = [
        *found,
        *(
            record
            for setting, trees in trees_at.items()
            for record in pooled(found, setting, trees)
        ),
    ]
    lengths: dict[str, dict[str, list[float]]] = {}
    for setting in trees_at:
        by_method: dict[str, list[Record]] = {}
        for record in everything:
            if record.setting == setting:
                by_method.setdefault(record.method, []).append(record)
        lengths[setting] = {method: generation_length(own) for method, own in by_method.items()}
    content = {
        "command": command,
        "costs": costs,
        "steps": longer,
        "generation_length": lengths,
        "ranks": ranks,
    }
    write_json(RESULTS / f"{options.name}.json", content)
    rank_figure(ranks).savefig(RESULTS / f"{options.name}_by_rank.png")
    console.print("\n\n".join(parts))


def decoded(tree: str, temperature: float, printed: bool) -> bool:
    """Whether the comparison decodes with `tree` at `temperature`.

    Under a greedy target SpecInfer and Traversal write and accept the same.
    """
    if not printed:
        return tree in TREES
    return tree.endswith("SpecInfer") or (tree in TREES) == (temperature == 0)


def pooled(records: list[Record], setting: str, trees: list[str]) -> list[Record]:
    """Of one setting, a record for each head and prompt with the sums over the i.i.d. trees; none
    where there is one such tree or none.
    """
    among = [tree for tree in trees if tree in IID]
    if len(among) < 2:
        return []
    found = []
    for record in records:
        head, _, tree = record.method.partition(" / ")
        if record.setting == setting and tree in among:
            found.append(replace(record, method=f"{head} / {ALL_IID}"))
    return together(found)


def trained(target: CausalModel, rows: TokenRows, config: HeadConfig, folder: Path) -> Path:
    """Folder of a head trained with `config`; one that is there is taken as it is."""
    export, made = folder / "export", folder / "config.json"
    wanted = {name: value for name, value in asdict(config).items() if name != "checkpoint_seconds"}
    if not (export.exists() and made.exists() and read_json(made) == wanted):
        console.print(f"training {folder}: {config.loss.name}, {config.steps} steps")
        save_head(fit_head(target, rows, config, folder / "training"), export)
        write_json(made, wanted)
    return export


def step_seconds(
    target: CausalModel,
    rows: TokenRows,
    configs: dict[str, HeadConfig],
    file: Path,
    stored: bool = False,
) -> dict[str, dict[str, float]]:
    """By loss, measured once: `step`, the median CPU seconds of an optimiser step, steps of all
    losses in turn; `labels`, CPU seconds for which the target prepares a row's labels on disk, 0
    where they are computed in the step. stored: with labels on disk.
    """
    if not file.exists():
        on_disk = {"labels": {"name": "features", "dtype": "float32"}} if stored else {}
        configs = {
            name: replace(config, steps=TIMED_ROWS, **on_disk) for name, config in configs.items()
        }
        some, labels, modules, sources = rows[torch.arange(TIMED_ROWS)], {}, {}, {}
        for name, config in configs.items():
            kind, started = (
                (config.loss.name, config.loss.k, config.loss.depth),
                time.process_time(),
            )
            if kind not in sources:
                source = prepared_labels(
                    target, some, file.parent / "timing" / "-".join(map(str, kind)), config
                )
                sources[kind] = (
                    source,
                    (time.process_time() - started) / TIMED_ROWS if source else 0.0,
                )
            source, labels[name] = sources[kind]
            modules[name] = HeadModule(build_head(target, config), config, source)
        base = next(iter(configs.values()))
        optimizers = {name: module.configure_optimizers() for name, module in modules.items()}
        times: dict[str, list[float]] = {name: [] for name in configs}
        precision = resolved(base.precision, target.device)
        mixed = torch.autocast(target.device.type, torch.bfloat16)
        passes = mixed if precision == "bf16-mixed" else nullcontext()
        with eager_attention([target.module]), cast_once(target.module, precision), passes:
            for step in track(range(TIMED + 1), "seconds a step", TIMED + 1):
                numbers = torch.arange(step * 4, step * 4 + 4) % TIMED_ROWS
                for name, module in modules.items():
                    started = time.process_time()
                    module.loss(HeadBatch(rows[numbers], numbers), step)[0].backward()
                    for optimizer in optimizers[name]:
                        optimizer.step()
                        optimizer.zero_grad()
                    if step:
                        times[name].append(time.process_time() - started)
        steps = {name: statistics.median(values) for name, values in times.items()}
        write_json(file, {"step": steps, "labels": labels})
        shutil.rmtree(file.parent / "timing", ignore_errors=True)
    found = read_json(file)
    return (
        found if "step" in found else {"step": found, "labels": dict.fromkeys(found, 0.0)}
    )  # of an earlier version


@torch.inference_mode()
def own_text(target: CausalModel, rows: TokenRows, file: Path, seed: int) -> TokenRows:
    """The first `OWN_ROWS` rows, of which the target samples all tokens after the first
    `OWN_PROMPT` (temperature 1); these alone count.

    Made once.
    """
    if not file.exists():
        torch.manual_seed(seed)
        beginnings = rows.tokens[:OWN_ROWS, :OWN_PROMPT].split(128)
        length = rows.tokens.shape[1]
        how = {
            "do_sample": True,
            "top_k": 0,
            "min_length": length,
            "max_length": length,
            "pad_token_id": 0,
        }
        texts = [
            target.module.generate(part, attention_mask=torch.ones_like(part), **how)
            for part in track(beginnings, "the target's own text", len(beginnings), "batch")
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"tokens": torch.cat(texts).contiguous()}, file)
    own = TokenRows.plain(load_file(file)["tokens"])
    own.loss[:, :OWN_PROMPT] = False
    return own


def by_rank(
    target: CausalModel, heads: dict[str, Path], pair: Pair, file: Path, of_label: bool = False
) -> dict[str, dict[str, list[float]]]:
    """Accuracy and calibration error of every head, lists over the rank conditioned on. of_label:
    see `after_ranks`.
    """
    if not file.exists():
        rows, found = TokenRows.plain(spread(pair.rows("held_out"), RANK_ROWS)), {}
        for name in track(heads, "by rank", len(heads), "head"):
            agree, confidence, right = (
                part.numpy()
                for part in after_ranks(
                    load_head(heads[name], target), target, rows, of_label=of_label
                )
            )
            errors = [calibration_error(*one) for one in zip(confidence, right, strict=True)]
            found[name] = {"accuracy": agree.mean(1).tolist(), "ece": errors}
        write_json(file, found)
    return read_json(file)


def slug(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


if __name__ == "__main__":
    main()
