"""What the law does not show: how much is accepted.

Drafts are those of a fresh pass over the whole text, trees are those of the printed algorithms, and
a step accepts as many tokens as enumeration says.
"""

import heapq
from collections import deque
from itertools import islice

import pytest
import torch

from nde_talf import (
    Action,
    Beam,
    DecodingState,
    Delayed,
    DynaTree,
    DySpec,
    DySpecThreshold,
    EagleDrafter,
    LMDrafter,
    Optimal,
    Rng,
    Salf,
    SamplingSetting,
    Shaped,
    SpeculativeDecoder,
)
from nde_talf.decoding.policies.dynatree import DynaTreeConfig
from nde_talf.decoding.sampling.rng import warp
from nde_talf.decoding.sampling.sampling_setting import AUTO, RAW, drafted_under
from tests.decoding.pairs import tiny_pair
from tests.decoding.policies import Kept
from tests.decoding.tables import TableDrafter, Tables, context_of
from tests.draft_training.heads import random_head

PAIR = tiny_pair(12, noise=0.1, hidden=16, layers=2)
ITS_HEAD = random_head(PAIR[0])
SETTINGS = [  # of the target and of the draft (None: what fits the trees)
    (SamplingSetting(0.8, 0.9), None),
    (SamplingSetting(1.0), SamplingSetting(0.6, 0.8)),
]
GROWN = {
    "delayed": (lambda: Delayed(Action(3, 1, 2)), "traversal"),
    "distinct": (
        lambda: Shaped((((), ()), ((),), ()), "without_replacement"),
        "without_replacement",
    ),
    "dyspec": (lambda: DySpec(nodes=8), "without_replacement"),
    "beam": (lambda: Beam(k=3, depth=3, nodes=6), "nss"),
    "salf": (lambda: Salf(nodes=8, batch=2, threshold=0.2), "nss"),
}


@torch.inference_mode()
def fresh_q(kind, text, path, setting):
    """Q behind `text` and the drafted `path`, by a pass over all of it."""
    target, draft = PAIR
    if kind == "lm":
        return warp(draft.module(torch.tensor([[*text, *path]])).logits[0, -1], setting)
    features = target.hidden(
        torch.tensor([text[:-1]]), torch.arange(len(text) - 1)[None], None, None
    )[0]
    head = ITS_HEAD
    outputs = head.combine(features)
    tokens, rows = [*text[1:]], [*outputs]
    for token in (*path, None):  # behind drafted tokens the head feeds back its own output
        whole = head(
            torch.tensor([tokens]),
            torch.arange(len(tokens))[None],
            None,
            None,
            features=torch.stack(rows)[None],
        )[0]
        if token is None:
            return warp(head.logits(whole[-1]), setting)
        tokens.append(token)
        rows.append(whole[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lm", "head"])
@pytest.mark.parametrize("policy", GROWN)
def test_a_draft_is_that_of_a_fresh_pass_whatever_was_rejected_before(policy, kind):
    make, rule = GROWN[policy]
    for setting, draft_setting in SETTINGS:
        watched = Kept(make())
        drafter = LMDrafter(PAIR[1]) if kind == "lm" else EagleDrafter(ITS_HEAD)
        decoder = SpeculativeDecoder(PAIR[0], drafter, watched, rule, draft_setting)
        text, taus = [3, 1, 4, 1, 5], set()
        stream = decoder.stream(text, setting, Rng.seeded(2))
        text.append(next(stream).tokens[0])
        for step in islice(stream, 8):
            _, tree = watched.drafted[-1]
            for node, q in enumerate(tree.q):
                if q is None:
                    continue
                path = context_of(tree, node)
                torch.testing.assert_close(
                    q,
                    fresh_q(
                        kind,
                        text,
                        path,
                        draft_setting or drafted_under(AUTO, setting, watched.trees),
                    ),
                    atol=2e-5,
                    rtol=0,
                )
            text += step.tokens
            taus.add(step.tau)
        assert kind == "head" or (max(taus) > 0 and min(taus) < 3)


# The algorithms as they are printed, one candidate at a time and over the whole vocabulary. q: path
# -> the draft's row.


def dyspec(q, nodes, rng):
    """Algorithm 1, DySpec paper: the place of highest value is drawn at, and falls to what its
    siblings have not got.
    """
    heap, drawn = [(-1.0, (), q(()))], []
    while len(drawn) < nodes and heap:
        negative, path, rest = heapq.heappop(heap)
        token = rng.categorical(rest)
        share = float(rest[token] / rest.sum())
        drawn.append((*path, token))
        heapq.heappush(heap, (negative * share, drawn[-1], q(drawn[-1])))
        rest = rest.clone()
        rest[token] = 0
        if float(rest.sum()) > 0:
            heapq.heappush(heap, (negative * (1 - share), path, rest))
    return drawn


def dyspec_by_threshold(q, threshold, depth, rng):
    """Algorithm 2, DySpec paper, without a budget."""
    drawn, level = [], [((), 1.0)]
    for _ in range(depth):
        grown = []
        for path, value in level:
            rest = q(path).clone()
            while value >= threshold and float(rest.sum()) > 0:
                token = rng.categorical(rest)
                share = float(rest[token] / rest.sum())
                drawn.append((*path, token))
                grown.append((drawn[-1], value * share))
                rest[token] = 0
                value *= 1 - share
        level = grown
    return drawn


def beam(q, k, depth, nodes):
    """EAGLE-2: expand the k best of a level into their k best, re-rank everything seen."""
    seen, level = {}, {(): 1.0}
    for _ in range(depth):
        grown = {}
        for path, value in level.items():
            for token in sorted(range(len(q(path))), key=lambda token: -q(path)[token])[:k]:
                grown[*path, token] = value * float(q(path)[token])
        seen |= grown
        level = dict(sorted(grown.items(), key=lambda item: -item[1])[:k])
    return sorted(seen, key=lambda path: -seen[path])[:nodes]


def salf(q, nodes, batch, threshold, depth):
    """Algorithm 2, SALF & TALF paper, line by line.

    N counts drafted tokens (Appendix D), so that G holds one more: the root. Two things that it
    does not print: it ends where D is empty, which at th = 0 line 13 never would, and nodes at
    `depth` have no children.
    """
    capacity = nodes + 1
    g = {(): 1.0}  # 1
    queue = dict(g)  # 2
    while True:  # 3
        d = []  # 4
        for _ in range(batch):  # 5
            if not queue:  # 6
                break
            n = max(queue, key=queue.__getitem__)  # 7
            pr = queue.pop(n)
            g[n] = pr  # 8
            if len(g) > capacity:
                del g[min(g, key=g.__getitem__)]
            d.append((pr, n))  # 9
        epsilon = min(g.values())  # 10
        if len(g) < capacity:  # 11
            epsilon = 0.0
        d = [(pr, n) for pr, n in d if pr > epsilon]  # 12
        if not d or sum(pr for pr, _ in d) < threshold:  # 13
            break
        for pr, n in d:  # 14
            if len(n) == depth:
                continue
            for v, value in enumerate(q(n).tolist()):  # 15 to 17
                queue[*n, v] = pr * value  # 18 to 20
        while len(queue) > capacity:
            del queue[min(queue, key=queue.__getitem__)]
    return [n for n in g if n]


def dynatree(q, config, room):
    """DRAFTTREE of Algorithm 1, DynaTree paper, line by line, one node after another.

    A node is its path from u_0 on, so that d(u) is one less than its length. `room`: of the
    context, which is not in the paper.
    """
    few, some, many = config.branches
    row = q(()).tolist()  # 10
    u0 = (row.index(max(row)),)
    tree, cumulative = [u0], {u0: max(row)}
    active = deque([u0])  # 11
    while active and len(tree) < config.nodes:  # 12
        u = active.popleft()  # 13: breadth first
        value, d = cumulative[u], len(u) - 1
        if value < config.prune:  # 14
            continue
        if d >= config.max_depth or len(u) >= room:  # 17
            continue
        if value < config.stop:  # 20
            continue
        if d >= config.depth and value < config.deep:  # 23
            continue
        row = q(u).tolist()  # 26
        confidence = max(row)
        if confidence >= config.confident_high:  # 27
            width = few
        elif confidence < config.confident_low:
            width = many
        else:
            width = some
        for token in sorted(range(len(row)), key=lambda token: -row[token])[:width]:  # 28
            if len(tree) < config.nodes:
                v = (*u, token)
                tree.append(v)
                cumulative[v] = value * row[token]
                active.append(v)
    return tree  # 30


DEPTH = 3
CONFIG = DynaTreeConfig(
    nodes=9, depth=1, max_depth=2, confident_low=0.35, confident_high=0.45, prune=0.03, stop=0.05
)
WIDE = DynaTreeConfig(branches=(2, 3, 4), nodes=30, depth=2, max_depth=4, deep=0.3)
PRINTED = {
    "dyspec": (lambda: DySpec(nodes=9), lambda q, rng: dyspec(q, 9, rng)),
    "dyspec by threshold": (
        lambda: DySpecThreshold(threshold=0.05, nodes=1000),
        lambda q, rng: dyspec_by_threshold(q, 0.05, DEPTH, rng),
    ),
    "beam": (lambda: Beam(k=2, depth=3, nodes=7), lambda q, _: beam(q, 2, 3, 7)),
    **{
        f"salf {threshold}": (
            lambda threshold=threshold: Salf(nodes=30, batch=3, threshold=threshold),
            lambda q, _, threshold=threshold: salf(q, 30, 3, threshold, DEPTH),
        )
        for threshold in (0.2, 0.5, 0.8)
    },
    **{
        f"optimal, {batch}": (
            lambda batch=batch: Optimal(nodes=8, batch=batch),
            lambda q, _, batch=batch: salf(q, 8, batch, 0.0, DEPTH),
        )
        for batch in (1, 3, 12)
    },
    "dynatree": (lambda: DynaTree(CONFIG), lambda q, _: dynatree(q, CONFIG, DEPTH)),
    "dynatree, wide": (lambda: DynaTree(WIDE), lambda q, _: dynatree(q, WIDE, DEPTH)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_a_policys_tree_is_that_of_the_printed_algorithm(name):
    make, printed = PRINTED[name]
    sizes = set()
    for seed in range(25):
        tables = Tables("random", seed=seed, vocabulary=5)
        room = 100 if name == "dyspec" else DEPTH
        state = DecodingState(0, 1, room, RAW, None, None)
        tree = make().draft(state, TableDrafter(tables), Rng.seeded(seed))
        paths = sorted(context_of(tree, node) for node in range(1, len(tree)))
        assert paths == sorted(
            printed(lambda path, tables=tables: tables(path)[1], Rng.seeded(seed))
        ), seed
        sizes.add(len(paths))
    assert len(sizes) > 1 or name in ("dyspec", "beam") or "optimal" in name
