"""The stages of a run by name, in their order."""

from nde_talf.pipelines.stages import draft, evaluate, latency, pair, selector, traces

BY_NAME = {
    module.STAGE.name: module.STAGE for module in (pair, latency, traces, selector, draft, evaluate)
}
