"""Muon against torch's own, which computes in bfloat16 everywhere."""

import torch

from nde_talf.draft_training.training.muon import Muon


def test_steps_are_those_of_torch_up_to_its_bfloat16():
    torch.manual_seed(0)
    start = [torch.randn(24, 64), torch.randn(64, 24), torch.randn(24, 64)]
    gradients = [[torch.randn_like(x) for x in start] for _ in range(3)]
    ends = []
    for make in (
        lambda p: Muon(p, lr=0.02),
        lambda p: torch.optim.Muon(p, lr=0.02, momentum=0.95, weight_decay=0.0),
    ):
        parameters = [x.clone().requires_grad_() for x in start]
        optimizer = make(parameters)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        ends.append(parameters)
    for ours, theirs, x in zip(*ends, start, strict=True):
        moved = (theirs - x).norm()
        assert moved > 0.1
        assert (ours - theirs).norm() < 0.03 * moved
