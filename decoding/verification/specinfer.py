"""SpecInfer: children are tried one after another in draft order, each against the current residual.

Round i accepts x with min(1, p_i(x) / q(x)), p_{i+1} = norm((p_i - q)_+). Lossless for i.i.d. children in
any order that does not look at token values; draft order keeps branching probabilities O(k).
"""

from decoding.sampling import Coins
from decoding.tree import DraftTree, Verdict
from decoding.verification.residual import Residual


def specinfer(tree: DraftTree, coins: Coins) -> Verdict:
    """Top-down walk with SpecInfer's OTLP solver (Algorithm 4, paper 000)."""
    node, path = 0, []
    while True:
        residual = Residual(tree.p[node], tree.q[node])
        for child in tree.children[node]:
            if coins.accept(residual.weight(tree.tokens[child])):
                node = child
                path.append(child)
                break
            residual.reject()
        else:
            return Verdict(path, coins.draw(residual.target()))
