"""Requests that are sent to an engine of vLLM, by hand."""

from itertools import count
from types import SimpleNamespace

import numpy as np

from benchmarks import engines


class OneAStep:
    """An engine that ends its oldest request at every step."""

    def __init__(self):
        self.running, self.most = list[str](), 0

    def add_request(self, number, prompt, params):
        self.running.append(number)
        self.most = max(self.most, len(self.running))

    def step(self):
        number = self.running.pop(0)
        text = SimpleNamespace(token_ids=[int(number), 7])
        return [SimpleNamespace(finished=True, request_id=number, outputs=[text])]


def test_a_step_is_shared_by_the_requests_under_way(monkeypatch):
    """A step takes a second; two requests share each but the last."""
    clock = count()
    both = SimpleNamespace(perf_counter=lambda: next(clock), process_time=lambda: 0)
    monkeypatch.setattr(engines, "time", both)
    monkeypatch.setattr(engines, "sampling_params", lambda *_: None)
    engine = OneAStep()
    texts, seconds = engines.served(engine, [[1]] * 5, 2, 2)
    assert engine.most == 2 and texts == [[number, 7] for number in range(5)]
    np.testing.assert_allclose(np.array(seconds)[:, 0], [0.5, 1, 1, 1, 1.5])
