"""Policies that choose the next draft tree.

Each policy builds a `DraftTree` by asking a drafter for distributions.
"""
