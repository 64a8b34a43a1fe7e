"""The parts of an evaluation's methods: models, labels, prices, selectors and policies of a run."""

import warnings
from collections.abc import Iterator
from pathlib import Path

from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.errors import Advice
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.static_shapes import StaticShapes
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.sampling.sampling_setting import read_draft_temperature
from nde_talf.evaluation.bench import NGRAM, Bench
from nde_talf.evaluation.static_trees import StaticTrees
from nde_talf.evaluation.tuning import Tuner
from nde_talf.pipelines.config.policies import default_verifier, make_policy
from nde_talf.pipelines.config.schema import TABLE, Config, EvaluationConfig
from nde_talf.pipelines.runs.run_models import load_head_draft
from nde_talf.pipelines.stages.selector import roots_of
from nde_talf.selector.network import Selector
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.roots import Roots

TITLES = {"salf": "SALF", "dynatree": "DynaTree", "dyspec": "DySpec", "gbv": "GBV"}


def benches(
    config: Config,
    folders: dict[str, Path],
    models: tuple[CausalModel, CausalModel | None],
    tuning: list[Prompt],
    fixed: StaticShapes | None,
) -> dict[str, Bench]:
    """Make the parts of the methods of every sampling setting, by the setting's name."""
    evaluation, groups, (target, draft) = config.evaluation, config.method_groups, models
    texts = [prompt.tokens for prompt in tuning]
    drawn = read_draft_temperature(evaluation.draft_temperature)
    roots, table = _labels_and_prices(folders, config.traces.verifiers) if draft else (None, None)
    head = None
    if config.drafter != "head" and "head" in groups:
        head = load_head_draft(folders["draft"] / "export", target).drafter(fixed)
    parts_by_setting = {}
    for title in evaluation.settings:
        setting = SETTINGS[title]
        tuned = folders["evaluate"] / f"tuned-{title}.json"
        bench = parts_by_setting[title] = Bench(
            target=target,
            draft=draft,
            setting=setting,
            tune=Tuner(tuned, evaluation.new_tokens, texts),
            labels=StaticTrees.of(roots, table, setting),
            draft_setting=drawn,
            fixed=fixed,
            rules=config.selector.verifiers,
            ngrams={NGRAM: evaluation.ngram},
            head=head,
            kinds=[prompt.kind for prompt in tuning],
        )
        if "selector" in groups and bench.labels:
            names = config.selector.verifiers if setting.temperature else [bench.main]
            exports = folders["selector"] / "export"
            bench.selectors = {name: Selector.from_pretrained(exports / name) for name in names}
        if "policies" in groups:
            bench.policies = dict(_policies(evaluation, setting.temperature))
    return parts_by_setting


def _labels_and_prices(folders: dict[str, Path], rules: list[str]) -> tuple[Roots, LatencyTable]:
    """Load the roots to learn from and the latency table, by which static trees are chosen."""
    with warnings.catch_warnings(action="ignore", category=Advice):  # stage selector gave it
        roots, _ = roots_of(folders["traces"], rules)
    return roots, LatencyTable.load(folders["latency"] / TABLE)


def _policies(
    evaluation: EvaluationConfig, temperature: float
) -> Iterator[tuple[str, tuple[TreePolicy, str]]]:
    """List the policies by their titles in tables, such as "SALF (nodes=32)", with their rules."""
    for name, options in evaluation.policies.items():
        title = TITLES.get(name, name.replace("_", " ").capitalize())
        if options:
            title += f" ({', '.join(f'{key}={value}' for key, value in options.items())})"
        yield title, (make_policy(name, options), default_verifier(name, temperature))
