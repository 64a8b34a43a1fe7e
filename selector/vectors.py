"""Test vectors of an export: inputs, and what its selector makes of them.

They hold three made-up rows of the network's inputs, by argument name, the `logits` [B, A] that it
gives them, and the `trees` [B, 3] that it then chooses, so that another reader can be tested.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import reading
from nde_talf.decoding.common.tensors import read_tensors
from nde_talf.selector.export import FORMAT
from nde_talf.selector.roots import INPUT_SCALARS

ROWS, ERROR = 3, 1e-3


@torch.inference_mode()
def vectors_of(selector: Any) -> dict[str, Tensor]:
    """Make the test vectors of a `Selector`."""
    schema, draws = selector.schema, torch.Generator().manual_seed(0)

    def normal(size: int) -> Tensor:
        return torch.randn(ROWS, size, generator=draws)

    names = ("h_p_previous", "h_q_previous", "h_q_root")
    sizes = (schema.target_hidden, schema.draft_hidden, schema.draft_hidden)
    inputs = {name: normal(size) for name, size in zip(names, sizes, strict=True)}
    spread = torch.where(selector.scale > 0, 1 / selector.scale, 0.0)
    scalars = selector.mean + spread * normal(len(INPUT_SCALARS)).to(spread)
    inputs["scalars"] = scalars.float().cpu()
    inputs["seconds"] = 0.01 * normal(len(TREES)).exp()
    return {**inputs, **_outputs(selector, inputs)}


@torch.inference_mode()
def check_vectors(selector: Any, path: Path) -> None:
    """Raise UserError where a selector does not give the logits of its test vectors."""
    vectors = read_tensors(path, FORMAT.again)
    with reading(path, FORMAT.again):
        known = vectors.pop("logits")
        vectors.pop("trees")
        error = (_outputs(selector, vectors)["logits"] - known).abs().max().item()
    if not error <= ERROR * (1 + known.abs().max().item()):
        raise UserError(
            f"{path}: its selector gives other logits than it was exported with, by up to"
            f" {error:.2g}: {FORMAT.again}."
        )


def _outputs(selector: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    training, device = selector.training, selector.mean.device
    logits = selector.eval()(**{name: each.to(device) for name, each in inputs.items()}).cpu()
    selector.train(training)
    return {"logits": logits, "trees": torch.tensor([*TREES])[logits.argmax(-1)]}
