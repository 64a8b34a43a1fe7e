"""Keys that there were before 0.1.0, each with the sentence that says what to do instead."""

from fnmatch import fnmatchcase

REMOVED: dict[str, str] = {
    "model.tensor_parallel": "model.device_map=auto lays the target over all GPUs.",
    "model.tensor_parallel_draft": "the draft is on model.device.",
    "model.verify": "weights are compared by their headers and sizes before every stage.",
    "verify": "stage=traces checks every shard, and makes again those that are broken.",
    "model.draft_device": "the draft is on model.device.",
    "data.test_share": "it is data.test_fraction.",
    "data.mix.*.draft_share": "it is data.mix.NAME.draft_fraction.",
    "data.sets.*.longest": "it is data.sets.NAME.max_tokens.",
    "traces.store": "paths.checkpoints names a folder that all workers share.",
    "selector.least_gain": "it is selector.min_gain.",
    "selector.devices": "a selector is trained by one process.",
    "draft.k": "it is draft.loss.k.",
    "draft.depth": "it is draft.loss.depth.",
    "draft.detach_features": "it is draft.loss.detach_features.",
    "draft.regression_weight": "it is draft.loss.regression.",
    "draft.classification_weight": "it is draft.loss.classification.",
    "draft.distillation_weight": "it is draft.loss.distillation.",
    "draft.labels*": "the target makes the labels in every step.",
    "draft.top_m": "the target makes the labels in every step.",
    "draft.label_dtype": "the target makes the labels in every step.",
    "draft.strategy": "every device has a full head.",
    "draft.nodes_in_pass": "128 nodes of a row go through the target in one pass.",
    "traces.node_chunk": "distributions take at most 256 MB a matrix; lower traces.micro_batch.",
    "draft.loss.objective": "the loss at a node is the cross-entropy with the target's p.",
    "draft.loss.eta": "the loss at a node is the cross-entropy with the target's p.",
    "draft.ema_decay": (
        "training ends with the last weights, or the best with draft.evaluate_every."
    ),
    "draft.lr_scale": "start a diverged training again with lower lr_muon and lr_adam.",
    "evaluation.head_run": "a run with traces.drafter=head decodes with the head's own selector.",
    "confidence_prompts": "evaluation.methods=[assisted,tuned] times thresholds of confidence.",
    "draft.max_bad_steps": "ten bad steps are passed over.",
}
"""`*` stands for any name."""


def removed(key: str) -> str | None:
    """Return what to do in place of giving `key`; None for a key that there never was."""
    for old, sentence in REMOVED.items():
        if fnmatchcase(key, old):
            return sentence
    return None
