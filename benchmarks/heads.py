"""Draft heads trained with the losses of EAGLE, HASS and TALF from one warm start, on the same text: mean generation length on
held-out prompts by loss and tree (Tables 2 and 3 of the SALF & TALF paper), and accuracy by the rank conditioned on
(Figure 2b).

`python -m benchmarks.heads [--run checkpoints/default]`, after `python -m pipelines.run stage=pair`. Once for equal optimiser
steps, once for equal time. An interrupted run goes on where it stopped; its files are in `<run>/heads`.
"""

import argparse
import statistics
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from pipelines.quiet import quiet  # isort: skip (before torch)

import torch
from torch import Tensor

from benchmarks.head_comparison import calibration_error, comparison_table, rank_figure, rank_table
from benchmarks.timing import RESULTS
from data.dialogues.token_rows import TokenRows
from data.text.pair import Pair, check_prompts, spread
from decoding.common.files import read_json, write_json
from decoding.common.progress import console, track
from decoding.drafter import Drafter, LMDrafter
from decoding.loop import SpeculativeDecoder
from decoding.model import CausalModel
from decoding.policies.beam import Beam
from decoding.policies.salf import Optimal, Salf
from decoding.sampling import SamplingSetting
from decoding.setting import read_draft_temperature
from decoding.verification import VERIFIERS
from draft_training.evaluate import rows_with_roots
from draft_training.export import load_head, save_head
from draft_training.head import EagleHead
from draft_training.head_drafter import EagleDrafter
from draft_training.settings import EagleLoss, HassLoss, HeadConfig, TalfLoss
from draft_training.target_trees import target_features, target_levels
from draft_training.train_head import HeadBatch, HeadModule, build_head, fit_head
from draft_training.trainer import eager_attention
from draft_training.tree_attention import TreeLevel
from evaluation.benchmark import read_records, run_benchmark
from evaluation.methods import Speculative

WARM, CEILING = "warm start", "the target itself"
LOSSES = {"EAGLE": EagleLoss(), "HASS": HassLoss(), **{f"TALF, k = {k}": TalfLoss(k=k) for k in (1, 2, 4)}}
SLOWEST = "TALF, k = 4"
TREES = {
    "beam": Beam,
    "optimal": Optimal,
    "SALF": Salf,
    "SALF, filled": partial(Salf, fill=True),
}  # their defaults are the paper's: N = 60, k = B = 10, depth 7, th = 0.6
TIMED = 5  # steps of each loss, interleaved, whose median says what one costs
RANK_ROWS = 64  # held-out rows for Figure 2b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--folder", type=Path, help="default: <run>/heads")
    parser.add_argument("--warm-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--roots", type=int, default=32, help="roots of a row that get a tree in a step")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="of the target")
    parser.add_argument(
        "--draft-temperatures", nargs="+", default=["auto"],
        help="what the drafter ranks trees at: auto, match, raw or a temperature, for each of --temperatures or one for all",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="heads", help="of the files in benchmarks/results")
    options = parser.parse_args()
    drawn = [read_draft_temperature(each, "--draft-temperatures") for each in options.draft_temperatures]
    drawn *= len(options.temperatures) if len(drawn) == 1 else 1
    if len(drawn) != len(options.temperatures):
        parser.error("--draft-temperatures: give one for each of --temperatures, or one for all.")
    quiet()
    folder = options.folder or options.run / "heads"
    pair = Pair(options.run / "pair")
    target = pair.target("cpu", "float32")
    rows = TokenRows.plain(pair.rows("train"))

    base = HeadConfig(chain_fraction=0.0, roots=options.roots, seed=options.seed)
    warm = trained(target, rows, replace(base, loss=EagleLoss(), steps=options.warm_steps), folder / "warm")
    configs = {
        name: replace(base, loss=loss, steps=options.steps, warm_start=str(warm), seed=options.seed + 1)
        for name, loss in LOSSES.items()
    }
    seconds = step_seconds(target, rows, configs, folder / "step_seconds.json")
    heads = {WARM: warm}
    for name, config in configs.items():
        heads[name] = trained(target, rows, config, folder / "steps" / slug(name))
    longer = {name: round(options.steps * seconds[SLOWEST] / seconds[name]) for name in configs}
    for name, config in configs.items():
        if name != SLOWEST:
            heads[f"{name}, as long"] = trained(target, rows, replace(config, steps=longer[name]), folder / "time" / slug(name))

    torch.set_num_threads(1)
    records = folder / "records.jsonl"
    prompts = pair.prompts("test", options.prompts, "--prompts")
    check_prompts(prompts, target, options.new_tokens + 17, target.max_context)
    entries = [(p.id, p.kind, p.tokens) for p in prompts]
    settings = [SamplingSetting(temperature) for temperature in options.temperatures]
    for setting, ranking in zip(settings, drawn, strict=True):
        drafters: dict[str, Drafter] = {name: EagleDrafter.from_pretrained(where, target) for name, where in heads.items()}
        drafters[CEILING] = LMDrafter(target)
        methods = {}
        for name, drafter in drafters.items():
            for tree, policy in TREES.items():
                decoder = SpeculativeDecoder(target, drafter, policy(), VERIFIERS["nss"], ranking)
                methods[f"{name} / {tree}"] = Speculative(f"{name} / {tree}", decoder, setting, options.new_tokens)
        run_benchmark(methods, entries, setting, records, options.seed)

    ranks = by_rank(target, {name: heads[name] for name in (WARM, *configs)}, pair, folder / "ranks.json")
    found = list(read_records(records))
    titles = {str(setting): f"temperature {setting.temperature:g}" for setting in settings}
    same_steps = {WARM: WARM, **{name: name for name in configs}, CEILING: CEILING}
    same_time = {
        WARM: WARM,
        **{(name if name == SLOWEST else f"{name}, as long"): f"{name} ({steps} steps)" for name, steps in longer.items()},
        CEILING: CEILING,
    }
    command = f"python -m benchmarks.heads --run {options.run} --warm-steps {options.warm_steps} --steps {options.steps}"
    command += f" --temperatures {' '.join(map(str, options.temperatures))}"
    command += f" --draft-temperatures {' '.join(options.draft_temperatures)}"
    command += f" --roots {options.roots} --prompts {options.prompts} --new-tokens {options.new_tokens} --seed {options.seed}"
    parts = [
        f"`{command}` (torch {torch.__version__})",
        f"Mean generation length τ: tokens a target pass, the bonus token included; 95 % bootstrap over {options.prompts} "
        f"held-out prompts, {options.new_tokens} new tokens each. Every head continues one EAGLE-loss warm start "
        f"({options.warm_steps} steps), whose own row is that head as it was; the last row drafts with the target itself: "
        "what a head equal to it would reach. Trees are chosen by the drafter's probabilities, warped as "
        f"{', '.join(options.draft_temperatures)}: N = 60 tokens, k = B = 10, depth 7, th = 0.6; the verifier is NSS.",
        f"## Same optimiser steps ({options.steps})",
        comparison_table(found, same_steps, list(TREES), ["EAGLE", "HASS"], titles),
        f"## Same time (that of {options.steps} steps of {SLOWEST})",
        "A step's seconds, interleaved medians: " + ", ".join(f"{name} {value:.3f}" for name, value in seconds.items()) + ".",
        comparison_table(found, same_time, list(TREES), ["EAGLE, as long", "HASS, as long"], titles),
        "## After a token that is n-th in the head's own distribution (same steps)",
        "Accuracy: the head's most likely token is the target's. ECE: of that token's probability, against the target's.",
        rank_table(ranks),
        f"![top-1 accuracy and calibration error by rank]({options.name}_by_rank.png)",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{options.name}.md").write_text("\n\n".join(part.strip() for part in parts) + "\n")
    rank_figure(ranks).savefig(RESULTS / f"{options.name}_by_rank.png")
    console.print("\n\n".join(parts))


def trained(target: CausalModel, rows: TokenRows, config: HeadConfig, folder: Path) -> Path:
    """Folder of a head trained with `config`; one that is there is taken as it is."""
    export, made = folder / "export", folder / "config.json"
    wanted = {name: value for name, value in asdict(config).items() if name != "checkpoint_seconds"}
    if not (export.exists() and made.exists() and read_json(made) == wanted):
        console.print(f"training {folder}: {config.loss.name}, {config.steps} steps")
        save_head(fit_head(target, rows, config, folder / "training"), export)
        write_json(made, wanted)
    return export


def step_seconds(target: CausalModel, rows: TokenRows, configs: dict[str, HeadConfig], file: Path) -> dict[str, float]:
    """Median seconds of one optimiser step of every loss, steps of all in turn; measured once."""
    if not file.exists():
        modules = {name: HeadModule(build_head(target, config), config) for name, config in configs.items()}
        optimizers = {name: module.configure_optimizers() for name, module in modules.items()}
        times: dict[str, list[float]] = {name: [] for name in configs}
        with eager_attention([target.module]):
            for step in track(range(TIMED + 1), "seconds a step", TIMED + 1):
                numbers = torch.arange(step * 4, step * 4 + 4)
                for name, module in modules.items():
                    started = time.perf_counter()
                    module.loss(HeadBatch(rows[numbers], numbers), step)[0].backward()
                    for optimizer in optimizers[name]:
                        optimizer.step()
                        optimizer.zero_grad()
                    if step:
                        times[name].append(time.perf_counter() - started)
        write_json(file, {name: statistics.median(values) for name, values in times.items()})
    return read_json(file)


def by_rank(target: CausalModel, heads: dict[str, Path], pair: Pair, file: Path) -> dict[str, dict[str, list[float]]]:
    """Accuracy and calibration error of every head, lists over the rank conditioned on."""
    if not file.exists():
        rows, found = TokenRows.plain(spread(pair.rows("held_out"), RANK_ROWS)), {}
        for name in track(heads, "by rank", len(heads), "head"):
            agree, confidence, right = (part.numpy() for part in after_ranks(load_head(heads[name], target), target, rows))
            errors = [calibration_error(*one) for one in zip(confidence, right, strict=True)]
            found[name] = {"accuracy": agree.mean(1).tolist(), "ece": errors}
        write_json(file, found)
    return read_json(file)


@torch.inference_mode()
def after_ranks(
    head: EagleHead, target: CausalModel, rows: TokenRows, ranks: int = 5, stride: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """The head after its own n-th most likely token, n = 1..ranks (Figure 2b of the SALF & TALF paper).

    Args:
        stride: of the tokens that a root may be, every `stride`-th is one.

    Returns:
        Each [ranks, n]: agree (0 or 1), whether the head's most likely next token is the target's; confidence, the head's
        probability of its most likely token; right, the target's probability of that token, which is how often it is right
        where the target samples.
    """
    found: list[list[Tensor]] = [[], [], []]
    for row, roots in rows_with_roots(rows.to(target.device), stride):
        tokens, document = row.tokens, row.document
        _, features = target_features(target, tokens, document, layers=head.feature_layers)
        first = head.tree_features(tokens, features, roots, [], document=document)[0][:, roots - 1]
        guesses = head.logits(first).topk(ranks, -1).indices
        levels = [TreeLevel(guesses, torch.zeros_like(guesses))]
        q = head.logits(head.tree_features(tokens, features, roots, levels, document=document)[-1]).float().softmax(-1)
        p = target.logits(target_levels(target, tokens, roots, levels, document=document)[0]).float().softmax(-1)
        confidence, best = q.max(-1)
        agree = (best == p.argmax(-1)).float()
        right = p.gather(-1, best[..., None])[..., 0]
        for parts, values in zip(found, (agree, confidence, right), strict=True):
            parts.append(values.flatten(0, 1))
    agree, confidence, right = (torch.cat(parts).T for parts in found)
    return agree, confidence, right


def slug(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


if __name__ == "__main__":
    main()
