"""Causal language model: loaded, checked, with the fastest forward pass that is right."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from nde_talf.decoding.models.base import Model
from nde_talf.decoding.models.choose_forward import choose_forward
from nde_talf.decoding.models.loading import load_module


class CausalModel(Model):
    """Wraps a transformers causal LM.

    Args:
        forward: "native": `NativeForward` runs the passes, which has to know the model's
            family. "transformers": passes are transformers'. "auto": native ones where that is
            possible and their logits are transformers'.

    See `Model` for the others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str = "model",
        forward: str = "auto",
        owned: bool = True,
        products: str = "auto",
        packs: bool = False,
    ):
        super().__init__(model, name, owned, products, packs)
        with torch.autocast(self.device.type, enabled=False):  # it compares in the model's type
            self.forward = choose_forward(self, forward)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str = "cpu",
        dtype: str = "float32",
        name: str = "model",
        forward: str = "auto",
        device_map: str | None = None,
        products: str = "auto",
    ) -> "CausalModel":
        """Load from a folder or hub name.

        device_map: "auto" lets accelerate lay the layers over all GPUs, for a model that one does
        not hold; passes are transformers' there. Raises UserError naming `folder` if there is no
        usable model or not all of one: see `load_module`.
        """
        module = load_module(folder, device, dtype, name, device_map)
        return cls(module, name, forward, products=products, packs=True)
