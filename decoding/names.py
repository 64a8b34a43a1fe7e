"""Names of verification rules that a configuration may hold.

They are apart from the rules themselves, which need torch.
"""

LABELLED = ("naivetree", "nss", "specinfer", "spectr", "khisti", "khisti_lp", "traversal", "gbv")
"""Rules for which `nde_talf.decoding.rules.labels.pooling` estimates E[tau + 1] of every tree."""

ON_PATHS = {"naive": "naivetree", "bv": "traversal"}
"""Rules of single paths -> the rule whose labels of that path alone they take."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Types of a model's weights."""
PRODUCTS = ("auto", "plain", "onednn", "packed", "onednn-many", "packed-many")
"""Ways of multiplying with large matrices on a CPU, see `forward.onednn`."""
GRAPHS = ("compiled", "recorded")
"""Ways of making CUDA graphs of passes of static shapes, see `recorded_step.SHAPES`."""
