"""Export of a draft head: weights and config as vLLM's EAGLE loader reads them, and our note.

`model.safetensors` holds the head's tensors (nine of a Llama layer), without a prefix and without
an input layer norm. Embedding and lm_head stay the target's. `config.json` is the config of one
layer with one more key, `draft_head`, which other loaders ignore: the format, the family of the
layer, and a fingerprint of the target. Llama and Qwen2 layers have a
Llama config, where vLLM reads the scale of the target's logits (logit_scale) too. It cannot hold a
soft cap, which changes the head's probabilities in vLLM, but neither its most likely tokens nor the
text. Layers with more norms (Qwen3, Gemma 2 and 3) have their own config, which vLLM's EAGLE
loader refuses (`families.not_for_vllm`). A head on features of three layers has EAGLE-3's layout:
its layer is called `midlayer`, it has norms and an lm_head of its own, `config.json` has the
layers' numbers and its norms (`NORMS`), and a draft vocabulary is stored as d2t and t2d
(`draft_vocab`).
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import TypedDict

from nde_talf.data.text.shipped import HUB, smollm2
from nde_talf.decoding.common.card import hub_name, write_card
from nde_talf.decoding.common.checksums import CHECKSUMS, write_export
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json
from nde_talf.decoding.common.formats import Format
from nde_talf.decoding.common.hub import export_folder
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.draft_training.export.published_heads import (
    CONFIG,
    FILES,
    LAYERS,
    load_layout,
)
from nde_talf.draft_training.export.vectors import VECTORS, check_vectors, vectors_of
from nde_talf.draft_training.model.draft_vocab import layout_of, vocabulary_in
from nde_talf.draft_training.model.families import not_for_vllm, served_config
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.training_settings import NORMS


class Note(TypedDict):
    """The content of `config.json` under `NOTE`."""

    kind: Literal["eagle", "eagle3"]
    layer: str
    hidden_size: int
    vocab_size: int
    target_signs_sha256: str
    trained_in: str | None
    sizes: dict[str, Any]
    d2t: NotRequired[list[int]]


FORMAT = Format("draft head", "export the head again with stage=draft force=true", Note)
NOTE = "draft_head"
"""The key of `config.json` that is ours: format, kind, layer, hidden_size, vocab_size,
target_signs_sha256, trained_in (the precision, or null), sizes (fields of the
layer's configuration that differ from the target's, as inherited from a published head), and d2t
for a draft vocabulary on the target's readout (see `draft_vocab`; an engine drafts from the whole
readout).
"""

SIGNS = "target_signs_sha256"
SAMPLE = 4096
"""Most numbers of a weight in `fingerprint`."""

LOOP = """
```python
from nde_talf import Beam, CausalModel, EagleDrafter, Rng, SamplingSetting, \
SpeculativeDecoder, VERIFIERS

target = CausalModel.load("{target}")
drafter = EagleDrafter.from_pretrained("PATH OF THIS FOLDER", target)
decoder = SpeculativeDecoder(target, drafter, Beam(), VERIFIERS["nss"])
generation = decoder.generate(prompt_ids, 128, SamplingSetting(0.0), Rng.seeded(0), target.ends)
```
"""
SERVED = """
```
vllm serve {target} --speculative-config '{{"method": "{kind}", "model": \
"PATH OF THIS FOLDER", "num_speculative_tokens": 4}}'
```
"""


def _sign_bits(numbers: Tensor) -> bytes:
    return np.packbits(
        torch.signbit(numbers.detach().float()).cpu().numpy()
    ).tobytes()  # float8 has no signbit of its own


def fingerprint(target: CausalModel) -> str:
    """Hash all weights' names and shapes and the signs of some numbers of each (sha256).

    It is the same in float32, bfloat16 and float16, and differs after further training.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(target.module.named_parameters()):
        numbers = weight.detach().flatten()
        digest.update(f"{name} {list(weight.shape)}".encode())
        digest.update(_sign_bits(numbers[:: max(1, len(numbers) // SAMPLE)][:SAMPLE]))
    return digest.hexdigest()


def _identity(target: CausalModel) -> dict[str, int | str]:
    """Return the fields of a head's note that identify its target."""
    return {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        SIGNS: fingerprint(target),
    }


def _held_in(head: EagleHead) -> torch.dtype:
    """Return the dtype of the exported weights."""
    return head.dtype if head.dtype.itemsize == 2 else torch.float32


def _served(head: EagleHead) -> dict[str, Any]:
    """Return config.json of a head, without our note."""
    config = served_config(head.config, head.family) | {
        "dtype": str(_held_in(head)).removeprefix("torch.")
    }
    if head.feature_layers:
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(head.own_matrix),
            LAYERS: list(head.feature_layers),
            **{name: name in head.norms for name in NORMS},
        }
    elif head.target.readout.scale != 1:
        config["logit_scale"] = head.target.readout.scale
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:  # readers older than rope_parameters expect two keys
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config["rope_theta"] = rope["rope_theta"]
        config["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    return config


def save_head(head: EagleHead, folder: str | Path) -> Path:
    """Write `head` to `folder` with checksums and a model card, atomically.

    Weights are float32, or a half-precision head's own dtype.
    An older head in it is replaced. Returns the folder.
    """
    folder = Path(folder)
    config = _served(head)
    config[NOTE] = {
        "format": FORMAT.number,
        "kind": head.kind,
        "layer": head.family.name,
        "trained_in": head.trained_in,
        "sizes": head.other_sizes,
        **_identity(head.target),
    }
    if head.own_matrix is None and head.vocabulary is not None:
        layout = layout_of(head.vocabulary.cpu(), head.target.vocab_size)
        config[NOTE]["d2t"] = layout["d2t"].tolist()
    dtype = _held_in(head)
    weights = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor)
        .detach()
        .cpu()
        .contiguous()
        for name, tensor in head.file_weights().items()
    }
    vectors = vectors_of(head)

    def write(partial: Path) -> None:
        (partial / VECTORS).write_text(json.dumps(vectors), encoding="utf-8")
        save_file(weights, partial / FILES[0], metadata={"format": "pt"})
        (partial / CONFIG).write_text(
            json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        write_head_card(partial, head)

    write_export(folder, write)
    return folder


def load_head(
    folder: str | Path,
    target: CausalModel,
    dtype: torch.dtype | None = None,
    any_weights: bool = False,
) -> EagleHead:
    """Load the head in `folder`, in evaluation mode, on the device of `target`.

    It is our export, or a published head (`published_heads`).

    Args:
        folder: of the export, or its name on a hub.
        target: what it drafts for.
        dtype: of its weights; None: the target's.
        any_weights: a target with other numbers in weights of the same shapes is taken, and told.

    Raises UserError if there is none, if a file was changed, if its weights are not exactly a
    head's, or if it was trained beside another target.
    """
    folder = export_folder(folder)
    config = read_json(folder / CONFIG, again="give the head's folder, which stage=draft exported")
    # with checksums it is an export that lost its note
    if NOTE not in config and not (folder / CHECKSUMS).exists():
        return load_layout(folder, config, target, dtype)
    note = config.get(NOTE)
    if not isinstance(note, dict):
        raise UserError(
            f"{folder / CONFIG}: its key {NOTE!r} is {note!r}, not that of a draft head. Give the"
            " folder that stage=draft exported; if this is it, export the head again."
        )
    note = FORMAT.load_folder(folder, note, folder / CONFIG)
    own = _same_target(folder, note, target, any_weights)
    head = load_layout(folder, config, target, dtype, (note["layer"], note["sizes"]))
    if head.family.name != note["layer"]:
        raise UserError(
            f"{folder / CONFIG}: there is no layer {note['layer']!r} beside this target. Take a"
            " good copy, or export the head again."
        )
    if "d2t" in note:
        known = {"d2t": torch.tensor(note["d2t"])}
        head.vocabulary = vocabulary_in(known, target.vocab_size, str(folder)).to(head.device)
    head.trained_in = note["trained_in"]
    if own and (folder / VECTORS).exists():
        check_vectors(head, folder / VECTORS, FORMAT.again)
    return head


def _same_target(
    folder: Path, note: dict[str, Any], target: CausalModel, any_weights: bool
) -> bool:
    """Return whether a head was trained beside `target`; False for other numbers in its weights.

    Raises UserError for another target, and unless `any_weights` for other numbers too.
    """
    for key, value in _identity(target).items():
        if note[key] == value:
            continue
        if any_weights and key == SIGNS:
            console.print(
                f"! {folder}: the head was trained for other weights than {target.name}'s, such as"
                " another quantisation: fewer drafts are accepted, and the text is as exact.",
            )
            return False
        other = "set of weights" if key == SIGNS else key
        raise UserError(
            f"{folder}: the head was trained beside a target with another {other} than"
            f" {target.name}'s. Use the target it was trained with, or train a head for this"
            " one."
        )
    return True


def write_head_card(
    folder: Path,
    head: EagleHead,
    facts: Mapping[str, Any] | None = None,
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Write the model card of `head` into its export, `folder`.

    Args:
        folder: the export.
        head: that was exported.
        facts: about its training.
        figures: of `held_out_report`.
    """
    target, reason = head.target, not_for_vllm(head.family)
    whole = target.module.config
    folder_of, kind = str(whole._name_or_path), whole.model_type
    base = HUB if folder_of == smollm2() else hub_name(folder_of)
    place, layers = base or "FOLDER OF THE TARGET", ", ".join(map(str, head.feature_layers))
    drafted = f"all {target.vocab_size} tokens" if head.vocabulary is None else len(head.vocabulary)
    known = {
        "target": f"{base or kind}, {target.layers} layers x {target.hidden_size}",
        "layer": head.family.name,
        "features": f"after layers {layers}" if layers else "after the final norm",
        "draft vocabulary": drafted,
        "precision of the training": head.trained_in or "not known",
    }
    names = {
        "agreement": "most likely token is the target's, by depth",
        "accepted_length": "tokens a pass that this predicts, 1 + the sum of its products",
        "overlap": "acceptance rate at temperature 1 after 0, 1, ... drafted tokens",
        "kl": "KL divergence by depth, nats",
        "roots": "contexts",
    }
    served = f"\n{reason}\n" if reason else SERVED.format(target=place, kind=head.kind)
    write_card(
        folder,
        f"Draft head ({head.kind}) for {base or f'a {kind}'}",
        "A draft head for lossless speculative decoding: it proposes tokens, and the target"
        " decides. The target's text, or its law where it samples, stays what it is without the"
        " head. It fits one target alone: `config.json` holds a fingerprint of its weights.",
        LOOP.format(target=place) + served,
        ["speculative-decoding", "draft-head", head.kind],
        base,
        {**known, **(facts or {})},
        {names[name]: value for name, value in (figures or {}).items() if name in names},
    )
