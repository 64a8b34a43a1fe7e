"""The decoder of a run: its models, policy, rule and drafter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nde_talf.data.text.shipped import SMALL
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.drafters.lm import LMDrafter
from nde_talf.decoding.drafters.ngram import NgramDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.recorded_step import SHAPES
from nde_talf.decoding.registry import POLICIES, VERIFIERS
from nde_talf.decoding.verifier import Verifier, check_compatible
from nde_talf.evaluation.protocol import GREEDY_TREE, HEAD_TREE
from nde_talf.evaluation.static_trees import picked
from nde_talf.pipelines.commands.generate import DecodingConfig, GenerateConfig
from nde_talf.pipelines.config.policies import default_verifier, make_policy
from nde_talf.pipelines.config.schema import TABLE
from nde_talf.pipelines.runs.finished import Run
from nde_talf.pipelines.runs.run_models import load_head_draft, pair_of
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy
from nde_talf.selector.prices import LatencyTable


def open_run(
    run: str = SMALL, **settings: Any
) -> tuple[SpeculativeDecoder, PreTrainedTokenizerBase]:
    """Return the decoder of the shipped pair, or of a finished run, and the target's tokenizer.

    Args:
        run: "small", or the name of a run.
        settings: other keys of `nde generate`, such as drafter="head" or policy="dyspec".

    Raises:
        UserError: there is no such run, or it lacks what is asked for.
    """
    config = GenerateConfig(run=run, **settings)
    finished = Run(config.run, config.paths.checkpoints)
    tokenizer = load_tokenizer(pair_of(finished).where("target"))
    return make_decoder(config, finished), tokenizer


def make_decoder(config: DecodingConfig, run: Run, fixed: int = 0) -> SpeculativeDecoder:
    """Load what the configuration asks for: models, policy, rule and drafter.

    fixed: tokens of the longest text, for passes of fixed shapes; 0: shapes are dynamic.

    Raises:
        UserError: the run has none of these, or they do not go together.
    """
    pair, placed, export = pair_of(run), config.model.placed, run.stage("draft") / "export"
    first = "head" if export.is_dir() else "ngram"
    if run.shipped and first == "ngram" and config.drafter is None:
        console.print(f"! no head ships in {export}: n-grams draft")
    asked = config.drafter or ("lm" if pair.has_draft else first)
    config = replace(config, drafter=asked)
    policy, rule = choose_policy(config, run)
    kind = None if policy.trees == "none" else asked
    _check_drafter(kind, config, policy, pair.has_draft, export)
    drafter: Drafter | None = None
    static = SHAPES[config.model.graphs](fixed) if fixed else None
    console.quiet = True  # the text is all that is printed before the figures
    try:
        if kind == "lm":
            target, draft = pair.models(*placed)
            drafter = LMDrafter(draft, static)
        else:
            target = pair.target(*placed)
    finally:
        console.quiet = False
    if kind == "head":
        drafter = load_head_draft(export, target, any_weights=run.shipped).drafter(static)
    if kind == "ngram":
        drafter = NgramDrafter(target.vocab_size, config.ngram)
    return SpeculativeDecoder(target, drafter, policy, rule, config.draft_temperature, static)


def choose_policy(config: DecodingConfig, run: Run) -> tuple[TreePolicy, Verifier]:
    """Return the policy asked for, and its verifier. Raises UserError for options it lacks."""
    policy, rule = _policy_and_rule(config, run)
    rule = VERIFIERS[config.verifier] if config.verifier else rule
    check_compatible(policy.trees, rule)  # before models are loaded
    return policy, rule


def _policy_and_rule(config: DecodingConfig, run: Run) -> tuple[TreePolicy, Verifier]:
    """Return the policy, and the rule that goes with it."""
    name: Any = config.policy
    selectors = run.selectors()
    # A run may have a selector for the verifier gbv, which is a policy's name too.
    if name in POLICIES and name not in selectors:
        rule = VERIFIERS[default_verifier(name, config.temperature)]
        return make_policy(name, config.options), rule
    if config.options:
        raise UserError(
            "options: they are those of a policy, such as policy=salf. A selector takes none, and"
            " those of drafter=ngram are the keys of ngram, such as ngram.nodes=8."
        )
    if not name and (chosen := _without_selector(config, run, selectors)):
        return chosen
    selector = Selector.from_pretrained(run.stage("selector") / "export" / (name or selectors[0]))
    table = selector.table or LatencyTable.load(run.stage("latency") / TABLE)
    policy = NeuralPolicy(selector, table)
    return policy, policy.verifier


def _without_selector(
    config: DecodingConfig, run: Run, selectors: list[str]
) -> tuple[TreePolicy, Verifier] | None:
    """Return policy and rule where none are named; None where the run has a selector for them.

    Beside a draft model the selectors choose its trees, and not the head's.
    """
    head = config.drafter == "head"
    if config.drafter == "ngram":
        return NgramTree(config.ngram), VERIFIERS["nss" if config.temperature else "greedy"]
    if not config.temperature:
        tuned = run.tuned("t0").get(HEAD_TREE if head else GREEDY_TREE)
        return picked(tuned), VERIFIERS["greedy"]
    if not selectors or (head and pair_of(run).has_draft):
        return Delayed(run.head_action(config.temperature)), VERIFIERS["traversal"]
    return None


def _check_drafter(
    kind: str | None, config: DecodingConfig, policy: TreePolicy, has_draft: bool, export: Path
) -> None:
    """Raise UserError where a run cannot draft as it is asked to."""
    if kind == "lm" and not has_draft:
        raise UserError(
            "drafter=lm: this run has no draft model. Use drafter=head, drafter=ngram, or"
            " policy=autoregressive."
        )
    if kind == "head" and not export.is_dir():
        raise UserError(
            f"drafter=head: {export} is not there; train a head with stage=draft, or use"
            f" drafter={'lm' if has_draft else 'ngram'}."
        )
    if kind == "ngram" and not isinstance(policy, NgramTree):
        raise UserError(
            f"policy={config.policy} with drafter=ngram: tokens of the text are picked, not drawn."
            " Leave policy out, or use drafter=lm."
        )


def plain_of(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """Return the autoregressive decoder of the same target."""
    return SpeculativeDecoder(
        decoder.target, None, Autoregressive(), "naive", static=decoder.static
    )
