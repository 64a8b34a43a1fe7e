"""Dialogues: reading, masking, answering anew by the target, packing into rows of tokens."""
