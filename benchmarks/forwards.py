"""Counting what happens inside the models, so that a loop's own share is what is left."""

import time
from collections.abc import Callable

from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.draft_training.head import EagleHead
from nde_talf.evaluation.benchmark import Generate
from nde_talf.evaluation.loops import add_matches, record_of


class ForwardClock:
    """Seconds inside the forward passes and output layers of the models it watches, and how many
    passes the draft made.

    Watch a model before anything is built of it.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.seconds, self.draft_passes = 0.0, 0

    def watch(self, model: CausalModel | EagleHead, draft: bool = False) -> None:
        if isinstance(model, CausalModel):
            reader, hidden = model.reader, self._timed(model.hidden, draft)
            model.hidden, model.logits = hidden, self._timed(model.logits, False)
            model.reader = lambda layers: self._timed(reader(layers), draft) if layers else hidden
        else:
            model.forward = self._timed(model.forward, draft)

    def _timed(self, function: Callable, counted: bool) -> Callable:
        def timed(*args, **kwargs):
            self.draft_passes += counted
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - started
            return result

        return timed


def watched(
    name: str,
    decoder: SpeculativeDecoder,
    setting: SamplingSetting,
    new_tokens: int,
    clock: ForwardClock,
) -> Generate:
    """A method of our loop (see `evaluation.methods.Speculative`) whose records say what happened
    inside the models.
    """

    def generate(prompt: list[int], seed: int, kind: str):
        stream = decoder.blocks(prompt, new_tokens, setting, Rng.seeded(seed))
        next(iter(stream))  # the prefill
        clock.reset()
        started = time.process_time()
        for _ in stream:
            pass
        record = record_of(name, setting, stream.generation)
        record.cpu_seconds = time.process_time() - started
        add_matches(record, decoder.drafting)
        record.forward_seconds, record.draft_passes = clock.seconds, clock.draft_passes
        return record

    return generate
