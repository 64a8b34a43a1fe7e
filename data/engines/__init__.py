"""What generates the text of traces and dialogues: transformers or vLLM, with one interface."""
