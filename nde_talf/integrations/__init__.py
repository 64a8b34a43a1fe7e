"""Plugs for other engines: `generate` of transformers, and vLLM."""
