"""What the presets of the papers' pairs need, computed and not run.

`python -m benchmarks.costs` writes the first table of docs/costs.md. With `--check` it writes the second: the formula of a
pass's memory beside torch's memory tracker (`torch.distributed._tools.mem_tracker`). The real model runs in FakeTensorMode,
where tensors have shapes and no numbers, with the heads and the intermediate sizes that one GPU of N has.
"""

import argparse
import re
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.timing import markdown
from data.traces.budget import cache_bytes, pass_memory
from data.traces.super_trees import Prefix, SuperTreeRows
from decoding.common.units import size
from decoding.loading import architecture
from decoding.super_tree import super_tree_layout
from pipelines import costs
from pipelines.cli import CONFIGS
from pipelines.config import Config, register
from pipelines.costs import ModelSizes
from pipelines.dry_run import model_config, pair_sizes, sizes

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = ["preset", "weights: target, draft", "KV cache of the target", "peak memory: traces, draft", "GPUs: A100, H100, H200"]
COLUMNS += ["disk of the traces", "traces, H200 hours"]
RANKS = (1, 2)


def presets() -> list[str]:
    """The presets of models that are not trained here."""
    return sorted(path.stem for path in Path(CONFIGS, "model").glob("*.yaml") if "target:" in path.read_text())


def composed(*overrides: str) -> Config:
    register()
    with initialize_config_dir(CONFIGS, version_base=None):
        return OmegaConf.to_object(compose("config", list(overrides)))


def row(preset: str) -> list[str]:
    """A preset's line of the first table."""
    config = composed(f"model={preset}")
    target, draft = pair_sizes(config)
    memory = costs.stage_memory(config, target, draft)
    counts = [costs.gpus_needed(config, target, draft, memory) for *_, memory in costs.GPUS.values()]
    disk = hours = "–"
    if draft:
        disk = size(costs.trace_bytes(config.traces, target, draft))
        spent = costs.trace_seconds(config, target, draft, costs.gpus("H200", counts[-1]))
        hours = f"{counts[-1] * sum(spent.values()) / 3600:,.1f}"
    return [
        f"`{preset}`",
        ", ".join(size(each.weights()) for each in (target, draft) if each),
        f"{size(cache_bytes(target) * costs.longest_text(config))} at {costs.longest_text(config):,}",
        ", ".join(size(memory[stage]) if stage in memory else "–" for stage in ("traces", "draft")),
        ", ".join(str(count or "–") for count in counts),
        disk,
        hours,
    ]


def of_one_rank(config: Any, ranks: int) -> Any:
    """The configuration of what one of `ranks` GPUs holds of a model."""
    config = deepcopy(config)
    text = config.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(text, name, None):
            setattr(text, name, getattr(text, name) // ranks)
    return config


def tracked(config: Any, dtype: torch.dtype, ranks: int, batch: int, context: int) -> int:
    """Peak bytes of a pass over the super-trees of `batch` roots at `context`, by torch's memory tracker."""
    from transformers.initialization import no_init_weights

    layout, (auto, attention) = super_tree_layout(), architecture(config)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with no_init_weights():
            model = auto.from_config(of_one_rank(config, ranks), dtype=dtype, attn_implementation=attention).eval()
        model.tie_weights()
        tracker = MemTracker()
        tracker.track_external(model)

        def hidden(tokens, positions, mask, cache):
            return model.get_decoder()(
                input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
            ).last_hidden_state

        own = SimpleNamespace(hidden=hidden, device=torch.device("cpu"), dtype=dtype)
        with tracker:
            prefix = Prefix(own, torch.zeros(context, dtype=torch.long))
            tracker.reset_mod_stats()  # it counts the calls of a module, and takes one
            rows = SuperTreeRows(prefix, torch.full((batch,), context - 1), layout)
            rows.run(torch.zeros(batch, layout.inner, dtype=torch.long))
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def check(preset: str) -> list[list[str]]:
    """Lines of the second table."""
    config, lines = composed(f"model={preset}"), []
    for role in ("target", "draft"):
        if where := getattr(config.model, role):
            own, context = sizes(model_config(where, role), config.model.dtype, where), costs.longest_text(config)
            several = role == "target" and own.config.model_type != "gpt_neox"  # whose configuration has no head size
            for ranks in filter(own.divides, RANKS if several else (1,)):
                formula, peak = compared(own, where, ranks, config.traces.micro_batch, context)
                lines.append([f"`{where}`", str(ranks), size(formula), size(peak), f"{100 * (formula / peak - 1):+.1f} %"])
    return lines


def compared(own: ModelSizes, where: str, ranks: int, batch: int, context: int) -> tuple[float, int]:
    """Peak bytes of a pass by the formula, and by the tracker."""
    formula = own.weights(ranks) + pass_memory(own, batch, context, super_tree_layout().inner, ranks)
    return formula, tracked(model_config(where, where), own.dtype, ranks, batch, context)


def put(page: str, name: str, text: str) -> None:
    """Replace the part of a page of docs/ between `<!-- name -->` and `<!-- /name -->`."""
    path = DOCS / page
    found, count = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda m: f"{m[1]}\n{text}\n{m[2]}", path.read_text(), flags=re.S
    )
    assert count == 1, (page, name)
    path.write_text(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="compare with torch's memory tracker, some minutes")
    if parser.parse_args().check:
        lines = {line[0] + line[1]: line for preset in presets() for line in check(preset)}
        name, table = "check", markdown(["model", "GPUs", "formula", "memory tracker", "difference"], list(lines.values()))
    else:
        name, table = "presets", markdown(COLUMNS, [row(preset) for preset in presets()])
    print(table)
    put("costs.md", name, table)


if __name__ == "__main__":
    main()
