"""Prompts and corpora, engines that generate, and the traces a selector learns from.

Imports `decoding` only.
"""
