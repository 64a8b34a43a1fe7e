"""All stages by name, in the order in which they run."""

from pipelines import ablations, draft, evaluate, latency, pair, selector, traces
from pipelines.stage import Stage


def all_stages() -> dict[str, Stage]:
    """pair -> latency -> traces -> selector -> draft -> evaluate; and ablations, which only runs when asked for."""
    modules = (pair, latency, traces, selector, draft, evaluate, ablations)
    return {module.STAGE.name: module.STAGE for module in modules}
