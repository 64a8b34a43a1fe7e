"""The configuration as what the benchmark's methods are made of."""

from pathlib import Path
from typing import Any

from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.setting import SamplingSetting
from nde_talf.decoding.static import StaticShapes
from nde_talf.evaluation.methods import Bench
from nde_talf.evaluation.static_trees import StaticTrees
from nde_talf.evaluation.tuning import Tuner
from nde_talf.pipelines.config import TABLE, WITHOUT_DRAFT, Config
from nde_talf.pipelines.drafted import load_head_draft
from nde_talf.pipelines.policy_table import default_verifier, make_policy
from nde_talf.pipelines.selector import roots_of, selectors
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.network import Selector


def benches(
    config: Config,
    folders: dict[str, Path],
    models: tuple[CausalModel, CausalModel | None],
    tuning: list[Prompt],
    draft_setting: SamplingSetting | str,
    fixed: StaticShapes | None,
) -> dict[str, Bench]:
    """Make the parts of the methods of every sampling setting, by the setting's name."""
    evaluation, groups, (target, draft) = config.evaluation, methods(config), models
    texts = [prompt.tokens for prompt in tuning]
    roots, table, head = None, None, None
    if draft:
        run = Path(config.paths.checkpoints) / config.run
        roots = roots_of(folders["traces"], config.traces.verifiers, run, lambda text: None)[0]
        table = LatencyTable.load(folders["latency"] / TABLE)
    if "head" in groups:
        head = load_head_draft(folders["draft"] / "export", target).drafter(fixed)
    parts_by_setting = {}
    for title in evaluation.settings:
        setting = SETTINGS[title]
        bench = parts_by_setting[title] = Bench(
            target,
            draft,
            setting,
            Tuner(folders["evaluate"] / f"tuned-{title}.json", evaluation.new_tokens, texts),
            StaticTrees.of(roots, table, setting),
            draft_setting,
            evaluation.draft_temperature,
            fixed,
            "tuned" in groups and draft is not None,
            config.selector.verifiers,
            ngram=evaluation.ngram,
            head=head,
            kinds=[prompt.kind for prompt in tuning],
        )
        if "selector" in groups and bench.labels:
            names = selectors(config.selector) if setting.temperature else [bench.main]
            exports = folders["selector"] / "export"
            bench.selectors = {name: Selector.from_pretrained(exports / name) for name in names}
        if "policies" in groups:
            bench.policies = {
                policy_title(name, options): (
                    make_policy(name, options),
                    default_verifier(name, setting.temperature),
                )
                for name, options in evaluation.policies.items()
            }
    return parts_by_setting


def policy_title(name: str, options: dict[str, Any]) -> str:
    """The name of a policy in tables: "SALF (nodes=32)"."""
    titles = {"salf": "SALF", "dynatree": "DynaTree", "dyspec": "DySpec", "gbv": "GBV"}
    title = titles.get(name, name.replace("_", " ").capitalize())
    given = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{title} ({given})" if given else title


def without_labels(config: Config) -> str:
    """Note what greedy decoding lacks where it was not traced; empty where all were traced."""
    names = {*config.evaluation.settings} - {*config.traces.settings}
    groups = methods(config)
    missing = [f"no {group}" for group in ("selector", "rules", "baselines") if group in groups]
    if "selector" in groups:
        missing.append(f"the static tree of {config.selector.verifiers[0]} chosen by timing")
    return f"{', '.join(names)} not traced, so {', '.join(missing)} there" * bool(names and missing)


def methods(config: Config) -> set[str]:
    """Return the groups of methods that are compared with plain decoding.

    They are those asked for. Without a draft model they are those of them that need none, and
    n-grams are mixed with the head alone.
    """
    groups = {*config.evaluation.methods}
    if config.traces.drafter == "head":
        return groups - {"assisted", "head"}  # all methods draft with the head
    mixed = {"mixed"} if "head" in groups else set()
    return groups if config.model.has_draft else groups & {*WITHOUT_DRAFT, *mixed}
