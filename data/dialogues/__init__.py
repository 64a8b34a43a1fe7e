"""Dialogues: read them, find what an assistant says in them, let the target answer anew, pack them into rows of tokens."""
