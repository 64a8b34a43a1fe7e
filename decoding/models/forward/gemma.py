"""Native forward passes of Gemma 2 and 3."""

from nde_talf.decoding.models.forward.native import NativeForward
from nde_talf.decoding.registry import family


@family("gemma2")
@family("gemma3_text")
class GemmaForward(NativeForward):
    """Norms multiply by 1 + w."""

    added = True
