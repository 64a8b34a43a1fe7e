"""The whole configuration as dataclasses: Hydra composes the YAML groups of `configs/` into it, so that an unknown key
or a value of the wrong type is an error before any work starts."""

import math
from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from data.dialogues.settings import DialogueConfig
from data.text.settings import Corpus, PromptSet
from data.traces.settings import EngineConfig, TracesConfig
from draft_training.lm_settings import LanguageModelConfig
from draft_training.settings import HeadConfig
from selector.settings import SelectorConfig

STAGES = ("pair", "latency", "traces", "selector", "draft", "evaluate")
ASKED_FOR = ("ablations",)  # stages that stage=all leaves out

METHODS = ("rules", "selector", "rivals", "head", "assisted")


@dataclass
class PathsConfig:
    """checkpoints: the folder that holds the runs."""

    checkpoints: str = "checkpoints"


@dataclass
class ModelConfig:
    """The pair. target, draft: folders or hub names of causal LMs with one tokenizer; null trains a small pair from
    `data.source`. device: of all inference. dtype: of the pair's figures, the latency table and the evaluation (traces have
    traces.dtype). static_shapes: of passes in the latency table and the evaluation, see docs/decoding.md. verify: compare all
    bytes of your own models with those that the pair was made of, before every stage. threads: of CPU training and tracing; 0
    leaves torch's own."""

    target: str | None = None
    draft: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    static_shapes: bool = False
    verify: bool = False
    threads: int = 0
    vocab_size: int = 2048
    length: int = 256
    target_lm: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    draft_lm: LanguageModelConfig = field(default_factory=LanguageModelConfig)


@dataclass
class DataConfig:
    """Text and prompts. source: "stdlib", a .txt, .jsonl or .parquet file, or a hub dataset; column, split: where its text
    is. mix: several corpora in its place, by domain. held_out: share of documents that prompts and held-out figures come
    from. sets: ready-made prompts (configs/data/); without any, prompts are cut from the held-out documents. prompt_count:
    how many in all; test_share of them is kept for the evaluation, the rest is for traces. prompt_tokens: shortest and
    longest prompt cut."""

    source: str = "stdlib"
    column: str = "text"
    split: str = "train"
    mix: dict[str, Corpus] = field(default_factory=dict)
    held_out: float = 0.12
    sets: dict[str, PromptSet] = field(default_factory=dict)
    prompt_count: int = 120
    test_share: float = 1 / 3
    prompt_tokens: list[int] = field(default_factory=lambda: [32, 96])


def test_prompts(data: DataConfig) -> int:
    """How many prompts are kept for the evaluation."""
    return math.ceil(data.prompt_count * data.test_share - 1e-9)


@dataclass
class LatencyConfig:
    """The warm-up run. contexts: lengths at which passes are timed; the longest of the prompts with what is written behind it
    is added. repeats: of which the median counts."""

    contexts: list[int] = field(default_factory=lambda: [64, 256])
    repeats: int = 9


@dataclass
class EvaluationConfig:
    """The benchmark; evaluation.protocol says how it measures. methods: of "selector" (the selectors, and the best static trees
    of their verifiers), "head" (the TALF head), "assisted" (transformers' own), "rules" (every traced verifier under its best
    static tree), "rivals" (cheap rules that choose trees); plain decoding and its A/A control are always there. settings: names
    of traced sampling settings. prompts: held-out prompts, none of which was traced. passes: over these prompts, each with
    seeds of its own. new_tokens: for each. calibration_prompts: prompts (of the traces' validation split) on which the head's
    static action and the schedule of transformers' assisted generation are chosen. threads: of the CPU while timing, 0 leaves
    torch's own. seed: of the draws, added to the run's."""

    methods: list[str] = field(default_factory=lambda: ["selector", "head", "assisted"])
    settings: list[str] = field(default_factory=lambda: ["t0.6", "t1.0"])
    prompts: int = 14
    passes: int = 1
    new_tokens: int = 64
    calibration_prompts: int = 3
    threads: int = 1
    seed: int = 0


@dataclass
class TrackingConfig:
    """Weights & Biases. mode: online, offline or disabled."""

    mode: str = "offline"
    project: str = "nde-talf"


@dataclass
class RayConfig:
    """address: of a running Ray cluster ("auto", "ray://host:port"); null starts one on this machine when it is needed."""

    address: str | None = None


@dataclass
class Config:
    """run: name of the run's folder. stage: all, or one of pair, latency, traces, selector, draft, evaluate, ablations. force:
    redo a finished stage. verify: with stage=traces, only check what is there. base: another run whose finished stages are used
    where this run asks for the same."""

    run: str = "default"
    stage: str = "all"
    force: bool = False
    verify: bool = False
    base: str | None = None
    seed: int = 0
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


def register() -> None:
    """Make the schema known to Hydra as `schema`."""
    schema = OmegaConf.structured(Config)
    schema.draft = OmegaConf.structured(HeadConfig)  # not an instance, whose draft.loss is one of its dataclasses already
    ConfigStore.instance().store(name="schema", node=schema)
