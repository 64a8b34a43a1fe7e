"""Dialogues: read them, mask what an assistant says, let the target answer anew, pack them into rows of tokens."""
