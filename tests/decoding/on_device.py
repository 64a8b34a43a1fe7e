"""Rules with policies whose trees can stay on a device."""

from nde_talf.decoding.actions import Action
from nde_talf.decoding.policies.delayed import Delayed, FollowTau

METHODS = [
    ("specinfer", Delayed(Action(3, 2, 2))),
    ("traversal", Delayed(Action(2, 1, 3))),
    ("nss", FollowTau(2, 2, 8)),
    ("bv", Delayed(Action(1, 0, 4))),
]
