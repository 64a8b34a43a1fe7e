"""Engines that generate the text of traces and dialogues: transformers or vLLM."""
