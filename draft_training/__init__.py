"""Training of drafts: small language models, distilled or not, and EAGLE-style draft heads.

Imports `data` and `decoding`.
"""
