"""Throughput of a policy and the objective that trains it (Eqs. 4, 5 and 12, NDE paper): pure functions."""

import torch
from torch import Tensor


def policy_throughput(policy: Tensor, efficiency: Tensor, seconds: Tensor) -> Tensor:
    """Eq. 4: tokens per second [B] of action probabilities `policy` [B, A], given E[tau + 1] and step times [B, A].

    A ratio of expectations, not an expectation of ratios: time and tokens add up over steps.
    """
    return (policy * efficiency).sum(-1) / (policy * seconds).sum(-1)


def baseline_throughput(baseline: Tensor, efficiency: Tensor, seconds: Tensor) -> Tensor:
    """Tokens per second [B] of one action index each, `baseline` [B]."""
    at = baseline[:, None]
    return (efficiency.gather(-1, at) / seconds.gather(-1, at))[:, 0]


def selector_loss(
    logits: Tensor,
    efficiency: Tensor,
    seconds: Tensor,
    baseline: Tensor,
    tail_weight: float,
    tail_fraction: float,
    entropy_weight: float = 0.0,
) -> Tensor:
    """Eq. 12: -log(TPS / TPS_base), plus `tail_weight` (lambda) times the mean of the largest `tail_fraction` (alpha)
    of the squared relative regressions below the baseline within the batch; less `entropy_weight` times the policy's mean
    entropy in nats (not in the paper: without it the policy saturates on the best static tree and learns no more)."""
    log_policy = logits.log_softmax(-1)
    policy = log_policy.exp()
    ratio = policy_throughput(policy, efficiency, seconds)
    ratio = ratio / baseline_throughput(baseline, efficiency, seconds)
    regressions = (1 - ratio).clamp(min=0).square()
    worst = regressions.topk(max(1, round(tail_fraction * len(regressions)))).values
    entropy = -(policy * log_policy).sum(-1).mean()
    return -ratio.log().mean() + tail_weight * worst.mean() - entropy_weight * entropy


def deviance(log_prediction: Tensor, efficiency: Tensor) -> Tensor:
    """Poisson deviance of predicted E[tau + 1] (log_prediction [B, C]) from labels [B, C], summed over options, mean over
    roots, up to a constant: least where the prediction is the labels' mean, however noisy they are. (A logarithm of noisy
    labels would favour the less noisy of two equal trees, the shorter one.)"""
    return (log_prediction.exp() - efficiency * log_prediction).sum(-1).mean()


def aggregate_throughput(chosen: Tensor, efficiency: Tensor, seconds: Tensor) -> Tensor:
    """Tokens per second over many steps, one action index [R] each: sum of tokens over sum of time (a scalar)."""
    at = chosen[:, None]
    return efficiency.gather(-1, at).sum() / seconds.gather(-1, at).sum()


def best_static(efficiency: Tensor, seconds: Tensor, allowed: Tensor | None = None) -> int:
    """Index of the action with the most tokens per second if used at every root; `allowed` [A] restricts the choice."""
    throughput = efficiency.double().mean(0) / seconds.double().mean(0)
    if allowed is not None:
        throughput = throughput.masked_fill(~allowed, float("-inf"))
    return int(throughput.argmax())


def split_half_choice(samples: Tensor, seconds: Tensor) -> tuple[Tensor, Tensor]:
    """What choosing root by root could win: the best action on one half of the super-trees, scored on the other.

    samples [R, s, A] estimates of E[tau + 1], seconds [R, A]. Returns tokens [2 R] and seconds [2 R] of the choices, each
    half once the judge. Choosing and scoring on the same samples would count label noise as gain.
    """
    half = samples.shape[1] // 2
    first, second = samples[:, :half].mean(1), samples[:, half:].mean(1)
    tokens, times = [], []
    for judge, other in ((first, second), (second, first)):
        at = (judge / seconds).argmax(-1, keepdim=True)
        tokens.append(other.gather(-1, at)[:, 0])
        times.append(seconds.gather(-1, at)[:, 0])
    return torch.cat(tokens), torch.cat(times)
