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
    evaluation, wanted, (target, draft) = config.evaluation, methods(config), models
    texts = [prompt.tokens for prompt in tuning]
    roots = None
    if draft:
        run = Path(config.paths.checkpoints) / config.run
        roots = roots_of(folders["traces"], config.traces.verifiers, run, lambda text: None)[0]
    table = LatencyTable.load(folders["latency"] / TABLE) if draft else None
    head = None
    if "head" in wanted:
        head = load_head_draft(folders["draft"] / "export", target).drafter(fixed)
    parts_by_setting = {}
    for name in evaluation.settings:
        setting = SETTINGS[name]
        bench = parts_by_setting[name] = Bench(
            target,
            draft,
            setting,
            Tuner(folders["evaluate"] / f"tuned-{name}.json", evaluation.new_tokens, texts),
            StaticTrees.of(roots, table, setting),
            draft_setting,
            evaluation.draft_temperature,
            fixed,
            "tuned" in wanted and draft is not None,
            config.selector.verifiers,
            ngram=evaluation.ngram,
            head=head,
            kinds=[prompt.kind for prompt in tuning],
        )
        if "selector" in wanted and bench.labels:
            bench.selectors = {
                own: Selector.from_pretrained(folders["selector"] / "export" / own)
                for own in selectors(config)
                if setting.temperature or own == bench.main
            }
        if "policies" in wanted:
            bench.policies = {
                policy_title(own, options): (
                    make_policy(own, options),
                    default_verifier(own, setting.temperature),
                )
                for own, options in evaluation.policies.items()
            }
    return parts_by_setting


def policy_title(name: str, options: dict[str, Any]) -> str:
    """The name of a policy in tables: "SALF (nodes=32)"."""
    titles = {"salf": "SALF", "dynatree": "DynaTree", "dyspec": "DySpec", "gbv": "GBV"}
    title = titles.get(name, name.replace("_", " ").capitalize())
    given = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{title} ({given})" if given else title


def without_labels(config: Config) -> str:
    """Note the settings that were not traced, and the methods left out or chosen in another way.

    Empty where all were traced.
    """
    names = [name for name in config.evaluation.settings if name not in config.traces.settings]
    asked = methods(config)
    missing = [f"no {group}" for group in ("selector", "rules", "baselines") if group in asked]
    missing += (
        [f"the static tree of {config.selector.verifiers[0]} chosen by timing"]
        if "selector" in asked
        else []
    )
    return (
        f"{', '.join(names)} not traced, so {', '.join(missing)} there" if names and missing else ""
    )


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
