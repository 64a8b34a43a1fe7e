"""Who generates the text of traces and dialogues: transformers or vLLM, behind one interface."""
