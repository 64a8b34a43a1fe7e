"""What plugs into other engines: `generate` of transformers, and vLLM."""
