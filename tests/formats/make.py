"""`python -m tests.formats.make`: write a tiny export of every artefact in today's format beside
this file.

Run it once when a format's number is raised, and commit what it writes; what is there for older
numbers stays as it is.
"""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import nde_talf.data.text.pair
import nde_talf.data.traces.store
import nde_talf.draft_training.export
import nde_talf.saved
import nde_talf.selector.latency
import nde_talf.selector.selector
from nde_talf import speculate
from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.files import checksum, remove
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.eagle3 import Eagle3Head
from nde_talf.draft_training.head import EagleHead
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.selector import Selector, SelectorSchema

HERE = Path(__file__).parent


def number(module) -> int:
    """A module's format; the first formats were plain numbers, and the pair's had none."""
    found = getattr(module, "FORMAT", 1)
    return getattr(found, "number", found)


def place(kind: str, module) -> Path:
    path = HERE / f"{kind}-{number(module)}"
    remove(path)
    return path


def make_pair() -> Path:
    folder = place("pair", nde_talf.data.text.pair)
    for role, seed in (("target", 0), ("draft", 1)):
        torch.manual_seed(seed)
        sizes = LlamaConfig(
            vocab_size=29, hidden_size=8, intermediate_size=16, num_hidden_layers=2 - seed, num_attention_heads=2,
            max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        LlamaForCausalLM(sizes).save_pretrained(folder / role)
        if hasattr(nde_talf.data.text.pair, "FORMAT"):
            from nde_talf.decoding.common.checksums import write_checksums

            write_checksums(folder / role)
    prompts = [Prompt(f"p{i}", "text", f"words {i}", [i, i + 1, i + 2]) for i in range(3)]
    rows = torch.arange(24).reshape(4, 6)
    Pair(folder).write("target", "draft", prompts, 1, rows, rows[:2])
    return folder


def make_manifest(pair: Path) -> None:
    """A run of two stages, of which the second remembers the first."""
    settings = {"seed": 0, "data": {"held_out": 0.12}}
    metrics, seconds = {"overlap": {"1.0": 0.5}}, 2.5
    if not hasattr(nde_talf.data.text.pair, "FORMAT"):
        run = HERE / "manifest-1"
        remove(run)
        for name, inputs in (("pair", {}), ("latency", {"pair": run / "pair/manifest.json"})):
            folder = run / name
            folder.mkdir(parents=True)
            (folder / "made.txt").write_text(f"made by {name}\n")
            content = {
                "settings": settings,
                "inputs": {key: checksum(path) for key, path in inputs.items()},
            }
            content |= {
                "metrics": metrics,
                "seconds": seconds,
                "finished": "2026-01-01T00:00:00+00:00",
            }
            (folder / "manifest.json").write_text(json.dumps(content, indent=2) + "\n")
        return
    import nde_talf.pipelines.manifest as manifest

    run, identities = place("manifest", manifest), {}
    for name in ("pair", "latency"):
        (run / name).mkdir(parents=True)
        (run / name / "made.txt").write_text(f"made by {name}\n")
        manifest.write_manifest(
            run / name, {"settings": settings, "inputs": dict(identities)}, metrics, seconds
        )
        identities[name] = manifest.identity(manifest.read_manifest(run / name))


def make_speculation() -> None:
    head, policy = (
        HERE / f"{kind}-{number(own)}"
        for kind, own in (
            ("head", nde_talf.draft_training.export),
            ("selector", nde_talf.selector.selector),
        )
    )
    own = speculate(head, policy, "traversal", draft_temperature=0.7)
    path = place("speculation", nde_talf.saved)
    nde_talf.saved.save(own, path, name=path.name)


def main() -> None:
    pair = make_pair()
    target = CausalModel.load(pair / "target")
    torch.manual_seed(2)
    head = EagleHead(target)
    nde_talf.draft_training.export.save_head(head, place("head", nde_talf.draft_training.export))
    torch.manual_seed(2)
    three = Eagle3Head(target, vocabulary=torch.arange(0, 29, 2))
    nde_talf.draft_training.export.save_head(three, place("eagle3", nde_talf.draft_training.export))
    torch.manual_seed(3)
    schema = SelectorSchema(
        8, 8, ("specinfer",), ((1.0, 1.0), (0.6, 1.0)), (True, False), 20.0, 2, (2, 2), 0.1
    )
    Selector(schema).save_pretrained(place("selector", nde_talf.selector.selector))
    path = place("latency", nde_talf.selector.latency).with_suffix(".json")
    grids = {"contexts": [64, 256], "nodes": [1, 8], "widths": [1, 4]}
    target_ms, draft_ms = [[1e-3, 2e-3], [1.5e-3, 2.5e-3]], [[1e-4, 2e-4], [1.5e-4, 2.5e-4]]
    sizes = {"target": [8, 2, 29], "draft": [8, 1, 29]}
    LatencyTable(
        **grids, target=target_ms, draft=draft_ms, verify={"nss": [1e-5, 2e-5]}, models=sizes
    ).save(path)
    store = TraceStore(place("traces", nde_talf.data.traces.store))
    for shard, split in enumerate(("train", "validation")):
        rows = {
            "prompt_id": ["a", "b"],
            "split": [split] * 2,
            "context": torch.tensor([3, 5 + shard]),
        }
        store.write(
            store.name(shard, 2), {**rows, "h_q_root": torch.arange(6.0).reshape(2, 3).half()}
        )
    store.finish()
    make_manifest(pair)
    make_speculation()


if __name__ == "__main__":
    main()
