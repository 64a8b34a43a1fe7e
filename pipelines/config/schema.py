"""The configuration of a run: every key, its type, its default and what it means.

Hydra composes the YAML files of `configs/`, and pydantic makes these classes of them, so that an
unknown key or a wrong value is an error before any work starts. Each class checks its own values;
what depends on several of them is in `nde_talf.pipelines.config.checks`. Imports no torch.
"""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf
from pydantic import Field

from nde_talf.data.dialogues.settings import DialogueConfig
from nde_talf.data.engines.settings import EngineConfig
from nde_talf.data.text.settings import SELF, DataConfig
from nde_talf.data.text.shipped import SHIPPED, is_shipped, shipped, smollm2
from nde_talf.data.traces.settings import Settings, TracesConfig
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import (
    Count,
    Device,
    Distinct,
    Few,
    Folder,
    Place,
    Seed,
    Text,
    Threads,
    Tokens,
    one_of,
    settings,
)
from nde_talf.decoding.drafters.ngram_settings import NgramConfig
from nde_talf.decoding.names import DTYPES, GRAPHS, PRODUCTS
from nde_talf.decoding.registry import FORWARDS, POLICIES
from nde_talf.decoding.sampling.sampling_setting import read_draft_temperature
from nde_talf.draft_training.training_settings import HeadConfig, LanguageModelConfig
from nde_talf.pipelines.runs.finished import check_name
from nde_talf.selector.selector_settings import SelectorConfig

STAGES = ("pair", "latency", "traces", "selector", "draft", "evaluate")
OF_DRAFTER = ("latency", "traces", "selector")
"""Stages that need something that drafts: the draft model or the head."""
METHODS = ("rules", "selector", "baselines", "head", "assisted", "policies", "ngram")
WITHOUT_DRAFT = ("head", "ngram")
"""Groups of methods that need no draft model."""

MOST_PROMPTS = 40
TABLE = "table.json"
"""The file of a run's own latency table, in the folder of stage latency."""
MEASURED = "measured"
PASSES = ("device", "device_map", "forward", "products", "static_shapes", "graphs")
"""Keys of `model` that decide how passes run, and not what they compute."""
PROFILES = Path(__file__).resolve().parents[2] / "configs" / "latency"


@settings("paths")
class PathsConfig:
    """Folders."""

    checkpoints: Folder = "checkpoints"
    """Folder that holds the runs, each in a folder of its own."""


@settings("model")
class LoadingConfig:
    """Loading and running of models."""

    device: Device = "cpu"
    """cpu, cuda or cuda:N."""
    device_map: Annotated[str, one_of(("auto",))] | None = None
    """auto: lay the target over all GPUs, layer by layer; null: on model.device alone."""
    dtype: Annotated[str, one_of(DTYPES)] = "float32"
    """Type of the models, in a run in every stage but traces (traces.dtype): float32, bfloat16,
    float16 or float64.
    """
    draft_dtype: Annotated[str, one_of(("auto", *DTYPES))] = "auto"
    """Type of the draft in every stage but traces. auto: model.dtype, but bfloat16 beside a float32
    target where the machine multiplies it itself. The law of the text is the same with any.
    """
    forward: Annotated[str, one_of(FORWARDS)] = "auto"
    """Whose forward passes run: native, transformers, or auto, native where possible
    (docs/models.md).
    """
    products: Annotated[str, one_of(PRODUCTS)] = "auto"
    """Way of multiplying large matrices on a CPU: plain (torch's way), onednn, packed, one of these
    for two rows and more (packed-many), or auto, the fastest by timing (docs/models.md).
    """
    static_shapes: bool = False
    """Passes of fixed shapes where text is decoded, as CUDA graphs need them (docs/decoding.md)."""
    graphs: Annotated[str, one_of(GRAPHS)] = "compiled"
    """Way of making CUDA graphs of these passes: compiled by torch, or recorded as they run, with
    whole steps of delayed trees, which no GPU has done yet.
    """
    threads: Threads = 0
    """CPU threads of training and tracing; 0: torch's own choice."""

    def __post_init__(self) -> None:
        if self.device_map and self.static_shapes:
            raise UserError(
                "model.static_shapes=true: a captured pass runs on one GPU, and model.device_map"
                " lays the target over several. Leave one of them out."
            )

    @property
    def placed(self) -> tuple[str, str, str | None, str, str, str]:
        """Arguments of `Pair.models`."""
        passes = self.device_map, self.forward, self.products
        return self.device, self.dtype, *passes, self.draft_dtype


@settings("model")
class ModelConfig(LoadingConfig):
    """The pair: a target and a draft with one tokenizer.

    A target alone is decoded with a draft head.
    """

    target: Place | None = None
    """Folder, GGUF file or hub name of the target; null: a small pair is trained."""
    draft: Place | None = None
    """Folder, GGUF file or hub name of the draft; null beside a target: the draft head takes its
    place.
    """
    vocab_size: Annotated[int, Field(ge=257, le=10_000_000)] = 2048
    """Tokens of the tokenizer that is trained here."""
    length: Annotated[int, Field(ge=2, le=10_000_000)] = 256
    """Tokens in a row of text."""
    target_lm: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    """The target that is trained here."""
    draft_lm: LanguageModelConfig = field(
        default_factory=lambda: LanguageModelConfig(layers=1, intermediate=384, steps=1500)
    )
    """The draft that is distilled here from the target."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft and not self.target:
            raise UserError(
                "model.draft is given and model.target is not: give both, or neither to train a"
                " small pair."
            )

    @property
    def given(self) -> dict[str, str]:
        """Folders or hub names of the user's models, by role."""
        named = {"target": self.target, "draft": self.draft}
        return {role: name for role, name in named.items() if name}

    @property
    def trained(self) -> dict[str, LanguageModelConfig]:
        """Models that are trained here, by role."""
        return {} if self.target else {"target": self.target_lm, "draft": self.draft_lm}

    @property
    def has_draft(self) -> bool:
        """True if there is a draft model: the user's, or one that is trained here."""
        return not self.target or self.draft is not None


@settings("latency")
class LatencyConfig:
    """Profiling: what a step costs with this pair on this machine."""

    contexts: Annotated[list[Tokens], Field(min_length=1, max_length=100), Distinct] = field(
        default_factory=lambda: [64, 256]
    )
    """Context lengths to time passes at; the longest prompt with its new tokens is added."""
    repeats: Few = 9
    """Rounds in a batch of measurements.

    Two batches have to agree; up to five are run until two do.
    """
    accept_noise: bool | None = None
    """Take a table whose repeats disagree by more than 10 %, as on a machine under load.

    Prices then hold noise that a selector learns. null: only for a pair that the run trains itself,
    with a warning.
    """

    def accepts_noise(self, trained_here: bool) -> bool:
        """Return True if a table of a pair that was measured under load is accepted."""
        return trained_here if self.accept_noise is None else self.accept_noise


@settings("evaluation")
class EvaluationConfig:
    """Settings of the benchmark: every method decodes held-out prompts, interleaved.

    evaluation/protocol.py says how times are taken.
    """

    methods: Annotated[list[Annotated[str, one_of(METHODS)]], Distinct] = field(
        default_factory=lambda: ["selector", "head", "assisted", "ngram"]
    )
    """Any of selector, head, assisted (transformers' own), rules (every traced rule), baselines
    (cheap rules that choose trees), policies (`evaluation.policies`), ngram (drafting from the text
    itself).
    """
    settings: Settings = field(default_factory=lambda: ["t0.6", "t1.0"])
    """Names of traced sampling settings (traces.settings); t0, greedy decoding, need not be traced.
    """
    policies: dict[Annotated[str, one_of(tuple(POLICIES.table))], dict[str, Any]] = field(
        default_factory=lambda: {
            name: {} for name in ("beam", "salf", "dynatree", "dyspec", "sequoia")
        }
    )
    """For methods=[policies]: tree policies that need no training, each with its options, such as
    evaluation.policies.salf.nodes=32.
    """
    ngram: NgramConfig = field(default_factory=NgramConfig)
    """For ngram: what is looked up in the text, and how much of it is drafted."""
    draft_temperature: Text = "auto"
    """Warp of the draft: match, raw or a temperature (docs/decoding.md); auto: what fits a policy's
    trees, and match where trees are chosen by labels.
    """
    prompts: Count | None = 14
    """Number of held-out prompts, none of which was traced.

    null: 40, or what decodes in about three minutes where the machine is slow.
    """
    new_tokens: Annotated[int, Field(ge=2, le=10_000_000)] = 64
    """Tokens to generate after each prompt, at most: a text ends where the target ends it."""
    calibration_prompts: Count = 3
    """Traced validation prompts on which all that is chosen by timing is chosen: the head's tree,
    transformers' schedules, what is tuned.
    """
    threads: Threads = 1
    """CPU threads while timing; 0: torch's own choice."""

    def __post_init__(self) -> None:
        read_draft_temperature(self.draft_temperature, "evaluation.draft_temperature")

    @property
    def most_prompts(self) -> int:
        """Held-out prompts that may be decoded."""
        return self.prompts or MOST_PROMPTS


@settings("tracking")
class TrackingConfig:
    """Weights & Biases."""

    mode: Annotated[str, one_of(("online", "offline", "disabled"))] = "offline"
    """online, offline or disabled."""
    project: Text = "nde-talf"
    """Name of the W&B project."""
    samples: bool = True
    """false: record no text and no path (SECURITY.md)."""


@settings("ray")
class RayConfig:
    """The Ray cluster of engine.workers."""

    address: Text | None = None
    """Address of a running cluster ("auto", "ray://host:port"); null: start one on this machine
    when it is needed.
    """


@settings()
class Config:
    """A run."""

    run: Text = "default"
    """Name of the run, which is its folder under paths.checkpoints."""
    stage: Annotated[str, one_of(("all", *STAGES))] = "all"
    """all, pair, latency, traces, selector, draft or evaluate."""
    force: bool = False
    """Redo a finished stage."""
    dry_run: bool = False
    """Print what the run would need (memory, disk, stages) and stop."""
    base: Text | None = None
    """Another run, whose finished stages are used where they are the same."""
    seed: Seed = 0
    """Seed of the prompts, the split of the text and the decoding."""
    paths: PathsConfig = field(default_factory=PathsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)
    selector: SelectorConfig = field(default_factory=SelectorConfig)
    draft: HeadConfig = field(default_factory=HeadConfig)
    dialogues: DialogueConfig = field(default_factory=DialogueConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def drafter(self) -> str:
        """Who drafts the trees that are traced: traces.drafter, or what there is.

        No head is trained beside a target on several devices.
        """
        head = "nobody" if self.model.device_map else "head"
        return self.traces.drafter or ("lm" if self.model.has_draft else head)

    @property
    def method_groups(self) -> set[str]:
        """Groups of methods that are compared with plain decoding.

        Example: of selector, assisted and ngram, a run whose head drafts compares selector and
        ngram.
        """
        groups = {*self.evaluation.methods}
        if self.drafter == "nobody":
            return groups & {*WITHOUT_DRAFT}
        return groups - {"assisted"} if self.drafter == "head" else groups

    @property
    def chats(self) -> bool:
        """True if a head learns from dialogues, its own or the target's with itself."""
        return self.data.source == SELF or self.dialogues.source is not None

    @property
    def head_length(self) -> int:
        """Tokens in a row that a head learns from."""
        return self.dialogues.length if self.chats else self.model.length

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that are asked for, in order. The head is first where others need it."""
        if self.stage != "all":
            return (self.stage,)
        if self.drafter != "head":
            return STAGES
        first = ("pair", "draft")
        return first + tuple(name for name in STAGES if name not in first)

    def __post_init__(self) -> None:
        check_name("run", self.run)
        check_name("base", self.base)
        if self.base == self.run:
            raise UserError(
                f"base={self.base} is this run itself: name another run, or leave base out."
            )


def table_file(name: str, latency: Path) -> Path:
    """Return the file of a latency table.

    `name` is "measured" (in the folder `latency`), a profile of configs/latency, or a .json file.

    Raises:
        UserError: there is no such table.
    """
    if name == MEASURED:
        return latency / TABLE
    path = PROFILES / f"{name}.json" if not name.endswith(".json") else Path(name)
    if not path.is_file():
        known = ", ".join([MEASURED, *sorted(p.stem for p in PROFILES.glob("*.json"))])
        raise UserError(
            f"selector.table: there is no latency table {name!r}; choose from {known}, or give a"
            " .json file."
        )
    return path


# For configs/model/small.yaml and smollm2.yaml, and configs/draft/shipped.yaml.
OmegaConf.register_new_resolver("smollm2", smollm2, replace=True)
OmegaConf.register_new_resolver("shipped", shipped, replace=True)
OmegaConf.register_new_resolver(
    "with_shipped", lambda target, yes, no: yes if is_shipped(target) else no, replace=True
)


def _by_drafter(lm: Any, head: Any, _root_: Any) -> Any:
    """Return the value for the one that drafts the traced trees, see `Config.drafter`."""
    model, drafter = _root_.model, _root_.traces.drafter
    alone = model.target is not None and model.draft is None
    return head if (drafter or ("head" if alone else "lm")) == "head" else lm


# For configs/traces/text.yaml and configs/selector/text.yaml.
OmegaConf.register_new_resolver("by_drafter", _by_drafter, replace=True)
OmegaConf.register_new_resolver("shipped_head", lambda: str(SHIPPED / "draft/export"), replace=True)
