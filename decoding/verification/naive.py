"""NaiveTree: speculative sampling on the first child; the residual may still land on another one.

On a single path this is the original speculative sampling (Naive).
"""

from decoding.sampling import Coins
from decoding.tree import DraftTree, Verdict
from decoding.verification.residual import Residual


def naivetree(tree: DraftTree, coins: Coins) -> Verdict:
    """Top-down walk with the Naive OTLP solver (Algorithm 2, paper 000)."""
    node, path = 0, []
    while True:
        children = tree.children[node]
        residual = Residual(tree.p[node], tree.q[node])
        if children:
            if coins.accept(residual.weight(tree.tokens[children[0]])):
                node = children[0]
                path.append(node)
                continue
            residual.reject()
        token = coins.draw(residual.target())
        hit = next((child for child in children if tree.tokens[child] == token), None)
        if hit is None:
            return Verdict(path, token)
        node = hit
        path.append(hit)
