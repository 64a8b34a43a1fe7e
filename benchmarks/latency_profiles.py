"""Latency tables of machines that are not at hand, from a roofline: `python -m
benchmarks.latency_profiles` writes configs/latency/*.json.

`nde_talf.pipelines.costs` has the formula. These are models, not measurements: measure your own
pair with stage=latency.
"""

from pathlib import Path

from nde_talf.pipelines.costs import Model, gpus, seconds
from nde_talf.selector.latency import NODES, SEQUENCES, WIDTHS, LatencyTable

FOLDER = Path(__file__).parents[1] / "configs" / "latency"
CONTEXTS = [64, 512, 2048, 8192]

LLAMA_70B = Model("Llama-3 70B", 70.6e9, 80, 2 * 2 * 80 * 8 * 128)
LLAMA_8B = Model("Llama-3 8B", 8.0e9, 32, 2 * 2 * 32 * 8 * 128)
EAGLE = Model("EAGLE head of Llama-3 70B", 2.0e9, 1, 2 * 2 * 8 * 128)
GEMMA_27B = Model("Gemma-3 27B", 27e9, 62, 2 * 2 * 62 * 16 * 128)
GEMMA_270M = Model("Gemma-3 270M", 0.27e9, 18, 2 * 2 * 18 * 1 * 256)

PROFILES = {
    "a100_70b_8b": (LLAMA_70B, gpus("A100", 4), LLAMA_8B, gpus("A100", 2)),
    "h100_27b_270m": (GEMMA_27B, gpus("H100", 1), GEMMA_270M, gpus("H100", 1)),
    "a100_70b_eagle": (LLAMA_70B, gpus("A100", 4), EAGLE, gpus("A100", 4)),
}


def main() -> None:
    for name, (target, target_machine, draft, draft_machine) in PROFILES.items():
        target_passes, draft_passes = (
            [
                [[round(seconds(*of, c, n, b), 6) for n in sizes] for c in CONTEXTS]
                for b in SEQUENCES
            ]
            for of, sizes in (((target, target_machine), NODES), ((draft, draft_machine), WIDTHS))
        )
        table = LatencyTable(
            CONTEXTS,
            list(NODES),
            list(WIDTHS),
            target_passes[0],
            draft_passes[0],
            sequences=list(SEQUENCES),
            target_batch=target_passes,
            draft_batch=draft_passes,
            machine={
                "modelled": "roofline, see benchmarks/latency_profiles.py",
                "target": f"{target.name} on {target_machine.name}",
                "draft": f"{draft.name} on {draft_machine.name}",
            },
        )
        table.save(FOLDER / f"{name}.json")
        one = f"target {1e3 * table.target[1][0]:.1f} ms, draft {1e3 * table.draft[1][0]:.1f} ms"
        print(f"{name}: one token at {CONTEXTS[1]} of context: {one}")


if __name__ == "__main__":
    main()
