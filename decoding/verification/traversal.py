"""Traversal verification: bottom-up in depth-first order, the leaf first. On a single path it is block verification.

The weight a node arrives with is the probability that something in its subtree is accepted once it is visited,
whatever the subtree looks like; this is why merged prefixes stay lossless.
"""

from decoding.sampling import Coins
from decoding.tree import DraftTree, Verdict
from decoding.verification.residual import Residual


def traversal(tree: DraftTree, coins: Coins) -> Verdict:
    """Verify `tree` by visiting children before their parent; a repeated draw only updates the residual."""

    def visit(node: int, w0: float) -> Verdict | None:
        residual = Residual(tree.p[node], tree.q[node], w0)
        seen = set()
        for child in tree.children[node]:
            if child not in seen:
                seen.add(child)
                weight = residual.weight(tree.tokens[child])
                # A child of weight 0 would be rejected with certainty, and everything below it.
                verdict = visit(child, weight) if weight > 0 else None
                if verdict is not None:
                    return Verdict([child, *verdict.path], verdict.token)
            residual.reject()
        # At the root w0 = 1, so z / d = 1 and something is always accepted (also where rounding left z = 0).
        keep = 1.0 if w0 >= 1 else residual.z / residual.d
        return Verdict([], coins.draw(residual.target())) if coins.accept(keep) else None

    return visit(0, 1.0)
