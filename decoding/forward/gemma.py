"""Native forward passes of Gemma 2 and 3."""

from nde_talf.decoding.forward.native import NativeForward
from nde_talf.decoding.registry import family


@family("gemma3_text")
class Gemma3Forward(NativeForward):
    """Gemma 3: norms multiply by 1 + w."""

    added = True


@family("gemma2")
class Gemma2Forward(Gemma3Forward):
    """Gemma 2: attention scores are capped too."""

    capped_scores = True
