"""A step of the decoding loop that leaves drafted tokens on the device until it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from nde_talf.decoding.device import asynchronous
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.session import TreeSession
from nde_talf.decoding.steps import Step, Stopwatch, record_of

if TYPE_CHECKING:
    from nde_talf.decoding.loop import SpeculativeDecoder


def possible(decoder: SpeculativeDecoder) -> bool:
    """Tell whether the decoder's models, verifier and process can do without the host."""
    drafter, process = decoder.drafter, decoder.process
    fits = decoder.target.form == "masks" and decoder.verify.on_device is not None
    fits = fits and (drafter is None or drafter.on_device)
    return fits and (process is None or process.textless)


def synchronised(clock: Callable[[], float], device: torch.device) -> Callable[[], float]:
    """Return a clock that waits until the device has done what was asked."""
    if not asynchronous(device):
        return clock

    def tick() -> float:
        torch.cuda.synchronize(device)
        return clock()

    return tick


def rest_of_step(
    decoder: SpeculativeDecoder,
    tree: DeviceTree,
    watch: Stopwatch,
    state: DecodingState,
    rng: Rng,
    session: TreeSession,
    drafter: Drafter | None,
) -> tuple[Step, DecodingState]:
    """Finish a step whose `tree` was drafted on the device, which is asked for numbers once.

    The draft goes on to the new root before the host knows it.
    """
    watch.charge("draft", policy=decoder.policy.seconds)

    hidden, features, raw = decoder.score(tree, state, session)
    watch.charge("target")

    accepted = tree.commit(*decoder.verify(tree, rng))
    watch.charge("verify")

    ahead, last = accepted.within(state.room), accepted.last(hidden)
    if drafter is not None and ahead is not None:
        drafter.advance(ahead, ahead.of(features) if drafter.takes_features else features)
        watch.charge("draft")
    read = accepted.read()
    if read.tokens[-1] < 0:
        decoder.verify(tree.to_host(), rng)  # which says better what is wrong
        raise ValueError(
            "weights: a distribution of the target or the draft has no positive, finite sum."
        )
    session.commit(read.rows)
    watch.charge("verify")

    state = state.after(read.tokens, *last)
    if drafter is not None and state.room >= 0:
        drafter.commit(len(read.tokens))
        watch.charge("draft")
    rows = accepted.of(raw)[: len(read.tokens)] if decoder.record else raw
    recorded = record_of(rows, read.tokens, decoder.record)
    watch.charge("other")
    return Step(read.tokens, read.nodes, watch.seconds, recorded), state
