"""What drafts and how it learns to: small language models trained and distilled here, and
EAGLE-style heads.

Imports `data` and `decoding`.
"""
