"""Text: corpora, prompts, the tokenizer, and the pair on disk that every later stage starts from."""
