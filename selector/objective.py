"""Throughput of a policy and the objective that trains it (Eqs. 4, 5 and 12, NDE paper)."""

from torch import Tensor


def taken(values: Tensor, action: Tensor) -> Tensor:
    """Take from each row of `values` [B, A] the entry of `action` [B]: [B]."""
    return values.gather(-1, action[:, None])[:, 0]


def policy_throughput(policy: Tensor, efficiency: Tensor, seconds: Tensor) -> Tensor:
    """Return tokens per second of a policy (Eq. 4): a ratio of expectations.

    Time and tokens add up over steps.

        TPS = sum_a pi(a) E[tau + 1 | a] / sum_a pi(a) T(a)

    Example: half of the time 2 tokens in 1 s, half of the time 4 in 3 s: (1 + 2) / (0.5 + 1.5) =
    1.5 tokens/s.

    Args:
        policy: [B, A], probabilities of the actions.
        efficiency: [B, A], E[tau + 1] of every action.
        seconds: [B, A], time of a step with every action.

    Returns:
        [B], tokens per second.
    """
    return (policy * efficiency).sum(-1) / (policy * seconds).sum(-1)


def selector_loss(
    logits: Tensor,
    efficiency: Tensor,
    seconds: Tensor,
    baseline: Tensor,
    tail_weight: float,
    tail_fraction: float,
    entropy_weight: float = 0.0,
    weights: Tensor | float = 1.0,
) -> Tensor:
    """Return Eq. 12: the policy's slowdown against the baseline, most of it on the worst roots.

        r = TPS / TPS_base
        loss = -mean log r + lambda mean over the worst alpha of max(0, 1 - r)^2 - w mean H(pi)

    The entropy term is not in the paper. Without it the policy puts all its mass on the best static
    tree and learns no more.

    Args:
        logits: [B, A] of the policy.
        efficiency: [B, A], E[tau + 1] of every action.
        seconds: [B, A], time of a step with every action.
        baseline: [B], the baseline's action.
        tail_weight: lambda.
        tail_fraction: alpha, of the batch.
        entropy_weight: w, with the entropy H in nats.
        weights: [B], of the roots in the first mean; 1: as printed.
    """
    log_policy = logits.log_softmax(-1)
    policy = log_policy.exp()
    ratio = policy_throughput(policy, efficiency, seconds)
    ratio = ratio / (taken(efficiency, baseline) / taken(seconds, baseline))
    regressions = (1 - ratio).clamp(min=0).square()
    worst = regressions.topk(max(1, round(tail_fraction * len(regressions)))).values
    entropy = -(policy * log_policy).sum(-1).mean()
    return -(weights * ratio.log()).mean() + tail_weight * worst.mean() - entropy_weight * entropy


def deviance(log_prediction: Tensor, efficiency: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    """Return the Poisson deviance of predicted E[tau + 1] from its labels, up to a constant.

        sum_a exp(u_a) - y_a u_a,   u = log_prediction, y = efficiency, both [B, A]

    Summed over actions, mean over roots with `weights` [B]. It is smallest where the
    prediction is the labels' mean, however noisy they are. (A squared error of logarithms would
    favour the less noisy of two equal trees, the shorter one.)
    """
    losses = (log_prediction.exp() - efficiency * log_prediction).sum(-1)
    return (weights * losses).mean()


def visits(efficiency: Tensor) -> Tensor:
    """Return the frequency [B] of a decoder's steps near each root, over its mean.

    A step commits `efficiency` [B] tokens. Roots are at equal distances in a text, and a decoder
    takes more steps where a step commits fewer tokens. Example: 2 and 8 tokens: 1.6 and 0.4.
    """
    return 1 / (efficiency * (1 / efficiency).mean())


def best_static(efficiency: Tensor, seconds: Tensor) -> int:
    """Return the index of the action with the fewest seconds per token if used at every root.

    Roots are at equal distances in a text, so a mean over roots is a mean over tokens, and times
    per token add up. Example: a step takes 1 s and commits 1 token in one half of a text, 9 in the
    other. Then 18 tokens take 9 + 1 steps: 1.8 tokens/s. The mean over roots of the tokens per step
    is 5, and no decoder reaches that: it takes most of its steps in the slow half.

    Args:
        efficiency: [R, A], E[tau + 1] of every action.
        seconds: [R, A] or [1, A], of a step.
    """
    return int((seconds.double() / efficiency.double()).mean(0).argmin())


def mean_tokens(tokens: Tensor) -> float:
    """Return the mean tokens of a decoder's steps over a text.

    A step commits `tokens` [R] at roots of equal distances. A root has weight 1 / tokens, the
    frequency of steps near it.
    """
    return float(1 / (1 / tokens.double()).mean())
