"""A pytest plugin that repeats every `generate` of any tests through three drafts of `speculate`.

From a checkout of transformers, with this project's root as NDE:

    PYTHONPATH=$NDE:$NDE/tests/nde_talf python -m pytest -p repeat_generate tests/generation

A call is repeated greedily, without its streamer, on copies of its arguments. Its text has to be
that of `generate` alone, or the call refused; else the test fails. Calls in other types than
float32 are counted and not repeated. The summary has the counts and the refusals.
"""

import os
from collections import Counter
from copy import deepcopy
from functools import wraps

import torch
from transformers import GenerationMixin

from nde_talf import Action, Delayed, UserError, speculate

MOST = 20_000_000
"""Weights of a model that is copied as its own draft."""


class DifferentError(BaseException):
    """Another text, or an error in the place of a text; no test's `except Exception` takes it."""


class Repeats:
    def __init__(self):
        self.counts, self.refusals, self.faults = Counter(), Counter(), []
        self.inside = False

    def pytest_configure(self, config):
        self.plain = GenerationMixin.generate

        @wraps(self.plain)
        def generate(model, *values, **named):
            if self.inside or named.get("custom_generate"):
                return self.plain(model, *values, **named)
            self.inside = True
            try:
                before = self.copy(values, named)
                result = self.plain(model, *values, **named)
                state = torch.get_rng_state()
                self.repeat(model, before)
                torch.set_rng_state(state)
                return result
            finally:
                self.inside = False

        GenerationMixin.generate = generate

    def pytest_unconfigure(self, config):
        GenerationMixin.generate = self.plain

    def pytest_terminal_summary(self, terminalreporter):
        report = terminalreporter
        report.section("generate, repeated through speculate")
        report.line(", ".join(f"{count} {name}" for name, count in self.counts.most_common()))
        for reason, count in self.refusals.most_common():
            report.line(f"{count} refused: {reason}")
        for fault in self.faults:
            report.line(fault)

    def copy(self, values, named):
        """The arguments, before the test's criteria have seen a text; None: they have no copy."""
        modules = [each for each in (*values, *named.values()) if isinstance(each, torch.nn.Module)]
        try:
            return deepcopy(
                (values, named | {"streamer": None}), {id(each): each for each in modules}
            )
        except Exception:
            return None

    def repeat(self, model, given):
        if given is None or getattr(model, "dtype", None) != torch.float32:
            self.counts["not copied" if given is None else "not in float32"] += 1
            return
        theirs = self.text(model, given)
        drafts = {"ngram": ("ngram",), "itself": (model,)}
        if sum(weight.numel() for weight in model.parameters()) <= MOST:
            drafts["noisy"] = noisy(model), Delayed(Action(2, 1, 2))
        for name, draft in drafts.items():
            ours = self.text(model, given, custom_generate=speculate(*draft))
            kind = outcome(theirs, ours)
            self.counts[kind] += 1
            if kind == "refused":
                self.refusals[str(ours).removeprefix("speculate: ").split(". ")[0]] += 1
            if kind == "different":
                test = os.environ.get("PYTEST_CURRENT_TEST")
                self.faults.append(f"{test}, draft {name}: {ours!r} for {theirs!r}"[:600])
                raise DifferentError(self.faults[-1])

    def text(self, model, given, **more):
        """The text [B, n], or the error that was raised."""
        values, named = self.copy(*given)
        try:
            greedy = {"do_sample": False, "num_return_sequences": 1}
            result = self.plain(model, *values, **named | greedy | more)
        except Exception as error:
            return error
        return result if isinstance(result, torch.Tensor) else result.sequences


def outcome(theirs, ours) -> str:
    if isinstance(ours, UserError):
        return "refused"
    if isinstance(theirs, Exception):
        return "no call" if isinstance(ours, type(theirs)) else "different"
    return "equal" if isinstance(ours, torch.Tensor) and torch.equal(ours, theirs) else "different"


def noisy(model):
    """A draft like the model, whose tokens are often rejected."""
    draft = deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.is_floating_point():
                weight.add_(
                    0.3 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
                )
    return draft


def pytest_configure(config):
    config.pluginmanager.register(Repeats(), "repeats")
