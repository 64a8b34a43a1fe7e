"""Stage evaluate: the torch loop on held-out prompts, every method interleaved, and the report."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data.text.pair import Pair, check_prompts
from data.text.prompts import Prompt
from data.traces.settings import SETTINGS
from decoding.actions import K_MAX, Action
from decoding.common.files import read_json, write_json
from decoding.common.progress import working
from decoding.drafter import Drafter, drafter_of
from decoding.model import CausalModel
from decoding.sampling import SamplingSetting
from decoding.setting import AUTO, drafted_under, read_draft_temperature
from decoding.static import MARGIN, StaticShapes
from draft_training.head_drafter import EagleDrafter
from evaluation.assisted import DEFAULT, Lookup, Schedule
from evaluation.benchmark import Record, block_seed, read_records, run_benchmark
from evaluation.environment import conditions, environment
from evaluation.methods import Bench, Plan, Speculative, selector_title
from evaluation.report import ReportData, write_report
from evaluation.solver_acceptance import acceptance_by_depth, draft_paths
from evaluation.speed import selectors_versus
from evaluation.table import by_kind, by_setting, histogram, latencies, steps_by_tree, tabulate, vllm_counters
from evaluation.terminal import render_results
from evaluation.text_sample import coloured
from evaluation.tuned import FAMILIES, add_tuned, candidates, tune
from evaluation.verdict import verdicts
from pipelines.config import TABLE, WITHOUT_DRAFT, Config
from pipelines.drafted import load_drafted
from pipelines.machine import threads
from pipelines.policy_table import default_verifier, make_policy
from pipelines.selector import roots_of, selectors
from pipelines.sharding import parts
from pipelines.stage import MANIFEST, Stage, console
from pipelines.tracking import Tracker, read_curves, tracked
from selector.latency import LatencyTable
from selector.selector import Selector

DEPTHS = 8  # of the paths whose acceptance rates the report shows
GIBBERISH = 600  # seconds of the stage that trains the pair: the report says what a text of a shorter one is worth
SOLVER_PROMPTS = 10  # on which these are measured


def settings(config: Config) -> dict[str, Any]:
    own = asdict(config.evaluation)
    if "policies" not in config.evaluation.methods:
        del own["policies"]
    if not {"ngram", "mixed"} & {*config.evaluation.methods}:
        del own["ngram"]
    if config.evaluation.draft_temperature == AUTO:  # as in evaluations from before there was the key
        del own["draft_temperature"]
    return {
        "evaluation": own,
        "selectors": selectors(config),
        "drafter": None if config.traces.drafter == "lm" else config.traces.drafter,
        "dtype": config.model.dtype,
        "device": config.model.device,
        "draft_device": config.model.draft_device,
        "static_shapes": config.model.static_shapes or None,
        "forward": None if config.model.forward == "auto" else config.model.forward,
        "tensor_parallel": parts(config.model),
        "seed": config.seed,
    }


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    evaluation, folder, pair = config.evaluation, folders["evaluate"], Pair(folders["pair"])
    target, draft = load_drafted(config, folders) if config.drafts else (pair.target(*config.model.placed), None)
    wanted, labelled = evaluation.draft_temperature, config.traces.draft_temperature
    drawn = read_draft_temperature("raw" if wanted == AUTO and labelled == "raw" else wanted)
    if wanted not in (AUTO, labelled) and {"selector", "rules", "baselines"} & methods(config):
        console.print(
            f"! evaluation.draft_temperature={wanted}, but the labels that choose trees were made with "
            f"traces.draft_temperature={labelled}: these trees may be poor ones. The text stays lossless."
        )
    prompts = pair.prompts("test", evaluation.prompts, "evaluation.prompts")
    traced = config.traces.train_prompts
    tuning = pair.prompts("trace", traced + evaluation.calibration_prompts, "evaluation.calibration_prompts")[traced:]
    room = evaluation.new_tokens + MARGIN
    check_prompts(prompts + tuning, target, room, min(model.max_context for model in (target, draft) if model))
    longest = max(len(prompt.tokens) for prompt in prompts + tuning)
    fixed = StaticShapes(longest + room) if config.model.static_shapes else None
    table = LatencyTable.load(folders["latency"] / TABLE) if draft else None
    roots = roots_of(config, folders["traces"], quiet=True)[0] if draft else None
    bench = Bench(target, draft, roots, table, evaluation.new_tokens, drawn, fixed)
    if left_out := {*evaluation.methods} - methods(config):
        why = "all methods draft with the head" if config.traces.drafter == "head" else "there is no draft model (model.draft)"
        console.print(f"· no {', '.join(sorted(left_out))}: {why}")
    if "assisted" in methods(config) and not _same_rows(target, draft):
        console.print(
            "· no assisted: the output layers of target and draft have different numbers of rows, which "
            "transformers' assisted generation takes for different tokenizers"
        )
    if note := without_labels(config):
        console.print(f"! {note}: add them to traces.settings for labels.")
    plans: dict[str, Plan] = {}
    rates: dict[str, dict[str, list[float]]] = {}
    records, seed = folder / "records.jsonl", config.seed + evaluation.seed
    with threads(evaluation.threads), tracked(config, "evaluate", folder) as tracker:
        for name in evaluation.settings:
            setting = SETTINGS[name]
            console.print(f"{setting}: choosing the methods' trees, some by timing them ...", style="dim")
            plan = plans[str(setting)] = _plan(config, folders, bench, setting, tuning)
            if draft:
                paths = [prompt.tokens for prompt in prompts[:SOLVER_PROMPTS]]
                with working(f"{setting}: acceptance rates of all solvers"):
                    rows = draft_paths(target, draft, paths, setting, drafted_under(drawn, setting, "path"), DEPTHS)
                    rates[str(setting)] = acceptance_by_depth(*rows, K_MAX)
            blocks = [(p.id, p.kind, p.tokens) for p in prompts]
            run_benchmark(plan.methods, blocks, setting, records, seed, evaluation.passes)
        data = report_data(config, folders, list(read_records(records)), plans)
        data.acceptance = rates
        data.sample = _sample(data, plans, prompts[0], block_seed(seed, 0, 0), pair)
        if data.sample and config.model.target is None and data.stages["pair"] < GIBBERISH:
            data.sample["trained_here"] = True
        write_report(data, folder)
        _track(tracker, data)
        tracker.report(folder)
    return {setting: {row.method: row.speedup for row in rows} for setting, rows in data.tables.items()}


def show(folder: Path) -> None:
    """What a finished evaluation found."""
    for rendered in render_results(read_json(folder / "results.json")):
        console.print(rendered)
    console.print(f"report: {folder / 'index.html'}", soft_wrap=True)


def _plan(config: Config, folders: dict[str, Path], bench: Bench, setting: SamplingSetting, tuning: list[Prompt]) -> Plan:
    """The methods of one setting. A method that is the same as an earlier one is not decoded."""
    wanted, main, plan = methods(config), config.selector.verifiers[0], bench.plan(setting)
    name, texts = next(key for key, own in SETTINGS.items() if own == setting), [prompt.tokens for prompt in tuning]

    def once(file: str, key: str, kind: Any, choose: Callable[[], Any]) -> Any:
        """What `choose` finds by timing, a `kind`, chosen once: a resumed evaluation reads it from a file. One of an earlier
        version may hold another key."""
        remembered = folders["evaluate"] / f"{file}-{name}.json"
        if not remembered.exists() or key not in read_json(remembered):
            write_json(remembered, {key: choose()})
        return read_json(remembered, dict[str, kind])[key]

    def timed(file: str, drafter: Drafter | None = None) -> Action:
        """The static tree of a drafter (None: the LM draft), chosen by timing."""
        drafter = drafter or drafter_of(bench.draft, bench.fixed)
        return Action(*once(file, "action", tuple[int, int, int], lambda: bench.timed_action(drafter, main, setting, texts)))

    if "assisted" in wanted and _same_rows(bench.target, bench.draft):
        found = once("assisted", "schedule", tuple[int, str, float] | None, lambda: bench.assisted_schedule(setting, texts))
        bench.add_assisted(plan, found and Schedule(*found), setting)
    if "transformers" in wanted:
        bench.add_plain(plan, setting)
        bench.add_lookup(plan, Lookup(*once("lookup", "sizes", tuple[int, int], lambda: bench.lookup(setting, texts))), setting)
        if _same_rows(bench.target, bench.draft):
            bench.add_assisted(plan, DEFAULT, setting)
    labelled = bench.predictions.traced(setting)
    if "selector" in wanted and labelled:
        bench.add_statics(plan, config.selector.verifiers, setting)
        for own in selectors(config):
            bench.add_selector(plan, own, Selector.from_pretrained(folders["selector"] / "export" / own), setting)
    elif "selector" in wanted:
        bench.add_timed(plan, main, timed("static"), setting)
    if "rules" in wanted and labelled:
        bench.add_rules(plan, setting)
    if "baselines" in wanted and labelled:
        bench.add_baselines(plan, main, setting)
    if "tuned" in wanted and bench.draft:
        for family in FAMILIES:
            tried = candidates(bench, family, main, setting)
            if tried:
                file = f"tuned-{family.replace(' ', '-')}"
                best = once(file, "title", str, lambda tried=tried: tune(bench, tried, main, setting, texts))
                add_tuned(bench, plan, best, tried[best], main, setting)
    if "policies" in wanted:
        for own, options in config.evaluation.policies.items():
            policy, rule = make_policy(own, options), default_verifier(own, setting.temperature)
            bench.add_policy(plan, policy_title(own, options), policy, rule, setting, config.evaluation.draft_temperature)
    head = EagleDrafter.from_pretrained(folders["draft"] / "export", bench.target, bench.fixed) if "head" in wanted else None
    if head:
        bench.add_head(plan, head, timed("head", head), main, setting)
    ngram = config.evaluation.ngram
    if "ngram" in wanted:
        bench.add_ngram(plan, ngram, setting)
    if "mixed" in wanted and bench.draft:
        tree = bench.predictions.static(main, setting) if labelled else timed("static")
        bench.add_mixed(plan, ngram, None, tree, main, setting)
    if "mixed" in wanted and head:
        bench.add_mixed(plan, ngram, head, timed("head", head), main, setting)
    return plan


def policy_title(name: str, options: dict[str, Any]) -> str:
    """What a policy is called in tables: "SALF (nodes=32)"."""
    titles = {"salf": "SALF", "dynatree": "DynaTree", "dyspec": "DySpec", "gbv": "GBV"}
    title = titles.get(name, name.replace("_", " ").capitalize())
    given = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{title} ({given})" if given else title


def without_labels(config: Config) -> str:
    """What is left out, or chosen in another way, under settings that were not traced; empty where all were."""
    names = [name for name in config.evaluation.settings if name not in config.traces.settings]
    wanted = methods(config)
    said = [f"no {own}" for own in ("selector", "rules", "baselines") if own in wanted]
    said += [f"the static tree of {config.selector.verifiers[0]} chosen by timing"] if "selector" in wanted else []
    return f"{', '.join(names)} not traced, so {', '.join(said)} there" if names and said else ""


def report_data(config: Config, folders: dict[str, Path], records: list[Record], plans: dict[str, Plan]) -> ReportData:
    """What the report shows, from the records, the plans that were followed and the stages' files."""
    manifests = {name: read_json(folder / MANIFEST) for name, folder in folders.items() if name != "evaluate"}
    model, evaluation = config.model, config.evaluation
    used, passes = evaluation.threads or torch.get_num_threads(), f"{evaluation.passes} pass{'es' * (evaluation.passes > 1)}"
    measured = f"{evaluation.prompts} held-out prompts, {passes}, {evaluation.new_tokens} tokens each"
    drafted = "all methods draft with the run's draft head" if config.traces.drafter == "head" else ""
    tables, by_method = tabulate(records), by_setting(records)
    ablations = Path(config.paths.checkpoints) / config.run / "ablations" / "ablations.json"
    return ReportData(
        run=config.run,
        tables=tables,
        verdicts=verdicts(tables, conditions(model.device, model.dtype, used), records),
        measured="; ".join(filter(None, [measured, drafted, without_labels(config)])),
        learned={setting: sorted(plan.learned) for setting, plan in plans.items()},
        kinds=by_kind(records),
        versus=selectors_versus(records, selectors(config)),
        histograms=_each(by_method, histogram),
        spec_decode=_each(by_method, vllm_counters),
        latencies=_each(by_method, latencies),
        chosen={setting: own for setting, own in _each(by_method, steps_by_tree).items() if own},
        pair=manifests["pair"]["metrics"],
        offline=manifests["selector"]["metrics"] if "selector" in manifests else {},
        head=_head(manifests["draft"]) if "draft" in manifests else {},
        ablations=read_json(ablations) if ablations.exists() else {},
        curves=_curves(config, folders, plans.values()),
        stages={name: manifest["seconds"] for name, manifest in manifests.items()},
        environment=environment(model.device, model.dtype, used),
        **{name: {s: getattr(plan, name) for s, plan in plans.items()} for name in ("same", "exports", "predicted", "static")},
    )


def _each(methods: dict[str, dict[str, list[Record]]], figure) -> dict[str, dict[str, Any]]:
    """`figure` of every method's records that has one, by setting."""
    return {s: {name: found for name, own in by_name.items() if (found := figure(own))} for s, by_name in methods.items()}


def _curves(config: Config, folders: dict[str, Path], plans: Iterable[Plan]) -> dict[str, dict]:
    """Series of every training whose result is in use: a selector that only exported static trees has none."""
    choosing = [name for name in selectors(config) if any(selector_title(name) in plan.learned for plan in plans)]
    trainings = [("pair", "target"), ("pair", "draft"), *(("selector", name) for name in choosing), ("draft", "head")]
    curves = {name: read_curves(folders[stage] / "curves" / name) for stage, name in trainings if stage in folders}
    return {name: series for name, series in curves.items() if series}


def _head(manifest: dict) -> dict:
    """The head's held-out figures, after the precision it was trained with."""
    figures = dict(manifest["metrics"])
    return {"precision of training": figures.pop("trained_in", manifest["settings"]["draft"].get("precision")), **figures}


def _sample(data: ReportData, plans: dict[str, Plan], prompt: Prompt, seed: int, pair: Pair) -> dict[str, Any]:
    """The text that the fastest of our own speculative methods wrote after a prompt, under the first setting."""
    from transformers import AutoTokenizer

    setting, rows = next(iter(data.tables.items()))
    own = {name: method for name, method in plans[setting].methods.items() if isinstance(method, Speculative)}
    drafting = [row for row in rows if row.method in own and row.nodes > 1]
    if not drafting:
        return {}
    name = max(drafting, key=lambda row: row.speedup[0]).method
    tokenizer = AutoTokenizer.from_pretrained(pair.where("target"), trust_remote_code=False)
    blocks = list(own[name].blocks(prompt.tokens, seed))
    return {
        "method": name,
        "setting": setting,
        "prompt": prompt.id,
        "kind": prompt.kind,
        "tokens": sum(len(block.tokens) for block in blocks),
        "accepted": sum(block.accepted for block in blocks),
        "pieces": coloured(tokenizer, prompt.tokens, blocks),
    }


def _track(tracker: Tracker, data: ReportData) -> None:
    rows = [
        {
            "setting": setting,
            "method": row.method,
            "block efficiency": row.block_efficiency[0],
            "tokens/s": row.tokens_per_second,
            **dict(zip(("speedup", "low", "high"), row.speedup, strict=True)),
            "speedup in CPU time": row.cpu_speedup[0] if row.cpu_speedup else None,
            "tree nodes": row.nodes,
            "clock": data.verdicts[setting].clock,
        }
        for setting, table in data.tables.items()
        for row in table
    ]
    tracker.table("methods", list(rows[0]), [list(row.values()) for row in rows])
    tracker.log({f"{row['setting']}/{row['method']}": row["speedup"] for row in rows})


def _same_rows(target: CausalModel, draft: CausalModel | None) -> bool:
    return isinstance(draft, CausalModel) and target.config.vocab_size == draft.config.vocab_size


def methods(config: Config) -> set[str]:
    """What is compared with plain decoding: of what is asked for, what there is without a draft model where there is none. Then
    n-grams are mixed with the head alone."""
    wanted = {*config.evaluation.methods}
    if config.traces.drafter == "head":
        return wanted - {"assisted", "head"}  # all methods draft with the head
    mixed = {"mixed"} if "head" in wanted else set()
    return wanted if config.model.has_draft else wanted & {*WITHOUT_DRAFT, *mixed}


def needs(config: Config) -> tuple[str, ...]:
    of_draft = ("latency", "traces", "selector") if config.drafts else ()
    with_head = "head" in methods(config) or config.traces.drafter == "head"
    return ("pair", *of_draft, *(("draft",) if with_head else ()))


STAGE = Stage("evaluate", "report", needs, settings, work, show=show)
