"""Trees of a head computed one node at a time, as references of the batched forward pass."""

import torch

from nde_talf.decoding.models.tree_session import TreeSession
from nde_talf.draft_training.targets.target_trees import TreeLevel


def random_levels(batch, roots, k, depth, vocabulary):
    generator = torch.Generator().manual_seed(0)

    def draw(high):
        return torch.randint(high, (batch, roots, k), generator=generator)

    return [TreeLevel(draw(vocabulary), draw(k) if d else draw(1)) for d in range(depth)]


def branch_by_branch(head, tokens, features, roots, levels):
    """`tree_features` as decoding does it: a session for every root, one node at a time, parents'
    outputs fed back.
    """
    outputs = [torch.stack([_entries(head, tokens[b], features[b])[1] for b in range(len(tokens))])]
    nodes = [[] for _ in levels]
    for b in range(len(tokens)):
        for r, root in enumerate(roots.tolist()):
            session, prefix = _entries(head, tokens[b, : root + 1], features[b, :root])
            above = [(-1, prefix[-1])]
            for level, outputs_of_level in zip(levels, nodes, strict=True):
                grown = []
                for token, parent in torch.stack([level.tokens, level.parents], -1)[b, r].tolist():
                    (row, feature), at = above[parent], session.rows
                    (output,) = session.grow([token], [row], features=feature[None, None])
                    grown.append((at, output))
                above = grown
                outputs_of_level.append(torch.stack([output for _, output in grown]))
    shape = len(tokens), len(roots)
    return outputs + [torch.stack(rows).unflatten(0, shape) for rows in nodes]


def _entries(head, tokens, features):
    session = TreeSession(head.forward, head.device, head.dtype)
    return session, session.append(
        tokens[1:].tolist(), features=head.combine(features[None, : len(tokens) - 1])
    )


def plain_path(head, tokens, features, drafted):
    """Output at the last of `tokens` [n], the last `drafted` of which are drafted, in one plain
    causal pass a token.
    """
    known = len(tokens) - drafted
    inputs = head.combine(features[: known - 1])
    while True:
        count = len(inputs)
        outputs = head(
            tokens[None, 1 : count + 1], torch.arange(count)[None], None, None, inputs[None]
        )[0]
        if count == len(tokens) - 1:
            return outputs[-1]
        inputs = torch.cat([inputs, outputs[-1:]])
