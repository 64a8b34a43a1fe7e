"""Draft heads trained with the losses of EAGLE, HASS and TALF from one warm start, on the same text: mean generation length on
held-out prompts by loss and tree (Tables 2 and 3 of the SALF & TALF paper), and accuracy by the rank conditioned on
(Figure 2b).

`python -m benchmarks.heads [--run checkpoints/default]`, after `python -m pipelines.run stage=pair`. Once for equal optimiser
steps, once for equal time. An interrupted run goes on where it stopped; its files are in `<run>/heads`.

`--as-printed` makes the paper's own comparison: equal time from random heads (no warm start), with the target's trees and
features precomputed (their cost is stated apart), HASS with gradients through its features, the paper's calibration measure.
`--own-text` trains all heads on text that the target continued itself.
"""

import argparse
import shutil
import statistics
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from pipelines.quiet import quiet  # isort: skip (before torch)

import torch
from safetensors.torch import load_file, save_file
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
from draft_training.train_head import HeadBatch, HeadModule, build_head, fit_head, prepared_labels, rows_seen
from draft_training.trainer import eager_attention
from draft_training.tree_attention import TreeLevel
from evaluation.benchmark import read_records, run_benchmark
from evaluation.methods import Speculative

WARM, CEILING = "warm start", "the target itself"
TALF = {f"TALF, k = {k}": TalfLoss(k=k) for k in (1, 2, 4)}
LOSSES = {"EAGLE": EagleLoss(), "HASS": HassLoss(), **TALF}
AS_PRINTED = {"EAGLE": EagleLoss(), "HASS": HassLoss(detach_features=False), **TALF}
LK = {"TALF + LK, k = 4": TalfLoss(k=4, objective="lk"), "HASS + LK": HassLoss(objective="lk", distillation=0.0)}
SLOWEST = "TALF, k = 4"
TREES = {
    "beam": Beam,
    "optimal": Optimal,
    "SALF": Salf,
    "SALF, filled": partial(Salf, fill=True),
}  # their defaults are the paper's: N = 60, k = B = 10, depth 7, th = 0.6
TIMED = 5  # steps of each loss, interleaved, whose median says what one costs
OWN_ROWS, OWN_PROMPT = 512, 32  # of --own-text: how many rows, and how many tokens of each are the corpus's
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
    parser.add_argument("--as-printed", action="store_true", help="the SALF & TALF paper's own comparison; see above")
    parser.add_argument("--l1", action="store_true", help="regression by the L1 norm, as papers print it")
    parser.add_argument("--lk", action="store_true", help="heads trained with the LK hybrid too")
    parser.add_argument("--own-text", action="store_true", help="train on continuations that the target samples")
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
    if options.own_text:
        rows = own_text(target, rows, folder / "own_text.safetensors", options.seed)

    printed, losses = options.as_printed, AS_PRINTED if options.as_printed else LOSSES
    losses = losses | (LK if options.lk else {})
    if options.l1:
        losses = {name: replace(x, regression_norm="l1") if x.regresses else x for name, x in losses.items()}
    labels = {"name": "features", "dtype": "float32"} if printed else {"name": "online"}
    base = HeadConfig(chain_fraction=0.0, roots=options.roots, seed=options.seed, labels=labels)
    heads, warm = {}, None
    if not printed:
        warm = trained(target, rows, replace(base, loss=EagleLoss(), steps=options.warm_steps), folder / "warm")
        heads[WARM] = warm
    configs = {
        name: replace(base, loss=loss, steps=options.steps, warm_start=warm and str(warm), seed=options.seed + 1)
        for name, loss in losses.items()
    }
    costs = step_seconds(target, rows, configs, folder / "step_seconds.json")
    seconds = costs["step"]
    for name, config in configs.items():
        if not printed or name == SLOWEST:
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

    named = ({} if printed else {WARM: warm}) | {name: heads.get(name) or heads[f"{name}, as long"] for name in configs}
    ranks = by_rank(target, named, pair, folder / "ranks.json", printed)
    found = list(read_records(records))
    titles = {str(setting): f"temperature {setting.temperature:g}" for setting in settings}
    begun = {} if printed else {WARM: WARM}
    same_steps = {**begun, **{name: name for name in configs}, CEILING: CEILING}
    same_time = {
        **begun,
        **{(name if name == SLOWEST else f"{name}, as long"): f"{name} ({steps} steps)" for name, steps in longer.items()},
        CEILING: CEILING,
    }
    command = f"python -m benchmarks.heads --run {options.run} --warm-steps {options.warm_steps} --steps {options.steps}"
    command += f" --temperatures {' '.join(map(str, options.temperatures))}"
    command += f" --draft-temperatures {' '.join(options.draft_temperatures)}"
    command += "".join(
        f" --{flag}" for flag in ("as-printed", "l1", "lk", "own-text") if getattr(options, flag.replace("-", "_"))
    )
    command += f" --roots {options.roots} --prompts {options.prompts} --new-tokens {options.new_tokens} --seed {options.seed}"
    table = comparison_table(found, same_steps, list(TREES), ["EAGLE", "HASS"], titles) if not printed else ""
    same_number = [] if printed else [f"## Same optimiser steps ({options.steps})", table]
    rows_of = {name: len(rows_seen(len(rows), replace(config, steps=longer[name]))) for name, config in configs.items()}
    prepared = [
        "Trees and features of the target were computed before, and this is not counted as training time. Seconds, and rows: "
        + ", ".join(f"{name} {rows_of[name] * costs['labels'][name]:.0f} ({rows_of[name]})" for name in configs)
        + "."
    ] * printed
    begins = (
        f"Every head continues one EAGLE-loss warm start ({options.warm_steps} steps), whose own row is that head as it was."
    )
    begins = "Every head begins at random." if printed else begins
    parts = [
        f"`{command}` (torch {torch.__version__})",
        f"Mean generation length τ: tokens a target pass, the bonus token included; 95 % bootstrap over {options.prompts} "
        f"held-out prompts, {options.new_tokens} new tokens each. "
        f"{begins} The last row drafts with the target itself: what a head equal to it would reach. Trees are chosen by the "
        f"drafter's probabilities, warped as {', '.join(options.draft_temperatures)}: N = 60 tokens, k = B = 10, depth 7, "
        "th = 0.6; the verifier is NSS.",
        *same_number,
        f"## Same time (that of {options.steps} steps of {SLOWEST})",
        "A step's seconds, interleaved medians: " + ", ".join(f"{name} {value:.3f}" for name, value in seconds.items()) + ".",
        *prepared,
        comparison_table(found, same_time, list(TREES), ["EAGLE, as long", "HASS, as long"], titles),
        f"## After a token that is n-th in the head's own distribution ({'same time' if printed else 'same steps'})",
        "Accuracy: the head's most likely token is the target's. "
        + (
            "ECE as in the paper's Appendix A: binned by the head's probability of the target's most likely token."
            if printed
            else "ECE: of that token's probability, against the target's."
        ),
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
        shutil.rmtree(folder / "training" / "labels", ignore_errors=True)
        write_json(made, wanted)
    return export


def step_seconds(
    target: CausalModel, rows: TokenRows, configs: dict[str, HeadConfig], file: Path
) -> dict[str, dict[str, float]]:
    """By loss, measured once: `step`, the median seconds of an optimiser step, steps of all losses in turn; `labels`, seconds
    for which the target prepares a row's labels on disk, 0 where they are computed in the step."""
    if not file.exists():
        some, labels, modules = rows[torch.arange((TIMED + 1) * 4)], {}, {}
        for name, config in configs.items():
            started = time.perf_counter()
            source = prepared_labels(target, some, file.parent / "timing" / slug(name), replace(config, steps=len(some)))
            labels[name] = (time.perf_counter() - started) / len(some) if source else 0.0
            modules[name] = HeadModule(build_head(target, config), config, source)
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
        steps = {name: statistics.median(values) for name, values in times.items()}
        write_json(file, {"step": steps, "labels": labels})
        shutil.rmtree(file.parent / "timing", ignore_errors=True)
    found = read_json(file)
    return found if "step" in found else {"step": found, "labels": dict.fromkeys(found, 0.0)}  # of an earlier version


@torch.inference_mode()
def own_text(target: CausalModel, rows: TokenRows, file: Path, seed: int) -> TokenRows:
    """The first `OWN_ROWS` rows, of which the target samples all tokens after the first `OWN_PROMPT` (temperature 1); these
    alone count. Made once."""
    if not file.exists():
        torch.manual_seed(seed)
        beginnings = rows.tokens[:OWN_ROWS, :OWN_PROMPT].split(32)
        length = rows.tokens.shape[1]
        how = {"do_sample": True, "top_k": 0, "min_length": length, "max_length": length, "pad_token_id": 0}
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
    """Accuracy and calibration error of every head, lists over the rank conditioned on. of_label: see `after_ranks`."""
    if not file.exists():
        rows, found = TokenRows.plain(spread(pair.rows("held_out"), RANK_ROWS)), {}
        for name in track(heads, "by rank", len(heads), "head"):
            agree, confidence, right = (
                part.numpy() for part in after_ranks(load_head(heads[name], target), target, rows, of_label=of_label)
            )
            errors = [calibration_error(*one) for one in zip(confidence, right, strict=True)]
            found[name] = {"accuracy": agree.mean(1).tolist(), "ece": errors}
        write_json(file, found)
    return read_json(file)


@torch.inference_mode()
def after_ranks(
    head: EagleHead, target: CausalModel, rows: TokenRows, ranks: int = 5, stride: int = 8, of_label: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The head after its own n-th most likely token, n = 1..ranks (Figure 2b of the SALF & TALF paper).

    Args:
        stride: of the tokens that a root may be, every `stride`-th is one.
        of_label: as in Appendix A of that paper: confidence is the head's probability of the target's most likely token, and
            right is agree.

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
        if of_label:
            confidence, right = q.gather(-1, p.argmax(-1, keepdim=True))[..., 0], agree
        for parts, values in zip(found, (agree, confidence, right), strict=True):
            parts.append(values.flatten(0, 1))
    agree, confidence, right = (torch.cat(parts).T for parts in found)
    return agree, confidence, right


def slug(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


if __name__ == "__main__":
    main()
