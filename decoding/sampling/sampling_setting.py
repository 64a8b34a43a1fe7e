"""Sampling settings: what a user chooses.

Imports no torch, so that a configuration can be read without it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import BeforeValidator, Field

from nde_talf.decoding.common.arguments import Natural, checked
from nde_talf.decoding.common.errors import UserError

off = BeforeValidator(lambda value: 0 if value is None else value)
"""Takes None for 0."""


@checked
@dataclass(frozen=True)
class SamplingSetting:
    """Settings of sampling, for example SamplingSetting(0.7, top_p=0.9).

    `nucleus` defines what top-k, top-p and min-p keep. They are applied in this order after the
    temperature, as in transformers. At temperature 0 they change nothing.
    """

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy: always the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """In (0, 1]: sample among the most probable tokens that together have this probability; 1 is
    off.
    """
    top_k: Annotated[Natural, off] = 0
    """Sample among that many most probable tokens; 0 or None is off."""
    min_p: Annotated[float, Field(ge=0, le=1), off] = 0.0
    """In [0, 1]: sample among the tokens with at least this fraction of the largest probability; 0
    or None is off.
    """

    @cached_property
    def cuts(self) -> bool:
        """Return True if any of top-k, top-p and min-p is on."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def __str__(self) -> str:
        cuts = (("top-k", self.top_k, 0), ("top-p", self.top_p, 1), ("min-p", self.min_p, 0))
        return ", ".join(
            [
                f"T={self.temperature:g}",
                *(f"{name}={value:g}" for name, value, off in cuts if value != off),
            ]
        )


RAW = SamplingSetting()
DRAWN = SamplingSetting(0.6)
"""Setting of a draft that draws several tokens at a node, where the target is greedy."""
AUTO, MATCH = "auto", "match"


def read_draft_temperature(
    value: str | float, key: str = "draft_temperature"
) -> SamplingSetting | str:
    """Parse the draft's temperature as a user wrote it.

    "auto" gives AUTO and "match" gives MATCH; "raw" or a number gives a setting. For example "0.5"
    gives SamplingSetting(0.5), with top-p 1. key: its name in the message.

    Raises:
        UserError: it is none of the words, and no number of at least 0.
    """
    if value in (AUTO, MATCH):
        return str(value)
    if value == "raw":
        return RAW
    try:
        temperature = float(value)
    except (TypeError, ValueError):
        temperature = -1.0
    if not 0 <= temperature < float("inf"):
        raise UserError(f"{key}={value}: choose auto, match, raw, or a number of at least 0.")
    return SamplingSetting(temperature)


def drafted_under(
    draft: SamplingSetting | str, setting: SamplingSetting, trees: str
) -> SamplingSetting:
    """Choose the draft's setting for a target that samples under `setting`.

    Verification is lossless for any draft distribution, as long as it sees the one that tokens were
    drawn from. So this choice decides the speed alone. AUTO is:

    - `RAW` for trees of picked tokens (`top_k`), which the draft's confidence shapes. Their papers
      print it so.
    - At temperature 0 `DRAWN` for trees with several draws at a node (`iid`,
      `without_replacement`). Warped like the target, the draft would give all probability to one
      token, and every such tree would be a line. 0.6 is the DySpec paper's draft temperature; an
      unwarped draft draws improbable tokens, of which a greedy target accepts fewer.
    - MATCH for all others: a draft that is warped like the target is accepted more often. At
      temperature 0 a path then holds the draft's most probable tokens. The branches of a delayed
      tree are equal there, that is one path; with a temperature of their own they differ, but their
      trunk and each of them hold improbable tokens too, and fewer are accepted.

    Args:
        setting: the target's.
        draft: a setting of its own, AUTO, or MATCH for the target's.
        trees: the kind of tree that the policy drafts (`TreePolicy.trees`).
    """
    if isinstance(draft, SamplingSetting):
        return draft
    if draft == AUTO and trees == "top_k":
        return RAW
    return (
        DRAWN
        if draft == AUTO and setting.temperature == 0 and trees in ("iid", "without_replacement")
        else setting
    )


def feature_setting(setting: SamplingSetting) -> SamplingSetting:
    """Choose the setting under which a policy's features look at rows.

    At temperature 0, where a warped row holds one token and has neither entropy nor confidence, it
    is `RAW`; otherwise the `setting` that is sampled under.
    """
    return RAW if setting.temperature == 0 else setting
