"""The exact law of what one step emits, and how far it is from the target's."""

import torch
from scipy.optimize import linprog

from nde_talf import SamplingSetting
from nde_talf.decoding.rules.labels.branching import Bundle
from nde_talf.decoding.rules.labels.pooling import branch_gains, pooled, trunk_reach
from nde_talf.decoding.sampling.rng import warp
from nde_talf.decoding.sampling.sampling_setting import RAW
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.decoding.testing import exact_law
from tests.decoding.tables import Tables, emitted, scored


def distance(law, other):
    return max(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys())


def step_error(tables, policy, rule, length, room=1 << 20):
    """Largest difference of probability between the first `length` tokens that a step emits,
    continued by the target, and the target's.

    What follows the step is not enumerated: its law is p's, of which the float64 quotients are
    taken.
    """
    law = exact_law(lambda rng: emitted(scored(tables, policy, rng, room), rule, rng))
    assert abs(sum(law.values()) - 1) < 1e-12
    return distance(continued(law, tables, length), continued({(): 1.0}, tables, length))


def continued(law, tables, length):
    """The law of the first `length` tokens where p goes on behind those of `law`."""
    law_of_all = {}
    for tokens, probability in law.items():
        parts = {tokens[:length]: probability}
        for _ in range(length - len(tokens)):
            parts = {
                (*head, t): x * y
                for head, x in parts.items()
                for t, y in enumerate(_shares(tables(head)[0]))
            }
        for whole, part in parts.items():
            law_of_all[whole] = law_of_all.get(whole, 0.0) + part
    return law_of_all


def _shares(row):
    return (row.double() / row.double().sum()).tolist()


def expected_block_efficiency(p, q, tokens, verifier, layout=None):
    """Labels [T, A] of super-trees with `tokens` [T, N], from all rows p, q [T, N_inner, V] at once."""
    layout = layout or super_tree_layout()
    tree = torch.arange(len(p))[:, None, None, None]
    rows = p.flatten(0, 1), q.flatten(0, 1)

    def bundle(paths):
        nodes = (layout.parents[paths] + tree * p.shape[1]).flatten(0, 1)
        return Bundle(*rows, tokens[tree, paths].flatten(0, 1), nodes)

    # The trunk as bundles of one draw: its levels are independent until they are multiplied up.
    trunk = torch.arange(1, layout.l1 + 1).view(-1, 1, 1)
    reach, exact = trunk_reach(bundle(trunk), len(p), verifier)
    gains = branch_gains(bundle(layout.paths), reach.flatten(), verifier)
    return pooled(reach, exact, gains, layout)


GAPS = (10, 14, 16, 17, 18, 25, 40, 80)
# Name -> (logits of p, logits of q, setting of p, setting of q). Position 0 of the logits is the
# favourite.
PEAKED = {
    **{f"gap {gap}": ([0, 1, 0.5, 0.8], [gap, 1, 0.2, 0.7], RAW, RAW) for gap in GAPS},
    "both peaked": ([20, 17, 3, 1], [18, 2, 17, 0], RAW, RAW),
    "two steps": ([0, 0.4, 1, 2], [35, 17, 0.5, 0], RAW, RAW),
    "ties": ([1, 1, 1, 0], [17, 17, 0, 0], RAW, RAW),
    "equal": ([17, 0, 1, 9], [17, 0, 1, 9], RAW, RAW),
    "one-hot draft": ([0, 1, 0.5, 0.8], [3, 1, 1, 0], RAW, SamplingSetting(0.0)),
    "one-hot target": ([3, 1, 1, 0], [16.5, 1, 0.5, 0.8], SamplingSetting(0.0), RAW),
    "cold draft": ([1, 2, 0.5, 0], [6, 2, 0.5, 1], RAW, SamplingSetting(0.3)),
    "top-p of the target": ([2, 1, 0.5, 0.8], [17, 1, 0.2, 0.7], SamplingSetting(1.0, 0.7), RAW),
    "top-p of the draft": ([2, 1, 0.5, 0.8], [1, 3, 2, 0.7], RAW, SamplingSetting(1.0, 0.9)),
    "top-p of both": (
        [0, 1, 3, 3],
        [3, 2.5, 1, 1],
        SamplingSetting(1.0, 0.9),
        SamplingSetting(0.7, 0.9),
    ),
}


class PeakedTables(Tables):
    """p(. | context) and q(. | context) of a kind, with exact ones, zeros and ties, in `dtype`.

    Every context turns the logits round, so that rows differ.
    """

    def __init__(self, kind, dtype=torch.float32, vocabulary=4):
        super().__init__(kind, vocabulary=vocabulary)
        p, q, self.target, self.draft = PEAKED[kind]
        self.p, self.q = (torch.tensor(logits[:vocabulary], dtype=dtype) for logits in (p, q))

    def _make(self, context):
        turn = sum((at + 1) * (token + 1) for at, token in enumerate(context))
        p, q = (logits.roll(turn) for logits in (self.p, self.q))
        return warp(p, self.target), warp(q, self.draft)


def truncated_program(p, a, q, s):
    """Section 4 of Khisti et al.: the most of p that a stage between Y ~ a and X ~ q can cover,
    where pairs of the s tokens of largest p - a q are shared out by a linear program, and in every
    other pair the one of larger p - a q wins. With s = V and a = q it is alpha* for k = 2.
    """
    order = sorted(range(len(p)), key=lambda t: (-(p[t] - a[t] * q[t]), -t))
    pairs = [(i, j) for at, i in enumerate(order) for j in order[at:]]
    mass = [a[i] * q[j] + (i != j) * a[j] * q[i] for i, j in pairs]
    shares = [
        (n, token) for n, (i, j) in enumerate(pairs) for token in {i, j if j in order[:s] else i}
    ]
    limits = [[float(pair == n) for pair, _ in shares] for n in range(len(pairs))]
    limits += [[float(token == t) for _, token in shares] for t in range(len(p))]
    tight = dict.fromkeys(("primal_feasibility_tolerance", "dual_feasibility_tolerance"), 1e-10)
    costs = [-1.0] * len(shares)
    return -linprog(costs, limits, [*mass, *p], method="highs", options=tight).fun
