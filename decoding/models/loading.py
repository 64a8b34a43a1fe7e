"""Load a transformers causal LM in full or not at all.

No weight is missing, of another shape, or not a number. transformers fills missing weights with
random numbers, other ones at every load. Here they are an error that names them.
"""

import math
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.common.checksums import check_checksums
from nde_talf.decoding.common.device_check import check_device
from nde_talf.decoding.common.errors import Advice, UserError, first_line, memory_is_short
from nde_talf.decoding.common.files import read_json, unreadable
from nde_talf.decoding.common.model_record import lacks
from nde_talf.decoding.common.settings import one_of
from nde_talf.decoding.common.tensors import LARGEST, unsound
from nde_talf.decoding.models.forward.transformers import optional
from nde_talf.decoding.models.gguf import model_folder
from nde_talf.decoding.names import DTYPES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
    "factor",
)
"""Fields of config.json that are positive."""
RESTORE = "train or export the model again; a folder of converted GGUF may be deleted"
MOST = 4
"""Names that an error lists."""
_OTHER_HEADS = re.compile("Classif|Reward|Score|Regress|ValueHead|Critic|QuestionAns|MaskedLM")
"""Architectures of models with another output than a next token."""
_HEADS = ("score", "classifier", "v_head", "value_head", "reward_head", "qa_outputs")
"""Names of such outputs."""
_POSITIONS = (".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")
"""Ends of names of constants that old exports hold and that are computed nowadays."""


@checked
def load_module(
    folder: str | Path,
    device: str,
    dtype: Annotated[str, one_of(DTYPES)],
    name: str,
    device_map: Annotated[str, one_of(("auto",))] | None,
) -> "PreTrainedModel":
    """Load the model in `folder` (or of that hub name) on `device`, in `dtype`.

    device_map: places the parts as accelerate does, in place of `device`. A model with a part for
    images around a language model is loaded with it. A quantised checkpoint stays as it is stored.

    Raises:
        UserError: there is no causal LM; a library that reads its quantised weights is missing; the
            checksums of a model that this project trained do not match its files; a weight is
            missing, has another shape than config.json says, belongs to no layer of config.json,
            or is not a finite number. The message names `name`, the
            folder and the weights.
    """
    check_device(device, "device")
    folder = model_folder(folder, name)
    check_checksums(Path(folder), f"{name}=", RESTORE)
    config = read_config(folder, name)
    quantised = optional(config, "quantization_config")
    try:
        auto, attention = architecture(config)
        loaded: Any = auto.from_pretrained(
            str(folder),
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below
            device_map=device_map or (None if device == "cpu" else {"": device}),
        )
    except Exception as error:  # transformers raises whatever a damaged file leads to
        raise _not_loaded(error, f"{name}={folder}", bool(quantised)) from error
    model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    _check_names(model, report, f"{name}={folder}")
    if any(weight.is_meta for weight in model.parameters()):
        raise UserError(
            f"{name}={folder}: the GPUs have no room for all of its weights. Use more of them, or"
            " quantised weights."
        )
    _check_numbers(model, f"{name}={folder}", dtype)
    return model


def read_config(where: str | Path, name: str) -> "PretrainedConfig":
    """Read the configuration of a causal language model; nothing is allocated.

    Raises:
        UserError: there is none, or another kind of model's; the message names `name`.
    """
    from transformers import AutoConfig

    where = model_folder(where, name)
    folder = Path(where)
    try:
        if (folder / "config.json").exists():
            check_fields(read_json(folder / "config.json", again="download the model again"))
        if lacking := lacks(folder):
            raise UserError(f"{name}={where}: {lacking}.")
        config = AutoConfig.from_pretrained(str(where), trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:
        raise _not_loaded(error, f"{name}={where}", False) from error
    if other := [each for each in config.architectures or () if _OTHER_HEADS.search(each)]:
        raise UserError(
            f"{name}={where}: it is a {other[0]}, which scores texts and writes none. Give the"
            " language model that it was made from."
        )
    return config


def _not_loaded(error: Exception, where: str, quantised: bool) -> UserError:
    """Say why a model could not be loaded, and what to do."""
    if quantised and isinstance(error, ImportError):
        return UserError(
            f"{where}: its weights are quantised, and a library that reads them is missing:"
            f" {first_line(error)} Install it, or choose a checkpoint that is not quantised."
        )
    if memory_is_short(error):
        return unreadable(where, error, "")
    if "connect" in str(error) and not Path(where.partition("=")[2]).exists():
        return UserError(
            f"{where}: the hub cannot be reached, and the model is not in its cache. Check the"
            " connection, or give a folder or a GGUF file."
        )
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    whole = re.split(" or see how to run| Model type should be", str(error))[0]
    advice = (
        "Give a decoder-only model: a folder with config.json and safetensors weights, or a hub"
        " name."
    )
    if isinstance(error, (SafetensorError, FileNotFoundError)) or "o file named" in whole:
        advice = "Its files are cut, or not all there: download the model again."
    return UserError(
        f"{where}: no causal language model could be loaded from there"
        f" ({kind}{shorten(whole, 300, placeholder=' ...')}). {advice}"
    )


def check_fields(config: dict[str, Any], within: str = "") -> None:
    """Raise ValueError for a number that is not finite, or a size that is not positive."""
    for name, value in config.items():
        if isinstance(value, dict) and name in ("text_config", "rope_parameters", "rope_scaling"):
            check_fields(value, f"{within}{name}.")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and not (math.isfinite(value) and (value > 0 or name not in _SIZES)):
            raise ValueError(f"its config.json says {within}{name}={value}, which no model has")


def architecture(config: "PretrainedConfig") -> tuple[Any, str]:
    """Choose the Auto class that makes a language model of `config`, and its attention.

    The language model may be alone or inside one for images. The attention is sdpa, or eager where
    that lacks something (gpt-oss' sinks, Gemma 2's soft cap on scores, which sdpa leaves out).
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kinds = AutoModelForCausalLM, AutoModelForImageTextToText
    auto = next(
        (kind for kind in kinds if type(config) in kind._model_mapping), AutoModelForCausalLM
    )
    made: Any = auto._model_mapping.get(type(config), None)
    capped = optional(config.get_text_config(), "attn_logit_softcapping")
    return auto, "eager" if capped or (made and not made._supports_sdpa) else "sdpa"


def _check_names(model: nn.Module, found: dict[str, Any], where: str) -> None:
    mismatched = [
        f"{key} {tuple(stored)}, not {tuple(expected)}"
        for key, stored, expected in found["mismatched_keys"]
    ]
    faults = {
        "are missing": sorted(found["missing_keys"]),
        "have another shape": sorted(mismatched),
        "belong to another architecture": sorted(foreign_names(model, found["unexpected_keys"])),
    }
    left = {name for name in found["unexpected_keys"] if not name.endswith(_POSITIONS)}
    if any(faults.values()):
        raise UserError(
            f"{where}: its weights are not those of the model that its config.json describes, which"
            " would run with random numbers in their place. Of them,"
            f" {'; '.join(_listed(what, names) for what, names in faults.items() if names)}."
            " Download or export it again, or give the config.json that belongs to the weights."
        )
    if left:
        warnings.warn(
            f"{where}: {_listed('are in its files and in no part of the model', sorted(left))}:"
            " they are not used.",
            Advice,
            stacklevel=2,
        )


def foreign_names(model: nn.Module, unexpected: Iterable[str]) -> list[str]:
    """List the unexpected weights that belong to a layer that the model has, or beyond its last.

    They show that the weights are another model's. What is outside (a tower for images, say)
    belongs to a larger model around it.
    """
    modules = dict(model.named_modules())

    def of_a_layer(name: str) -> bool:
        parts = name.split(".")
        numbered = (".".join(parts[:at]) for at, part in enumerate(parts) if part.isdigit())
        return (
            parts[0] in _HEADS
            or ".".join(parts[:-1]) in modules
            or any(isinstance(modules.get(layers), nn.ModuleList) for layers in numbered)
        )

    return [name for name in unexpected if not name.endswith(_POSITIONS) and of_a_layer(name)]


@torch.no_grad()
def _check_numbers(model: nn.Module, where: str, dtype: str) -> None:
    """Raise UserError for weights that are not finite."""
    if broken := unsound(model.named_parameters(), LARGEST):
        raise UserError(
            f"{where}: {_listed('hold NaN, infinite or huge numbers', sorted(broken))} (as"
            f" {dtype})."
            " Download or export the model again; if it is finite in a wider type, set model.dtype"
            " to that."
        )


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"{', '.join(names[:MOST])}{more} {what}"
