"""Drafts and how they learn: small language models trained and distilled here, EAGLE-style heads.

Imports `data` and `decoding`.
"""
