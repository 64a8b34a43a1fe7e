"""What the presets of the papers' pairs need, computed and not run.

`python -m benchmarks.costs` writes the first table of docs/costs.md. With `--check` it writes the
second: the formula of a pass's memory beside torch's memory tracker
(`torch.distributed._tools.mem_tracker`). The real model runs in FakeTensorMode, where tensors have
shapes and no numbers, with the heads and the intermediate sizes that one GPU of N has. With
`--heads` it writes the third, in the same way: two training steps of a draft head.
"""

import argparse
import re
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode

from benchmarks.timing import markdown
from nde_talf.data.traces.budget import cache_bytes, pass_memory
from nde_talf.data.traces.super_trees import Prefix, SuperTreeRows
from nde_talf.decoding.common.units import size
from nde_talf.decoding.loading import architecture
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.draft_training import tree_attention
from nde_talf.draft_training.head import EagleHead
from nde_talf.draft_training.label_source import OnlineSource
from nde_talf.draft_training.losses import HeadReadout, tree_loss
from nde_talf.draft_training.target_trees import TargetTrees
from nde_talf.pipelines import costs
from nde_talf.pipelines.cli import CONFIGS
from nde_talf.pipelines.config import Config, register
from nde_talf.pipelines.costs import ModelSizes
from nde_talf.pipelines.dry_run import model_config, pair_sizes, sizes

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = [
    "preset",
    "weights: target, draft",
    "KV cache of the target",
    "peak memory: traces, draft",
    "GPUs: A100, H100, H200",
]
COLUMNS += ["disk of the traces", "traces, H200 hours"]
RANKS = (1, 2)


def presets() -> list[str]:
    """The presets of models that are not trained here."""
    return sorted(
        path.stem for path in Path(CONFIGS, "model").glob("*.yaml") if "target:" in path.read_text()
    )


def composed(*overrides: str) -> Config:
    register()
    with initialize_config_dir(CONFIGS, version_base=None):
        return OmegaConf.to_object(compose("config", list(overrides)))


def row(preset: str) -> list[str]:
    """A preset's line of the first table."""
    config = composed(f"model={preset}")
    target, draft = pair_sizes(config)
    memory = costs.stage_memory(config, target, draft)
    counts = [
        costs.gpus_needed(config, target, draft, memory) for *_, memory in costs.GPUS.values()
    ]
    disk = hours = "–"
    if draft:
        disk = size(costs.trace_bytes(config.traces, target, draft))
        spent = costs.trace_seconds(config, target, draft, costs.gpus("H200", counts[-1]))
        hours = f"{counts[-1] * sum(spent.values()) / 3600:,.1f}"
    return [
        f"`{preset}`",
        ", ".join(size(each.weights()) for each in (target, draft) if each),
        (
            f"{size(cache_bytes(target) * costs.longest_text(config))} at"
            f" {costs.longest_text(config):,}"
        ),
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
    """Peak bytes of a pass over the super-trees of `batch` roots at `context`, by torch's memory
    tracker.
    """
    from transformers.initialization import no_init_weights

    layout, (auto, attention) = super_tree_layout(), architecture(config)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with no_init_weights():
            model = auto.from_config(
                of_one_rank(config, ranks), dtype=dtype, attn_implementation=attention
            ).eval()
        model.tie_weights()
        tracker = MemTracker()
        tracker.track_external(model)

        def hidden(tokens, positions, mask, cache):
            return model.get_decoder()(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
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
            own, context = (
                sizes(model_config(where, role), config.model.dtype, where),
                costs.longest_text(config),
            )
            several = (
                role == "target" and own.config.model_type != "gpt_neox"
            )  # whose configuration has no head size
            for ranks in filter(own.divides, RANKS if several else (1,)):
                formula, peak = compared(own, where, ranks, config.traces.micro_batch, context)
                lines.append(
                    [
                        f"`{where}`",
                        str(ranks),
                        size(formula),
                        size(peak),
                        f"{100 * (formula / peak - 1):+.1f} %",
                    ]
                )
    return lines


def compared(
    own: ModelSizes, where: str, ranks: int, batch: int, context: int
) -> tuple[float, int]:
    """Peak bytes of a pass by the formula, and by the tracker."""
    formula = own.weights(ranks) + pass_memory(
        own, batch, context, super_tree_layout().inner, ranks
    )
    return formula, tracked(model_config(where, where), own.dtype, ranks, batch, context)


class Storages(MemTracker):
    """The tracker without its statistics of modules, which are for weights that all get gradients."""

    def _pre_fw_hook(self, *_) -> None: ...
    def _post_fw_hook(self, *_) -> None: ...
    def _pre_bw_hook(self, *_) -> None: ...
    def _post_bw_hook(self, *_) -> None: ...


class OfCuda(TorchFunctionMode):
    """Where fake tensors have no numbers: all roots count."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.item:
            return 1.0
        if function is torch.Tensor.nonzero:
            return torch.arange(len(args[0]))[:, None]
        return function(*args, **(kwargs or {}))


def head_tracked(config: Config, ranks: int = 1) -> int:
    """Peak bytes beside the target's weights while a head is trained, by torch's memory tracker.

    The target has one layer: its passes have ended where the peak is.
    """
    from transformers.initialization import no_init_weights

    draft, loss, of = (
        config.draft,
        config.draft.loss,
        model_config(str(config.model.target), "model.target"),
    )
    of.get_text_config().num_hidden_layers = 1
    batch, length, auto = draft.batch, costs.row_length(config), architecture(of)[0]
    rooted = min(draft.roots or length, length - 1)
    fake, cpu = FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu")
    with ExitStack() as stack:
        stack.enter_context(patch.dict(tree_attention.QUERIES, clear=True))  # as on a GPU
        for owner, name in ((CausalModel, "_check_original"), (EagleHead, "to")):
            stack.enter_context(patch.object(owner, name, lambda self, *_: self))
        reach = lambda index: [(i + 1) * (length - 1) // len(index) for i in range(len(index))]  # noqa: E731
        stack.enter_context(patch.object(FakeTensor, "tolist", reach))
        softmax = (
            torch.Tensor.softmax
        )  # in float32, as autocast makes it on a GPU alone; also where a part is computed again
        stack.enter_context(
            patch.object(
                torch.Tensor, "softmax", lambda states, *dim: softmax(states.float(), *dim)
            )
        )
        stack.enter_context(fake)
        stack.enter_context(OfCuda())
        with no_init_weights():
            module = auto.from_config(
                of_one_rank(of, ranks), dtype=getattr(torch, config.model.dtype)
            )
        target = CausalModel(module, forward="transformers")
        target.config = of.get_text_config()  # the head is in full on the first GPU
        head = EagleHead(target, draft.layer).train()
        optimizer, tracker = torch.optim.AdamW(head.parameters()), Storages()
        tracker.track_external(module, head)
        weights = sum(weight.numel() * weight.element_size() for weight in module.parameters())
        tokens, roots = (torch.zeros(batch, count, dtype=torch.long) for count in (length, rooted))
        of_roots = [torch.ones(batch, length - 1), *[torch.ones(batch, rooted)] * (loss.depth - 1)]
        with tracker:
            for _ in range(2):  # from the second on the optimiser has its moments
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    trees = OnlineSource(target, draft).trees(
                        tokens, None, torch.arange(batch), roots, loss.depth
                    )
                    outputs = head.tree_features(*trees_of(trees), loss.detach_features)
                    outputs[0] = outputs[0].flatten(0, 1)[:, None]
                    labels = [trees.along[:, 1:].flatten(0, 1)[:, None], *trees.labels]
                    readout = HeadReadout.of(head, 4 * draft.nodes_in_pass)
                    value, _ = tree_loss(outputs, labels, readout, loss, of_roots)
                value.backward()
                optimizer.step()
                del trees, outputs, labels, value
        return int(tracker.get_tracker_snapshot("peak")[cpu]["Total"]) - weights


def trees_of(trees: TargetTrees) -> tuple:
    return trees.tokens, trees.features, trees.roots, trees.levels


def heads(presets: list[tuple[str, int]]) -> list[list[str]]:
    """Lines of the third table, of presets and lengths of rows."""
    lines = []
    for preset, length in presets:
        config = composed(
            f"model={preset}",
            "draft=talf",
            "draft.loss.k=4",
            "draft.loss.depth=3",
            f"dialogues.length={length}",
        )
        config.model.length = length
        own = pair_sizes(config)[0]
        formula, peak = costs.head_memory(config, own), head_tracked(config)
        full = size(own.weights() + peak)
        lines.append(
            [
                f"`{preset}`",
                f"{length:,}",
                size(formula),
                size(peak),
                f"{100 * (formula / peak - 1):+.1f} %",
                full,
            ]
        )
    return lines


def put(page: str, name: str, text: str) -> None:
    """Replace the part of a page of docs/ between `<!-- name -->` and `<!-- /name -->`."""
    path = DOCS / page
    found, count = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
        lambda m: f"{m[1]}\n{text}\n{m[2]}",
        path.read_text(),
        flags=re.S,
    )
    assert count == 1, (page, name)
    path.write_text(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--check", action="store_true", help="compare with torch's memory tracker, some minutes"
    )
    parser.add_argument(
        "--heads", action="store_true", help="compare the training of a head with it, some minutes"
    )
    options = parser.parse_args()
    if options.heads:
        columns = [
            "preset",
            "tokens",
            "formula",
            "memory tracker",
            "difference",
            "with the target's weights",
        ]
        rows = [("llama3.1_8b", 2048), ("llama3.1_8b", 8192), ("llama3_70b_8b", 2048)]
        name, table = "heads", markdown(columns, heads(rows))
    elif options.check:
        lines = {line[0] + line[1]: line for preset in presets() for line in check(preset)}
        name, table = (
            "check",
            markdown(
                ["model", "GPUs", "formula", "memory tracker", "difference"], list(lines.values())
            ),
        )
    else:
        name, table = "presets", markdown(COLUMNS, [row(preset) for preset in presets()])
    print(table)
    put("costs.md", name, table)


if __name__ == "__main__":
    main()
