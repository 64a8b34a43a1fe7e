"""Dialogues: read them, mask all but the assistant's tokens, let the target answer anew, pack them
into rows of tokens.
"""
