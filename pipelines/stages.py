"""All stages by name, in the order in which they run."""

from pipelines import draft, evaluate, pair, selector, traces
from pipelines.config import STAGES
from pipelines.stage import Stage


def all_stages() -> dict[str, Stage]:
    """pair -> traces -> selector -> draft -> evaluate."""
    stages = {module.STAGE.name: module.STAGE for module in (pair, traces, selector, draft, evaluate)}
    return {name: stages[name] for name in STAGES}
