"""A run without data: a target writes its prompts, its text and its dialogues, each of them once."""

from unittest.mock import Mock

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.text.pair import Pair
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.runs.record import completed
from nde_talf.pipelines.stages import pair
from nde_talf.pipelines.stages.dialogues import asked_dialogues, dialogue_rows
from tests.data.chat_templates import template
from tests.draft_training.heads import tiny_target

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, "\n", *map(chr, range(32, 127))]
COUNT = 8


@pytest.fixture
def target(tmp_path):
    """A folder with a target of single letters, whose texts can be printed whatever it samples."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, "?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    tokenizer.chat_template = template("qwen2")
    model = tiny_target(vocabulary=len(tokenizer))
    model.module.generation_config.eos_token_id = [0, *range(90, 99)]
    for save in (model.module.save_pretrained, tokenizer.save_pretrained):
        save(tmp_path / "target")
    return tmp_path / "target", tokenizer


def configured(folder, **more) -> Config:
    keys = {"data": "self", "model.target": folder, "model.length": 32, "data.answers": 24}
    keys |= {"data.self_made.count": COUNT, "data.prompt_count": COUNT, "engine.batch": 16}
    keys |= {"dialogues.new_tokens": 12, "dialogues.length": 250, "dialogues.held_out": 0.4, **more}
    return composed(Config, *(f"{key}={value}" for key, value in keys.items()))


def test_a_chat_model_asks_and_answers_and_is_not_asked_twice(target, tmp_path, monkeypatch):
    folder, tokenizer = target
    folders = {name: tmp_path / name for name in ("pair", "draft")}
    folders["pair"].mkdir()
    config = configured(folder)
    own = asked_dialogues(config.dialogues, "self", tokenizer)
    assert own.source == "self" and own.regenerate
    both = []
    for _ in range(2):
        pair.work(config, folders, Mock())
        both.append(dialogue_rows(config, own, folders, tokenizer, 250))
        monkeypatch.delattr(TransformersEngine, "sample", raising=False)
    made, again = both
    assert all((a.tokens == b.tokens).all() for a, b in zip(made, again, strict=True))
    stored = Pair(folders["pair"])
    assert not len(stored.rows("train")) and len(stored.rows("held_out"))
    prompts = [prompt.tokens for prompt in stored.every_prompt()]
    texts = "".join(tokenizer.decode(part.tokens.flatten()) for part in made)
    assert len(prompts) == COUNT and "<|im_start|>user\n" in texts
    asked = [tokenizer.decode(tokens).partition("user\n")[2] for tokens in prompts]
    assert all(question.endswith("assistant\n") for question in asked)
    assert not any(question in texts for question in asked)


def test_a_base_model_writes_text_and_prompts_are_cut_from_what_is_held_out(target, tmp_path):
    folder, tokenizer = target
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    options = {"data.prompt_tokens": "[2,40]", "data.held_out": 0.4, "data.self_made.tokens": 48}
    options |= {"data.self_made.count": 6 * COUNT, "data.prompt_count": 4}
    config = configured(folder, **options)
    assert asked_dialogues(config.dialogues, "self", tokenizer) is config.dialogues
    pair.work(config, {"pair": tmp_path / "pair"}, Mock())
    stored = Pair(tmp_path / "pair")
    assert len(stored.rows("train")) and len(stored.rows("held_out"))
    assert len(stored.every_prompt()) == 4


def test_a_target_without_data_writes_its_own(tmp_path, capsys):
    root = f"paths.checkpoints={tmp_path}"
    for given, own in (
        (["model.target=x"], True),
        (["model.target=x", "data.prompt_count=20"], True),
        (["model.target=x", "data=gsm8k"], False),
        (["model.target=x", "data.source=stdlib"], False),
        (["model=tiny3"], False),
        ([], False),
    ):
        assert ("data=self" in completed([root, *given])) == own
    assert "the target writes text itself" in " ".join(capsys.readouterr().out.split())
