"""Stream a text from a finished run: `python -m pipelines.generate run=NAME prompt="..."`. Accepted drafts and the target's own
tokens are coloured differently; a line of statistics follows."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.quiet import quiet  # isort: skip (before torch)

import hydra
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.text import Text

from data.pair import Pair
from data.progress import console
from decoding.drafter import Drafter, LMDrafter
from decoding.errors import UserError
from decoding.loop import Generation, SpeculativeDecoder
from decoding.model import CausalModel
from decoding.policies.base import TreePolicy
from decoding.policies.beam import Beam
from decoding.policies.dynatree import DynaTree
from decoding.policies.dyspec import DySpec, DySpecThreshold
from decoding.policies.salf import Optimal, Salf
from decoding.sampling import Coins, SamplingSetting
from decoding.static import MARGIN, StaticShapes
from decoding.verification import VERIFIERS, Verifier, verifier
from draft_training.drafter import EagleDrafter
from pipelines.cli import fail
from pipelines.latency import TABLE
from pipelines.threads import threads
from selector.latency import LatencyTable
from selector.policy import NeuralPolicy
from selector.selector import Selector

# Policies that need no training, and a verifier that is lossless on their trees.
PLAIN = {
    "beam": (Beam, "nss"),
    "optimal": (Optimal, "nss"),
    "salf": (Salf, "nss"),
    "dynatree": (DynaTree, "nss"),
    "dyspec": (DySpec, "without_replacement"),
    "dyspec_threshold": (DySpecThreshold, "without_replacement"),
}


@dataclass
class GenerateConfig:
    """run: whose models, selector and head are used. drafter: lm or head. policy: the name of an exported selector
    ("traversal", "specinfer", "across"), or one of PLAIN. verifier: null takes the policy's own. static_shapes: of all passes,
    see docs/decoding.md. threads: of the CPU, 0 leaves torch's own."""

    prompt: str = MISSING
    run: str = "default"
    drafter: str = "lm"
    policy: str = "traversal"
    verifier: str | None = None
    temperature: float = 0.6
    top_p: float = 1.0
    new_tokens: int = 128
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    static_shapes: bool = False
    threads: int = 1
    checkpoints: str = "checkpoints"


def make_policy(config: GenerateConfig, run: Path) -> tuple[TreePolicy, Verifier]:
    """The policy asked for, and its verifier. Raises UserError for an unknown one, or a selector with a head."""
    if config.policy in PLAIN:
        make, name = PLAIN[config.policy]
        if config.temperature == 0 and config.verifier is None:
            name = "greedy"
        policy, rule = make(), VERIFIERS[name]
    else:
        export = run / "selector" / "export" / config.policy
        if not export.is_dir():
            trained = [p.name for p in sorted(export.parent.glob("*"))] if export.parent.is_dir() else []
            raise UserError(f"policy={config.policy}: choose from {', '.join([*trained, *PLAIN])}.")
        if config.drafter != "lm":
            raise UserError(f"drafter={config.drafter}: the run's selectors know the LM draft; use drafter=lm.")
        policy = NeuralPolicy(Selector.from_pretrained(export), LatencyTable.load(run / "latency" / TABLE))
        rule = policy.verifier
    return policy, verifier(config.verifier) if config.verifier else rule


def make_drafter(
    config: GenerateConfig, run: Path, target: CausalModel, draft: CausalModel, static: StaticShapes | None
) -> Drafter:
    """The LM draft, or the run's head. Raises UserError for an unknown one."""
    if config.drafter == "lm":
        return LMDrafter(draft, static)
    if config.drafter == "head":
        return EagleDrafter.from_pretrained(run / "draft" / "export", target, static)
    raise UserError(f"drafter={config.drafter}: it is lm or head.")


def pieces(tokenizer, prompt: list[int], tokens: list[int]) -> Iterator[str]:
    """The text that each of `tokens` adds behind `prompt`; of one that ends inside a character, nothing until it is whole."""
    ids, shown = prompt[-8:], 0
    shown = len(tokenizer.decode(ids))
    for token in tokens:
        ids = [*ids, token]
        text = tokenizer.decode(ids)
        whole = "" if text.endswith("\ufffd") else text[shown:]
        shown += len(whole)
        yield whole


def generate(config: GenerateConfig) -> None:
    """Print the prompt, then what is generated as it comes, then the statistics."""
    from transformers import AutoTokenizer

    run = Path(config.checkpoints) / config.run
    if not (run / "pair" / "pair.json").exists():
        raise UserError(f"{run}: there is no finished pair; run python -m pipelines.run run={config.run} first.")
    pair = Pair(run / "pair")
    target, draft = pair.models(config.device, config.dtype)
    tokenizer = AutoTokenizer.from_pretrained(pair.where("target"), trust_remote_code=False)
    policy, rule = make_policy(config, run)
    prompt = tokenizer(config.prompt)["input_ids"]
    static = StaticShapes(len(prompt) + config.new_tokens + MARGIN) if config.static_shapes else None
    drafter = make_drafter(config, run, target, draft, static)
    decoder = SpeculativeDecoder(target, drafter, policy, rule, static=static)
    stop = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    setting = SamplingSetting(config.temperature, config.top_p)
    stream = decoder.blocks(prompt, config.new_tokens, setting, Coins.seeded(config.seed), stop)
    console.print(Text(config.prompt, style="dim"), end="")
    tokens = prompt
    for block in stream:
        for i, text in enumerate(pieces(tokenizer, tokens, block.tokens)):
            console.print(Text(text, style="green" if i < block.accepted else "bold yellow"), end="", soft_wrap=True)
        tokens = [*tokens, *block.tokens]
    console.print("\n")
    console.print(statistics(stream.generation), soft_wrap=True)


def statistics(generation: Generation) -> str:
    """One line: speed, tokens a target pass, tree size, shares of time, memory."""
    stats, decode = generation.stats, generation.decode_seconds
    parts = [f"{len(generation.tokens)} tokens, the first after {1e3 * stats.ttft:.0f} ms"]
    if generation.steps:
        parts += [
            f"{1 / stats.tpot:.0f} tokens/s ({1e3 * stats.tpot:.1f} ms a token)",
            f"{stats.block_efficiency:.2f} tokens a target pass",
            f"{stats.mean_nodes:.1f} nodes a tree",
            ", ".join(f"{phase} {100 * seconds / decode:.0f} %" for phase, seconds in stats.seconds.items()),
        ]
    parts.append(f"peak {stats.peak_bytes / 1e6:.0f} MB")
    return "; ".join(parts) + ". Green: accepted drafts; yellow: the target's own."


ConfigStore.instance().store(name="generate_schema", node=GenerateConfig)


@hydra.main(version_base=None, config_path="../configs", config_name="generate")
def main(composed) -> None:
    quiet()
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        fail(f"the configuration does not fit: {error}. See --help for all keys.")
    try:
        with threads(config.threads), torch.inference_mode():
            generate(config)
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def quoted(argument: str) -> str:
    """`prompt=...` so that Hydra takes whatever it holds as text."""
    key, equals, value = argument.partition("=")
    if key != "prompt" or not equals:
        return argument
    end = "\\'" if value.endswith("\\") else "'"
    return "prompt='" + value.replace("'", "\\'") + end


if __name__ == "__main__":
    sys.argv = [quoted(argument) for argument in sys.argv]
    main()
