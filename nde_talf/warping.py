"""`warp` for callers outside the decode loop, with its arguments checked."""

from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.sampling.rng import warp as warp_unchecked

warp = checked(warp_unchecked)
