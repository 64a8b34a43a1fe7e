"""The shipped pair's latency table on this machine, measured once and kept in the user's cache."""

from contextlib import suppress

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import content_digest, user_cache
from nde_talf.decoding.model import CausalModel
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.measure import machine, measure_latency

CONTEXTS = (64, 320)
REPEATS = 1
PLACES = ("target", "draft")


def table_here(
    shipped: LatencyTable, target: CausalModel, draft: CausalModel, text: list[int]
) -> LatencyTable:
    """Return the shipped table if it is of this machine, or else one that is measured here.

    It is measured in seconds and kept in the folder `nde-talf` of the user's cache
    (XDG_CACHE_HOME, ~/.cache); where that cannot be written, it is measured each time.

    Args:
        shipped: the table that the pair ships with.
        target: the shipped target.
        draft: its draft.
        text: tokens that the steps start with.
    """
    here = {key: value for key, value in machine(target, draft).items() if key not in PLACES}
    if here.items() <= shipped.machine.items():
        return shipped
    cache = user_cache()
    key = content_digest({"machine": here, "models": shipped.models})
    path = cache / f"latency-{key[:16]}.json"
    with suppress(UserError):
        return LatencyTable.load(path)
    table = measure_latency(target, draft, text, CONTEXTS, [*shipped.verify], REPEATS)
    with suppress(OSError, UserError):
        cache.mkdir(parents=True, exist_ok=True)
        table.save(path)
    return table
