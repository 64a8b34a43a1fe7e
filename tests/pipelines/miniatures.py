"""Miniatures of published models: a configuration's class with its peculiarities, and a few layers of 32 numbers."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig

from nde_talf.data.text.shipped import SMALL
from nde_talf.data.text.tokenizer import train_tokenizer
from nde_talf.decoding.models.loading import architecture
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.config.schema import Config
from tests import ROOT
from tests.decoding.families import EYES

TOKENS, ROWS, WINDOW, CONTEXT = 300, 320, 16, 512
"""Tokens of a miniature's tokenizer; rows of its output layer, at least; its windows; its longest
text.
"""
SIZES = json.loads(Path(__file__).with_name("miniatures.json").read_text())
"""Of a text model, and of a run."""


def presets():
    """The presets of models that are neither trained here nor shipped."""
    files = sorted((ROOT / "configs/model").glob("*.yaml"))
    given = [path.stem for path in files if "target:" in path.read_text()]
    return [name for name in given if name != SMALL]


PUBLISHED = ROOT / "tests/fixtures/published"


def published(name):
    """Return the configuration of a published model."""
    content = json.loads((PUBLISHED / f"{name.replace('/', '--')}.json").read_text())
    return AutoConfig.for_model(**content)


def shrink(config, rows=ROWS):
    """A configuration of the same class with the same peculiarities, and small sizes.

    Tied or untied output layers, soft caps, scales, biases and kinds of rotary positions stay.
    Windows become 16 tokens. There is one layer of each kind, two at least. Heads stay grouped or
    not, and their size stays other than hidden / heads.

    Args:
        rows: of the output layer.
    """
    config = deepcopy(config)
    text = config.get_text_config()
    heads, kv = getattr(text, "num_attention_heads", 1), getattr(text, "num_key_value_heads", None)
    odd = getattr(text, "head_dim", None) not in (None, text.hidden_size // heads)
    projected = getattr(text, "word_embed_proj_dim", text.hidden_size) != text.hidden_size
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    small = {
        name: value
        for name, value in SIZES["text"].items()
        if getattr(text, name, None) is not None
    }
    small |= {
        "vocab_size": rows,
        "num_hidden_layers": max(2, len(kinds)),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if kv:
        small["num_key_value_heads"] = 4 if kv == heads else 1 if kv == 1 else 2
    if getattr(text, "head_dim", None):
        small["head_dim"] = 12 if odd else 8
    if hasattr(text, "word_embed_proj_dim"):
        small["word_embed_proj_dim"] = 16 if projected else 32
    if getattr(text, "query_pre_attn_scalar", None):
        small["query_pre_attn_scalar"] = 20
    if kinds and not isinstance(getattr(type(text), "layer_types", None), property):
        small["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
    for name, value in small.items():
        setattr(text, name, value)
    rope = getattr(text, "rope_parameters", None) or {}
    for part_of in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part_of.get("original_max_position_embeddings"):
            part_of["original_max_position_embeddings"] = CONTEXT // 4
    if vision := getattr(config, "vision_config", None):
        for name, value in EYES.items():
            setattr(vision, name, value)
        config.mm_tokens_per_image = 4
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, 0)
    return config


def build(config, folder, tokenizer, seed):
    """Save a model of this configuration with random weights, and the tokenizer, as a user's own
    model.
    """
    torch.manual_seed(seed)
    architecture(config)[0].from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def texts():
    """Modules of this project."""
    return [path.read_text() for path in sorted((ROOT / "decoding").rglob("*.py"))]


def miniature(preset, folder):
    """The run of a preset with miniatures of its models in `folder`: its stages, methods and
    losses, on this project's own text, with few prompts and steps.

    Output layers differ by as many rows as those of the published models.
    """
    config = composed(Config, f"model={preset}", f"paths.checkpoints={folder}/runs", *SIZES["run"])
    tokenizer = train_tokenizer(texts(), TOKENS)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    names = {"target": config.model.target, "draft": config.model.draft}
    models = {role: published(name) for role, name in names.items() if name}
    rows = {role: one.get_text_config().vocab_size for role, one in models.items()}
    for seed, (role, one) in enumerate(models.items()):
        build(shrink(one, ROWS + rows[role] - min(rows.values())), folder / role, tokenizer, seed)
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    traced, asked = config.traces, config.evaluation
    first = [name for name in asked.settings if name in traced.settings][:1] or traced.settings[:1]
    return replace(
        config,
        model=replace(config.model, **{role: str(folder / role) for role in models}),
        data=replace(config.data, source=str(corpus), sets={}, mix={}),
        traces=replace(traced, settings=first),
        evaluation=replace(asked, settings=first),
        dialogues=replace(config.dialogues, source=None),
    )


def from_pair_to_report(preset, folder):
    """Run a preset's miniature, and name the folders of the stages that finished."""
    import nde_talf.pipelines.run

    config = miniature(preset, folder)
    nde_talf.pipelines.run.run(config)
    finished = Path(config.paths.checkpoints, config.run).glob("*/manifest.json")
    return sorted(path.parent.name for path in finished)
