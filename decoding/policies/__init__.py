"""What tree to draft next.

Each policy builds a `DraftTree` by asking a drafter for distributions.
"""
