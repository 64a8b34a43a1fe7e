"""The tokenizer that target and draft share, and its chat template."""

from transformers import PreTrainedTokenizerBase

from nde_talf.data.dialogues.chat_mask import ChatEncoder
from nde_talf.data.text.pair import check_tokenizers
from nde_talf.data.text.templates import ChatTemplate, check_ids, load_tokenizer
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.models.loading import read_config
from nde_talf.pipelines.config.schema import Config, ModelConfig


def shared_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer.

    It has to mark the end of a text, and to agree with the draft's on every token of both.
    """
    target, where = load_tokenizer(model.target, "model.target"), f"model.target={model.target}"
    if target.eos_token_id is None:
        raise UserError(f"{where}: its tokenizer has no end-of-text token (eos_token); set one.")
    rows = read_config(str(model.target), "model.target").get_text_config().vocab_size
    check_ids(target, rows, where)
    if draft := model.given.get("draft"):
        vocabulary = load_tokenizer(draft, "model.draft").get_vocab()
        check_tokenizers(target.get_vocab(), vocabulary, f"model.draft={draft}")
    return target


def check_template(config: Config) -> None:
    """Raise UserError before any work for a chat template that is missing or does not work."""
    own, sets = config.dialogues, config.data.sets.items()
    chats = [f"data.sets.{name}.chat" for name, one in sets if one.chat is not False]
    own_text = own.source and config.stage in ("all", "draft")
    if config.model.target and (own_text or chats):
        tokenizer = shared_tokenizer(config.model)
        if chats and tokenizer.chat_template:
            ChatTemplate(tokenizer, chats[0])
        if own_text:
            ChatEncoder(tokenizer, own.chat_template, own.template_options)
