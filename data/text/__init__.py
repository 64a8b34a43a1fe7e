"""Text: corpora, prompts, the tokenizer, and the pair on disk from which later stages start."""
