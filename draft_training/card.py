"""The model card of a draft head. See `nde_talf.decoding.common.card`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nde_talf.decoding.common.card import hub_name, write_card
from nde_talf.draft_training.families import not_for_vllm

if TYPE_CHECKING:
    from nde_talf.draft_training.head import EagleHead

LOOP = """
```python
from nde_talf import Beam, CausalModel, EagleDrafter, Rng, SamplingSetting, \
SpeculativeDecoder, VERIFIERS

target = CausalModel.load("{target}")
drafter = EagleDrafter.from_pretrained("PATH OF THIS FOLDER", target)
decoder = SpeculativeDecoder(target, drafter, Beam(), VERIFIERS["nss"])
generation = decoder.generate(prompt_ids, 128, SamplingSetting(0.0), Rng.seeded(0))
```
"""
SERVED = """
```
vllm serve {target} --speculative-config '{{"method": "{kind}", "model": \
"PATH OF THIS FOLDER", "num_speculative_tokens": 4}}'
```
"""


def write_head_card(
    folder: Path,
    head: "EagleHead",
    facts: Mapping[str, Any] | None = None,
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Write the model card of `head` into its export, `folder`.

    Args:
        folder: the export.
        head: what was exported.
        facts: how it was trained.
        figures: of `held_out_report`.
    """
    where = str(head.target.module.config._name_or_path)
    base, reason = hub_name(where), not_for_vllm(head.family)
    known = {
        "target": (
            f"{base or head.target.module.config.model_type}, {head.target.layers} layers x"
            f" {head.target.hidden_size}"
        ),
        "layer": head.family.name,
        "features": (
            f"after layers {', '.join(map(str, head.feature_layers))}"
            if head.feature_layers
            else "after the final norm"
        ),
        "draft vocabulary": (
            len(head.vocabulary)
            if head.vocabulary is not None
            else f"all {head.target.vocab_size} tokens"
        ),
        "precision of the training": head.trained_in or "not known",
    }
    names = {
        "agreement": "most likely token is the target's, by depth",
        "accepted_length": "tokens a pass that this predicts, 1 + the sum of its products",
        "overlap": "acceptance rate at temperature 1 after 0, 1, ... drafted tokens",
        "kl": "KL divergence by depth, nats",
        "roots": "contexts",
    }
    use = LOOP.format(target=base or "FOLDER OF THE TARGET")
    use += (
        SERVED.format(target=base or "FOLDER OF THE TARGET", kind=head.kind)
        if reason is None
        else f"\n{reason}\n"
    )
    write_card(
        folder,
        f"Draft head ({head.kind}) for {base or 'a ' + str(head.target.module.config.model_type)}",
        "A draft head for lossless speculative decoding: it proposes tokens, and the target"
        " decides. The target's text, or its law where it samples, stays what it is without the"
        " head. It fits one target alone: `config.json` holds a fingerprint of its weights.",
        use,
        ["speculative-decoding", "draft-head", head.kind],
        base,
        {**known, **(facts or {})},
        {names[name]: value for name, value in (figures or {}).items() if name in names},
    )
