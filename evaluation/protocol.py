"""Protocol by which methods are timed and compared, for every table, picture and sentence.

PROTOCOL is also printed in the report. `CONTROL` is the A/A control: plain decoding a second time,
in a decoder of its own, under another name and with the same seeds, so that it does exactly the
same work. Any deviation of its interval from 1 is noise of the clock. Plain decoding is the control
because every speed-up of a table is divided by it.
"""

BASELINE = "autoregressive"
CONTROL = "autoregressive (A/A control)"
STATIC_TREE, HEAD_TREE = "static tree of {}", "static tree of the head"
"""Keys of the methods that decode with the best static tree of a rule, or of the draft head."""
GREEDY_TREE, SELECTOR = STATIC_TREE.format("greedy"), "selector of {}"
"""Keys of the static tree of all rules at temperature 0, and of a rule's selector."""
BY_DOMAIN = "static trees by domain"
"""Key of the method that decodes every domain with its best static tree."""
NOT_TRUSTED = "clock not trusted"

PROTOCOL = (
    (
        "All methods run in one process, prompt by prompt, in an order that is drawn anew for every"
        " prompt, so that no method always follows the same other one."
    ),
    (
        "Prompts, seeds and settings are fixed before the first measurement. A warm-up that is not"
        " counted comes first. All methods share the seed of a prompt."
    ),
    (
        "A text ends where the target ends it, or after the number of tokens asked for. What a pass"
        " gives after an end counts in no method."
    ),
    (
        "A speed-up is one figure everywhere: the method's tokens per second over those of plain"
        " autoregressive decoding, both as total tokens over total seconds on the same prompts. The"
        " time until the first token is not in it."
    ),
    (
        "Brackets are 95 % bootstrap intervals, widened where prompts are few. Prompts are"
        " resampled, for both sides of a ratio together; for a mean over"
        " settings the same resampled prompts count in every setting. The best of several methods"
        " is named by its figure, and its interval does not account for having chosen it."
    ),
    (
        "On a CPU every figure is also given in CPU time of the process, which other work on the"
        " machine disturbs less."
    ),
    (
        "The A/A control is plain decoding under a second name. Unless its interval holds 1"
        " and lies within 0.9 to 1.1, or is narrower than the effect that is claimed, the table"
        f" carries the line “{NOT_TRUSTED}”, and nothing is concluded from it."
    ),
)


def trusted(control: list[float] | None, claim: list[float] | None = None) -> bool | None:
    """Return whether a clock is trusted, from its A/A control's ratio [value, low, high].

    The interval must hold 1, and be within 0.9 to 1.1 or narrower than the claimed effect: high /
    low is below the claim's smallest effect in its interval. For example, a control of
    [0.38, 1.03] is 2.7 wide, too wide for a speed-up of 2.02 and narrow enough for one of [3.1,
    3.0, 3.2].

    Args:
        control: None where there was none; then the answer is None.
        claim: the ratio [value, low, high] that the clock is to support.
    """
    if not control:
        return None
    _, low, high = control
    effect = max(claim[1], 1 / claim[2]) if claim else 0
    return low <= 1 <= high and (0.9 <= low <= high <= 1.1 or high < low * effect)
