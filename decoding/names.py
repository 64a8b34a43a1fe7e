"""Names of verification rules that a configuration may hold.

They are apart from the rules themselves, which need torch.
"""

LABELLED = ("naivetree", "nss", "specinfer", "spectr", "khisti", "traversal", "gbv")
"""Rules for which `nde_talf.decoding.rules.labels` estimates E[tau + 1] of every tree."""

ON_PATHS = {"naive": "naivetree", "bv": "traversal"}
"""Rules of single paths: their labels are those of another rule, of that path alone."""

FORWARDS = ("auto", "native", "transformers")
"""Whose forward passes a `nde_talf.decoding.model.CausalModel` runs."""
