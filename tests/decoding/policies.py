"""Every policy, small, and a rule that takes its trees."""

from nde_talf import (
    Action,
    Beam,
    Delayed,
    DynaTree,
    DySpec,
    DySpecThreshold,
    Salf,
    Shaped,
    TreePolicy,
    fixed_shape,
)


class Kept(TreePolicy):
    """A policy, with the trees that it drafted and the states it saw."""

    def __init__(self, policy):
        self.policy, self.trees, self.drafted = policy, policy.trees, []

    def draft(self, state, drafter, rng):
        tree = self.policy.draft(state, drafter, rng)
        self.drafted.append((state, tree))
        return tree


EVERY_POLICY = {
    "delayed": (lambda: Delayed(Action(3, 4, 4)), "specinfer"),
    "beam": (lambda: Beam(k=3, depth=6, nodes=12), "nss"),
    "salf": (lambda: Salf(nodes=12, batch=3, threshold=0.2), "nss"),
    "dynatree": (DynaTree, "nss"),
    "dyspec": (lambda: DySpec(nodes=12), "without_replacement"),
    "threshold": (lambda: DySpecThreshold(threshold=0.01, nodes=12), "without_replacement"),
    "fixed": (lambda: Shaped(fixed_shape(6, 2, 20), "iid"), "specinfer"),
}
