"""Draft heads that others published, for decoding and as the start of a training.

They are in the layout of EAGLE (`fc` [H, 2H], `layers.0`), of EAGLE-3 (`fc` [H, 3H], `midlayer`,
`norm`, `lm_head`; EAGLE 3.1 has more norms, `NORMS`), or of the speculators library (the same
names, `layers.0` for both, and the layer's configuration inside another). The layer may have sizes
of its own, such as a wider MLP than the target's, and be of another family. Such a folder does not
name its target. Sizes are compared, and the copy of the target's embedding that most heads hold.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import reading
from nde_talf.decoding.common.json_validation import typed
from nde_talf.decoding.common.tensors import LARGEST, read_tensors, unsound
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.draft_training.model.draft_vocab import vocabulary_in
from nde_talf.draft_training.model.eagle3 import Eagle3Head
from nde_talf.draft_training.model.families import family_of
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.training_settings import FAMILY, LLAMA, NORMS

LAYERS = "eagle_aux_hidden_state_layer_ids"
"""Key of config.json: numbers of the target's layers whose features an EAGLE-3 head takes."""
CONFIG, _AGAIN = "config.json", "fetch it again"
FILES = ("model.safetensors", "pytorch_model.bin")
"""Files that may hold the weights; the first existing one is read."""
SIZES = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
)
# least fraction of equal signs in two copies of one embedding: in half precision a few become zero
_SAME = 0.999


def load_layout(
    folder: Path,
    config: dict[str, Any],
    target: CausalModel,
    dtype: torch.dtype | None,
    layer: tuple[str, dict[str, Any]] | None = None,
) -> EagleHead:
    """Load the head in `folder`, in evaluation mode, for `target`.

    Args:
        folder: of the head.
        config: content of its config.json.
        target: whose head it is.
        dtype: of its weights; None: the target's.
        layer: kind of its layer, and fields of its configuration that differ from the target's;
            None: read from `config`.

    Raises:
        UserError: it is no head, has another wiring, or belongs to another target.
    """
    weights, hidden = _weights(folder), target.hidden_size
    shape = weights.get("fc.weight", torch.empty(0)).shape
    if shape not in ((hidden, 2 * hidden), (hidden, 3 * hidden)):
        raise UserError(
            f"{folder}: its fc.weight is {list(shape)}, and that of a head for {target.name} is"
            f" [H, 2H] (EAGLE) or [H, 3H] (EAGLE-3) with H = {hidden}. It is no draft head, or a"
            " head for another target."
        )
    copy = weights.pop("embed_tokens.weight", None)
    if copy is not None and not _same_signs(copy, target):
        raise UserError(
            f"{folder}: its embedding is not that of {target.name}, so it is a head for another"
            " target."
        )
    with reading(folder / CONFIG, _AGAIN), torch.random.fork_rng(devices=[]):
        name, sizes = layer or _layer_of(config, weights, target)
        layers, norms = _wiring(config)
        three = shape[1] == 3 * hidden
        if norms and not three:
            raise UserError(
                f"{folder}: its config.json has {norms[0]}, which is for heads on three layers, and"
                " its fc.weight is that of a head on one."
            )
        _check_layers(folder, layers, three, target)
        if three:
            vocabulary = vocabulary_in(weights, target.vocab_size, str(folder))
            options: dict[str, Any] = {"dtype": dtype, "sizes": sizes}
            head: EagleHead = Eagle3Head(target, name, vocabulary, norms, layers, **options)
        else:
            weights.pop("lm_head.weight", None)  # the target's is used
            bias = {"fc_bias": True} if "fc.bias" in weights else {}
            head = EagleHead(target, name, dtype, sizes | bias)
    load_weights(head, weights, folder)
    return head.eval().requires_grad_(False)


def _check_layers(folder: Path, layers: list[int], three: bool, target: CausalModel) -> None:
    """Raise UserError unless the features are of three rising layers of `target`, or unnamed."""
    rising = len(layers) == 3 and layers == sorted({*layers})
    if not layers or (three and rising and layers[-1] <= target.layers):
        return
    raise UserError(
        f"{folder}: it takes features of the layers {layers}. Beside {target.name}, which"
        f" has {target.layers}, a head takes three in ascending order."
    )


def _wiring(config: dict[str, Any]) -> tuple[list[int], list[str]]:
    """Return the target's layers that a head takes (none if unnamed), and its norms."""
    nested = typed(config.get("eagle_config") or {}, dict[str, Any])
    wiring = {**nested, **config}
    layers = typed(wiring.get(LAYERS) or [], list[int])
    if LAYERS not in config and layers[:1] == [1]:  # SpecForge's: outputs of layers, from 0
        layers = [layer + 1 for layer in layers]
    norms = [name for name in NORMS if typed(wiring.get(name) or False, bool)]
    return layers, norms


def _layer_of(
    config: dict[str, Any], weights: dict[str, Tensor], target: CausalModel
) -> tuple[str, dict[str, Any]]:
    """Return the kind of a published head's layer, and its sizes.

    Files call a layer Llama's even with the biases of Qwen 2 or the norms of Qwen 3.
    """
    inner = config.get("transformer_layer_config", config)
    own = inner.get("model_type") == target.config.model_type
    layer = FAMILY if own and family_of(target, FAMILY).sandwich else LLAMA
    ends = {name.partition("self_attn.")[2] for name in weights}
    if "q_norm.weight" in ends and layer == LLAMA:
        layer = "qwen3"
    elif "q_proj.bias" in ends and "o_proj.bias" not in ends:
        layer = "qwen2"
    given = {key: value for key, value in inner.items() if key != "model_type"}
    described = family_of(target, layer).config.from_dict(given).to_dict()
    return layer, {name: described[name] for name in SIZES if name in described}


def load_weights(head: EagleHead, weights: dict[str, Tensor], where: Path) -> None:
    """Load weights into `head`.

    Raises UserError, naming `where`, if one is missing, unknown, of another shape or not finite.
    """
    name = head.target.name
    faulty = [key for key, weight in weights.items() if not weight.is_floating_point()]
    faulty += unsound(weights.items(), LARGEST)
    try:
        if not faulty:
            return head.load_file_weights(weights)
        fault = f"{faulty[0]} holds no floating-point numbers, or NaN or huge ones"
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        fault = " ".join(str(error).split())
    raise UserError(
        f"{where}: its tensors are not those of a head for {name} ({fault}). Heads of one layer,"
        " of Llama, Qwen 2, Qwen 3 or the target's own kind, are read: take one, or a good copy."
    )


def _weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights by name, without tables of angles.

    Raises UserError if there are none, or unreadable ones.
    """
    file = next((folder / name for name in FILES if (folder / name).exists()), None)
    if file is None:
        raise UserError(f"{folder}: there is no draft head: it has no {' or '.join(FILES)}.")
    if file.suffix == ".safetensors":
        weights = read_tensors(file, _AGAIN)
    else:
        with reading(file, _AGAIN):
            weights = dict(torch.load(file, map_location="cpu", weights_only=True))
    return {
        name: weight
        for name, weight in weights.items()
        if isinstance(weight, Tensor) and "rotary_emb" not in name
    }


def _same_signs(copy: Tensor, target: CausalModel) -> bool:
    """Return whether a head's copy of an embedding matches `target`'s."""
    embedding = target.module.get_input_embeddings().weight
    if copy.shape[1:] != embedding.shape[1:]:
        return False
    rows = min(len(copy), len(embedding))
    some = torch.arange(0, rows, max(1, rows // 4096))
    one, other = copy[some].float(), embedding[some.to(embedding.device)].cpu().float()
    return ((one < 0) == (other < 0)).float().mean().item() >= _SAME
